"""The design pages have one form: what changes, the law, the cost without it, the test."""

from __future__ import annotations

import pytest

from tests.docs.blocks import ROOT

FOLDER = ROOT / "docs" / "design"
PAGES = sorted(page.name for page in FOLDER.glob("*.md") if page.name != "index.md")


@pytest.mark.parametrize("name", PAGES)
def test_a_design_has_its_parts_and_is_listed(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert [part for part in ("Law", "Cost without it", "Test") if f"**{part}.**" not in text] == []
    assert f"({name})" in (FOLDER / "index.md").read_text(encoding="utf-8")
