"""`python -m minisgl_backend`."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner, Result

from minisgl_backend.__main__ import PANELS, app
from minisgl_backend.config import OPTIONS


@pytest.fixture(autouse=True)
def _keep_logging() -> Iterator[None]:
    """The commands log to the stderr of the moment, which ends with the test."""
    package = logging.getLogger("minisgl_backend")
    state = (list(package.handlers), package.level, package.propagate)
    yield
    package.handlers, package.level, package.propagate = state


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})


def plain(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"[│╭╮╰╯─┃┏┓┗┛━]", " ", text))


def test_every_option_is_on_every_page() -> None:
    assert sorted(name for names in PANELS.values() for name in names) == sorted(OPTIONS)
    for page in (("--help",), ("generate", "--help"), ("check", "--help")):
        text = plain(run(*page).output)
        for option in OPTIONS.values():
            assert bool(re.search(rf"{option.flags[0]}(?![\w-])", text)) != option.internal, (page, option.name)
    table = plain(run("options").output)
    assert all((name[:8] in table) != option.internal for name, option in OPTIONS.items() if name != "runner")


def test_check_resolves_without_loading() -> None:
    result = run("check", "--page-size", "32", "--attn", "torch")
    assert result.exit_code == 0
    assert "Qwen3ForCausalLM" in result.output
    assert "page_size 32" in plain(result.output)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--page-size", "3"), "page_size is 3; allowed: a power of two"),
        (("--tp", "x"), "tp is 'x'"),
        (("--model", "/nowhere"), "/nowhere"),
        (("--attn", "best"), "attention_backend is 'best'"),
    ],
)
def test_wrong_options_end_with_one_line(arguments: tuple[str, ...], words: str) -> None:
    result = run("check", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.output


def test_generate_prints_the_answers() -> None:
    result = run("generate", "--runner", "null", "--num-pages", "64", "--max-tokens", "30", "one", "two")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) == 2
    assert all("computes nothing" in line for line in lines)
