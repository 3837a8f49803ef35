"""Messages of the commands of `minisgl` other than their answers, and their exit."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from .errors import ClientError, Unavailable

# All control characters except tabs and line ends.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

_ANY_WIDTH = 1_000_000


class CommandError(Exception):
    """A command cannot continue, although its arguments are valid; the message is one line."""


def without_controls(text: str) -> str:
    """Text of a model or a server, safe for a terminal: without control characters."""
    return _CONTROLS.sub("", text)


def write_answer(text: str) -> None:
    """Writes to stdout at once: unchanged into a pipe, without control characters on a terminal."""
    sys.stdout.write(without_controls(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Ends the program with one line: status 1 for errors, 2 for a wrong argument, 130 for Ctrl-C."""
    try:
        yield
    except ClientError as error:
        fail(f"{type(error).__name__}: {error}{hint(error)}", 1)
    except CommandError as error:
        fail(str(error), 1)
    except ImportError as error:
        fail(f"{error}; pip install 'minisgl-backend[client]'", 1)
    except ValueError as error:
        fail(str(error), 2)
    except KeyboardInterrupt:
        fail("stopped", 130)


def hint(error: Exception) -> str:
    """What to check, for an error message that means that no server answered."""
    if isinstance(error, Unavailable) and "connect" in str(error):
        ports = "port 8001 for gRPC, 8000 with --protocol http, 9000 with --openai"
        return f"; is the server running (minisgl serve), and is this its address ({ports})?"
    return ""


def fail(message: str, exit_status: int) -> NoReturn:
    """Ends the program with a line on stderr."""
    say_error(f"[red]error:[/red] {escape(message)}")
    raise typer.Exit(exit_status) from None


def say_error(markup: str) -> None:
    """A line on stderr, never folded."""
    Console(stderr=True, soft_wrap=True).print(without_controls(markup), highlight=False)


def remark(text: str) -> None:
    """A remark in addition to the answer, shown on terminals only, not in pipes."""
    if sys.stderr.isatty():
        Console(stderr=True).print(f"[dim]{escape(text)}[/dim]", highlight=False)


def progress(text: str) -> contextlib.AbstractContextManager[object]:
    """Says what the command waits for: on a terminal while it lasts, otherwise as a line on stderr."""
    console = Console(stderr=True)
    if console.is_terminal:
        return console.status(f"{escape(text)} ...")
    typer.echo(f"{text} ...", err=True)
    return contextlib.nullcontext()


def print_table(table: Table) -> None:
    """At most as wide as the terminal; never folded in a pipe."""
    _stdout().print(table)


@dataclass(frozen=True)
class FigureTable:
    """A table whose figures must not be cut; the first column names the rows."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    padding: int = 1  # on each side of a cell

    def columns(self, chosen: Sequence[int]) -> Table:
        """The first column and the chosen ones."""
        table = Table(box=box.SIMPLE, padding=(0, self.padding))
        for place in (0, *chosen):
            # Plain text: a name in brackets is not markup.
            table.add_column(Text(self.headings[place]), justify="right" if place else "left", no_wrap=True)
        for row in self.rows:
            table.add_row(*(Text(row[place]) for place in (0, *chosen)))
        return table


def print_figures(figures: FigureTable) -> None:
    """On a terminal as many columns side by side as fit; in a pipe all."""
    console = _stdout()
    console.print(Text(figures.title, "italic"), soft_wrap=True)
    for group in _groups(figures, console.width):
        table = figures.columns(group)
        # A column wider than the terminal is left to the terminal: rich would cut it.
        _stdout(max(console.width, _width(table))).print(table)
    if figures.caption:
        console.print(Text(figures.caption, "dim"))


def _groups(figures: FigureTable, width: int) -> Iterator[list[int]]:
    group: list[int] = []
    for place in range(1, len(figures.headings)):
        if group and _width(figures.columns([*group, place])) > width:
            yield group
            group = []
        group.append(place)
    yield group


def _width(table: Table) -> int:
    return _stdout(_ANY_WIDTH).measure(table).maximum


def _stdout(width: int | None = None) -> Console:
    if width is None and sys.stdout.isatty():
        return Console()
    return Console(width=width or _ANY_WIDTH, height=25)  # without a height rich takes 80 columns where TERM is dumb
