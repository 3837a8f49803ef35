"""What the table «Where is what» of docs/architecture.md names, is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "minisgl_backend"


def test_files_and_names_are_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("## Where is what\n")[2].partition("\n## ")[0]
    modules = list(PACKAGE.rglob("*.py"))
    source = "\n".join(module.read_text(encoding="utf-8") for module in modules)
    missing = []
    for name in re.findall(r"`([\w./]+)`", table):
        if name.endswith((".py", ".cpp")) or "/" in name:
            is_there = any((root / name).exists() for root in (PACKAGE, ROOT)) or name in {one.name for one in modules}
        else:
            is_there = all(re.search(rf"(def|class) {part}\b|\b{part}\b *[:=]", source) for part in name.split("."))
        missing += [] if is_there else [name]
    assert missing == []
