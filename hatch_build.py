"""Hatchling's hook: the package's description is the README without what leads nowhere outside of a checkout."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"!\[[^\]]*\]\((?!https?://)[^)]*\)")
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|mailto:)[^)]*\)")
_WHERE = "The pages that are named here are in the source archive, in the folder `docs`.\n"


class Readme(MetadataHookInterface):
    """Gives the field `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": description(text)}


def description(readme: str) -> str:
    """The README with the words of relative links and without relative pictures; code stays as it is."""
    parts = re.split(r"(^```.*?^```$)", readme, flags=re.MULTILINE | re.DOTALL)
    plain = [part if part.startswith("```") else _LINK.sub(r"\1", _PICTURE.sub("", part)) for part in parts]
    return f"{''.join(plain).rstrip()}\n\n{_WHERE}"
