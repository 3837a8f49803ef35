"""docs/architecture.md draws the layers that the import contract of pyproject.toml has."""

from __future__ import annotations

import re

from tests.docs.blocks import ROOT


def layers_of_the_contract() -> list[set[str]]:
    listed = re.search(r"^layers = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M | re.S)
    assert listed is not None
    return [set(re.findall(r"\w+", line)) for line in listed[1].splitlines()]


def test_the_drawing_is_the_contract() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    lines = re.findall(r"^ ?\d+  (\S+(?: [|:] \S+)*)", page, re.M)
    drawn = [{name.removesuffix(".py") for name in re.split(r" [|:] ", line)} for line in lines]
    assert drawn == layers_of_the_contract()
