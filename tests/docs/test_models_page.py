"""The table of native families in docs/models.md: each family once."""

from __future__ import annotations

import re
from pathlib import Path

from minisgl_backend.models.families import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_every_family_has_a_place_in_the_table() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("| --- | --- |\n")[2].partition("\n\n")[0]
    listed = [name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(listed) == sorted(FAMILIES)
