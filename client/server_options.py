"""Options of the commands that use Triton's ensemble or, with --openai, any server with OpenAI's API."""

from __future__ import annotations

from typing import Annotated

import typer

OpenAIUrl = Annotated[
    str | None, typer.Option(metavar="URL", help="OpenAI's API instead: HOST:PORT, or https://HOST/PATH.")
]
ApiKey = Annotated[str | None, typer.Option(help="With --openai.", show_envvar=True, envvar="OPENAI_API_KEY")]
ModelOfEither = Annotated[
    str | None, typer.Option(help="Name of the model; default: ensemble, with --openai the server's first.")
]
