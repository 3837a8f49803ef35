"""Commands that ask no running server: they start one, prepare one, or say whether one would run here.

Each hands its arguments, as they are, to the program that knows them; `--help` too.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand


class _HandedOn(TyperCommand):
    """Leaves all arguments in `Context.args`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return ctx.args


def add_local_commands(app: typer.Typer) -> None:
    """Registers them."""

    @app.command(cls=_HandedOn)
    def serve(context: typer.Context) -> None:
        """Serve a model on this machine until Ctrl-C: Triton's protocols and OpenAI's API."""
        from minisgl_backend.host.server_supervisor import main

        raise typer.Exit(main(context.args, "minisgl serve"))

    @app.command(cls=_HandedOn)
    def init(context: typer.Context) -> None:
        """Write a model repository for a model and engine options, which any tritonserver serves."""
        from minisgl_backend.host.new_repository import main

        raise typer.Exit(main(context.args))

    @app.command(cls=_HandedOn)
    def check(context: typer.Context) -> None:
        """Say what engine options come to for a model on this machine, without loading it."""
        from minisgl_backend.__main__ import app as engine

        named = ["--model"] if context.args and not context.args[0].startswith("-") else []
        engine(["check", *named, *context.args], prog_name="minisgl")

    @app.command(cls=_HandedOn)
    def doctor(context: typer.Context) -> None:
        """Say what this machine can run and what is missing. Exit status 0: the demo model could be served."""
        from minisgl_backend.host.doctor import main

        raise typer.Exit(main(context.args))
