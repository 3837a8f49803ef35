"""The README says what is there: its tree, its options table, its documents."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minisgl_backend.config import OPTIONS, Option

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def options_table() -> str:
    lines = ["| option | meaning | default | allowed |", "| --- | --- | --- | --- |"]
    return "\n".join([*lines, *(_line(option) for option in OPTIONS.values() if not option.internal)])


def _line(option: Option) -> str:
    names = [f"`{option.name}`", *(f"`{flag}`" for flag in option.flags[1:])]
    default = "unset" if option.default is None else str(option.default).lower()
    return f"| {' '.join(names)} | {option.help} | {default} | {option.allowed} |"


def test_options_table_is_that_of_the_code():
    inside = README.split("<!-- options -->")[1].split("<!-- /options -->")[0].strip()
    assert inside == options_table(), "python tests/unit/test_readme.py rewrites the table"


@pytest.mark.parametrize("folder", ["minisgl_backend", "model_repository", "client", "tests", "benchmarks", "scripts"])
def test_tree_names_the_folders(folder):
    assert re.search(rf"^{folder}/ ", README, re.MULTILINE)
    assert (ROOT / folder).is_dir()


def test_tree_names_every_room():
    rooms = {path.parent.name for path in (ROOT / "minisgl_backend").glob("*/__init__.py")}
    named = set(re.findall(r"^  (\w+)/ ", README, re.MULTILINE))
    assert named == rooms


def test_linked_documents_exist():
    for link in re.findall(r"\]\((docs/[^)#]+)", README):
        assert (ROOT / link).is_file(), link


if __name__ == "__main__":
    before, rest = README.split("<!-- options -->")
    after = rest.split("<!-- /options -->")[1]
    (ROOT / "README.md").write_text(f"{before}<!-- options -->\n{options_table()}\n<!-- /options -->{after}")
