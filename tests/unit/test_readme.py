"""What README.md and docs/architecture.md say is there, is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "folder", ["minisgl_backend", "model_repository", "client", "tests", "benchmarks", "scripts", "docs"]
)
def test_tree_names_the_folders(folder: str) -> None:
    assert re.search(rf"^{folder}/ ", README, re.MULTILINE)
    assert (ROOT / folder).is_dir()


def test_the_architecture_names_every_room() -> None:
    rooms = {path.parent.name for path in (ROOT / "minisgl_backend").glob("*/__init__.py")}
    named = set(re.findall(r"^(\w+)/ ", ARCHITECTURE, re.MULTILINE))
    assert named == rooms


def test_linked_documents_exist() -> None:
    for link in re.findall(r"\]\(((?:docs|\.github)/[^)#]+)", README):
        assert (ROOT / link).is_file(), link
