"""Shows an answer while it is written: Markdown on a terminal, otherwise the plain text."""

from __future__ import annotations

from typing import Protocol

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from ..console import without_controls, write_answer

_FRAMES_PER_SECOND = 10


class Screen(Protocol):
    """Shows one answer."""

    def think(self, text: str) -> None: ...

    def write(self, text: str) -> None: ...

    def end(self) -> None:
        """The answer is complete, or stopped. May be called again."""


class PlainScreen:
    """The plain text. Reasoning is left out: a pipe needs only the answer."""

    def think(self, text: str) -> None:
        pass

    def write(self, text: str) -> None:
        write_answer(text)

    def end(self) -> None:
        pass


class MarkdownScreen:
    """Blocks of Markdown: complete ones are printed for good, the last one is redrawn."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rest = ""  # the text after the last complete block
        self._live: Live | None = None
        self._thinks = False
        self._blocks = 0

    def think(self, text: str) -> None:
        if self._live is None:
            self._thinks = True
            self._console.print(Text(without_controls(text)), style="dim italic", end="", soft_wrap=True)

    def write(self, text: str) -> None:
        if self._live is None and text:
            if self._thinks:
                self._console.print("\n")
            # Live draws on a thread, which sees a whole `_rest`, old or new.
            self._live = Live(
                console=self._console,
                get_renderable=lambda: _Tail(self._rest),
                refresh_per_second=_FRAMES_PER_SECOND,
                transient=True,
                vertical_overflow="crop",
            )
            self._live.start()
        self._rest += without_controls(text)
        if "\n" in text:
            self._print_complete()

    def end(self) -> None:
        rest, self._rest = self._rest, ""
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._thinks:
            self._console.print()
        self._thinks = False
        self._print(rest)
        self._blocks = 0

    def _print_complete(self) -> None:
        """Prints all blocks but the last one: nothing that follows can change them."""
        start = last_block(self._rest)
        if start:
            complete, self._rest = self._rest[:start], self._rest[start:]
            self._print(complete)

    def _print(self, text: str) -> None:
        if text.strip():
            if self._blocks:
                self._console.print()
            self._blocks += 1
            self._console.print(render(text))


class _Tail:
    """The last lines of a block, up to the terminal's height: a higher frame could not be redrawn."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self._text.strip():
            return
        lines = console.render_lines(render(self._text), options.update(height=None), pad=False)
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()


def render(text: str) -> Markdown:
    """Markdown without HTML; tags are shown as text: rich would leave out <think> and its content."""
    markdown = Markdown("", hyperlinks=False)
    markdown.markup, markdown.parsed = text, _parser().parse(text)
    return markdown


def last_block(text: str) -> int:
    """Start of the text's last block; 0 if it is the only one."""
    blocks = [token.map for token in _parser().parse(text) if token.level == 0 and token.map]
    if len(blocks) < 2:
        return 0
    return sum(len(line) for line in text.splitlines(keepends=True)[: blocks[-1][0]])


def _parser() -> MarkdownIt:
    return MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")
