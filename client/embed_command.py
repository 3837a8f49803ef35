"""`minisgl embed`: embeddings of texts, or scores of how well they answer a query."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from .console import errors_in_one_line, write_answer
from .server_options import ServerOptions, options_of


@options_of("server", ServerOptions)
def embed(
    texts: Annotated[list[str], typer.Argument(help="The texts; - reads one a line from the standard input.")],
    server: ServerOptions,
    dimensions: Annotated[int | None, typer.Option(help="Of each vector; default: all that the model has.")] = None,
    query: Annotated[str | None, typer.Option(help="Print a score of each text instead: how well it answers.")] = None,
) -> None:
    """Print the embedding of each text as a line of JSON, or with --query its score."""
    lines = [line.rstrip("\n") for line in sys.stdin] if texts == ["-"] else texts
    with errors_in_one_line(), server.connect() as client:
        found: list[Any] = (
            client.embed(lines, dimensions=dimensions).vectors if query is None else client.score(query, lines)
        )
        for one in found:
            write_answer(json.dumps(one) + "\n")
