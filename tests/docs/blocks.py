"""The code blocks of README.md and docs/, and what a comment in front of a block says about running it.

    <!-- norun: REASON -->      is not run: the reason says what it needs that no test has
    <!-- server -->             serves in the foreground: it has to become ready, and Ctrl-C has to end it
    <!-- needs: PACKAGE ... -->  Python that runs where these packages of the extra `frameworks` are
    <!-- excerpt: FILE -->      stands in this file of the repository, word for word

Any other `bash` or `python` block is run as it is written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("bash", "python")
SHOWN = ("dockerfile", "ini", "json", "nginx", "protobuf", "text", "toml", "yaml")  # nothing in them can be run

_MARK = re.compile(r"<!-- (?P<name>norun|server|needs|excerpt)(?:: (?P<words>[^\n]+?))? -->\s*")

_FILE = re.compile(r"(?:[\w.-]+/)*[\w-]+\.(?:py|sh|md|pbtxt|yml|toml)")


@dataclass(frozen=True)
class Block:
    """One code block. `line` is that of its first line of code, from 1; `language` is empty where it has none."""

    page: Path
    line: int
    language: str
    code: str
    mark: str  # norun, server, needs, excerpt, or empty
    words: str  # of the mark: the reason, the packages, the file

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """README.md and everything in docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """All code blocks of a page, in their order; an indented one has no language."""
    found = []
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))
    before = None
    for token in tokens:
        if token.type in ("fence", "code_block"):
            mark = _MARK.fullmatch(before.content) if before is not None and before.type == "html_block" else None
            start = token.map[0] if token.map else 0
            found.append(
                Block(
                    page=page,
                    line=start + (2 if token.type == "fence" else 1),
                    language=token.info.strip(),
                    code=token.content,
                    mark=mark["name"] if mark else "",
                    words=(mark["words"] or "") if mark else "",
                )
            )
        before = token
    return found


def named_files() -> list[tuple[str, str]]:
    """What the pages' text has as `code` and looks like a file of the repository, each with the page's name."""
    found = []
    for page in pages():
        for token in MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8")):
            spans = [span.content for span in token.children or [] if span.type == "code_inline"]
            found += [(span, page.name) for span in spans if _FILE.fullmatch(span)]
    return found


def planned_files() -> set[str]:
    """What rows of the design pages' tables call new."""
    rows = [row for page in (ROOT / "docs" / "design").glob("*.md") for row in page.read_text("utf-8").splitlines()]
    planned = [row for row in rows if row.startswith("|") and re.search(r"\bnew\b", row)]
    return {name for row in planned for name in re.findall(r"`([\w/]+\.py)`", row)}


def all_blocks() -> list[Block]:
    return [block for page in pages() for block in blocks(page)]
