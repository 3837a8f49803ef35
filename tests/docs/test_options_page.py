"""docs/options.md is what the code says. `python -m tests.docs.test_options_page` writes its tables anew."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

import pytest

from minisgl_backend.config import OPTIONS
from minisgl_backend.environment import Environment
from minisgl_backend.host.options.server import server_parser
from minisgl_backend.option_table import Option
from tests.docs.blocks import ROOT

PAGE = ROOT / "docs" / "options.md"


def engine_table() -> str:
    lines = ["| option | meaning | default | allowed |", "| --- | --- | --- | --- |"]
    return "\n".join([*lines, *(_engine_line(option) for option in OPTIONS.values() if not option.internal)])


def _engine_line(option: Option) -> str:
    names = [f"`{option.name}`", *(f"`{flag}`" for flag in option.flags[1:])]
    default = "unset" if option.default is None else str(option.default).lower()
    return f"| {' '.join(names)} | {option.help} | {default} | {option.allowed} |"


def server_table() -> str:
    return "\n".join(["| option | meaning [default] |", "| --- | --- |", *_server_lines()])


def _server_lines() -> Iterator[str]:
    engine = {flag for option in OPTIONS.values() for flag in option.flags}
    for action in server_parser("minisgl serve")._actions:
        if action.dest == "help" or not action.option_strings or action.help == argparse.SUPPRESS:
            continue
        if engine & {*action.option_strings}:
            continue
        if action.dest == "repository":  # its default is a path of the machine
            action.default = "model_repository"
        value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
        meaning = " ".join(str(action.help).replace("%(default)s", str(action.default)).replace("%%", "%").split())
        yield f"| `{', '.join(action.option_strings)}{value}` | {meaning.replace('|', chr(92) + '|')} |"


TABLES = {"engine": engine_table, "server": server_table}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_that_of_the_code(name: str) -> None:
    inside = re.search(
        rf"<!-- table {name} -->\n(.*)\n<!-- /table {name} -->", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    assert inside is not None
    assert inside[1] == TABLES[name](), "python -m tests.docs.test_options_page writes it anew"


def test_every_variable_of_the_engine_is_told() -> None:
    """Those for tests are not: scripts of the null runner and its log, graphs without a capture."""
    source = (ROOT / "minisgl_backend" / "config.py").read_text(encoding="utf-8")
    read = set(re.findall(r"\"([A-Z][A-Z_]{4,})\"", source)) - {"DEBUG", "ERROR", "WARNING"}
    internal = {"MINISGL_NULL_RUNNER_LOG", "MINISGL_NULL_RUNNER_SCRIPTS", "MINISGL_EAGER_GRAPHS"}
    assert Environment.read({})
    page = PAGE.read_text(encoding="utf-8")
    assert {name for name in read - internal if f"`{name}`" not in page} == set()


def test_no_variable_is_told_that_nobody_reads() -> None:
    files = [path for folder in ("minisgl_backend", "client") for path in (ROOT / folder).rglob("*.py")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in files)
    told = set(re.findall(r"`(MINISGL_\w+)`", PAGE.read_text(encoding="utf-8")))
    assert told
    assert {name for name in told if name not in source} == set()


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        before, rest = text.split(f"<!-- table {name} -->")
        after = rest.split(f"<!-- /table {name} -->")[1]
        text = f"{before}<!-- table {name} -->\n{table()}\n<!-- /table {name} -->{after}"
    PAGE.write_text(text, encoding="utf-8")
