"""What benchmarks.gpu measured, beside peers' figures and floors: one set of figures by name for each system."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PEERS = Path(__file__).parent / "results" / "peers.json"


@dataclass(frozen=True)
class System:
    """This project, a peer, or the hardware limit."""

    name: str
    figures: dict[str, float]  # by the names of benchmarks.gpu; the unit is in the name

    def series(self, pattern: str) -> list[tuple[int, float]]:
        """(number, figure) of each name that matches; the pattern's one group is the number. Sorted by number."""
        found = ((re.fullmatch(pattern, name), value) for name, value in self.figures.items())
        return sorted((int(match[1]), value) for match, value in found if match)


@dataclass(frozen=True)
class Comparison:
    """All that is compared."""

    machine: dict[str, str]  # as benchmarks.gpu describes it
    models: list[tuple[str, str]]  # (prefix of the names, title)
    own: System
    peers: list[System]
    limit: System

    @classmethod
    def read(cls, results: Path, peers: Path = PEERS) -> Comparison:
        """Raises SystemExit if a file cannot be read, or if `results` holds no figure of a model in `peers`."""
        measured, known = _read_json(results), _read_json(peers)
        own = _figures(part for part in measured.values() if isinstance(part, dict))
        models = [(model["prefix"], model["title"]) for model in known["models"]]
        if not any(name.startswith(f"{prefix}_") for prefix, _ in models for name in own):
            raise SystemExit(f"{results} holds no figures of {', '.join(title for _, title in models)}")
        return cls(
            machine=measured.get("machine", {}),
            models=models,
            own=System("this project", own),
            peers=[System(peer["name"], _figures([peer["figures"]])) for peer in known["peers"]],
            limit=System("hardware limit", _figures(floor["figures"] for floor in known["floors"])),
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise SystemExit(f"{path} holds no results of benchmarks.gpu")
    return content


def _figures(parts: Iterable[dict[str, Any]]) -> dict[str, float]:
    """The numbers of all parts; prefill of 4,000 tokens, whose name has no length, gets one."""
    flat = {name: value for part in parts for name, value in part.items() if isinstance(value, (int, float))}
    return {re.sub(r"_prefill_tok_s$", "_prefill_4000_tok_s", name): float(value) for name, value in flat.items()}
