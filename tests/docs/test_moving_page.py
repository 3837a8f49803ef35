"""What docs/moving.md says that options, flags and metrics are called here is what they are called."""

from __future__ import annotations

import re

import pytest
from markdown_it import MarkdownIt

from minisgl_backend.config import OPTIONS
from minisgl_backend.foreign_options import FOREIGN_OPTIONS, ForeignOption
from minisgl_backend.host.options.server import server_parser
from tests.docs.blocks import ROOT

PAGE = ROOT / "docs" / "moving.md"


def names_here() -> list[str]:
    """The `code` of each table's last column, once."""
    found: list[str] = []
    cells: list[list[str]] = []
    for token in MarkdownIt("commonmark").enable("table").parse(PAGE.read_text(encoding="utf-8")):
        if token.type == "tr_open":
            cells = []
        elif token.type == "inline":
            cells.append([span.content for span in token.children or [] if span.type == "code_inline"])
        elif token.type == "tr_close":
            found += cells[-1]
    return list(dict.fromkeys(found))


FLAGS = [name.split()[0] for name in names_here() if name.startswith("--")]
SETTINGS = [match[1] for name in names_here() if (match := re.fullmatch(r"([a-z_]+)=.*", name))]
METRICS = [metric for name in names_here() for metric in re.findall(r"minisgl_[a-z_]+", name)]


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_is_one(flag: str) -> None:
    assert flag in {flag for action in server_parser("minisgl serve")._actions for flag in action.option_strings}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_an_option(name: str) -> None:
    assert name in OPTIONS


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_one(name: str) -> None:
    assert f'"{name}' in (ROOT / "minisgl_backend" / "serving" / "metrics.py").read_text(encoding="utf-8")


HEADS = {
    "vLLM": "`vllm serve`",
    "SGLang": "`sglang serve`",
    "TensorRT-LLM": "`trtllm-serve`",
    "Mini-SGLang": "Mini-SGLang",
    "llama.cpp": "`llama-server`",
    "Ollama": "Ollama",
}


@pytest.mark.parametrize(("server", "rows"), FOREIGN_OPTIONS.items())
def test_the_tables_are_what_the_command_line_says(server: str, rows: tuple[ForeignOption, ...]) -> None:
    table = [f"| {HEADS[server]} | here |", "| --- | --- |"]
    table += [f"| {', '.join(f'`{flag}`' for flag in row.flags)} | {row.here} |" for row in rows]
    assert "\n".join(table) + "\n\n" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(("server", "rows"), FOREIGN_OPTIONS.items())
def test_what_is_the_same_is_there(server: str, rows: tuple[ForeignOption, ...]) -> None:
    ours = server_parser("minisgl serve").option_names()
    for row in rows:
        for flag in row.flags:
            assert row.here.startswith(("the same", f"`{flag}`")) == (flag in ours) or flag == "--attention-backend", (
                flag
            )
