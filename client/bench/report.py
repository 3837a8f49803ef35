"""A benchmark's figures as a table, and as a file that `minisgl bench compare` reads."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..console import FigureTable
from .figures import Figures
from .speculation import Speculation

FORMAT = "minisgl bench 1"
_MANY_TOKENS_PER_PIECE = 1.5

# Row of a table -> where the figures have it.
_TIMES = {
    "first token": "ttft_ms",
    "between pieces": "between_ms",
    "a token after the first": "per_token_ms",
    "whole answer": "e2e_ms",
    "sent too late by": "late_ms",
}


@dataclass(frozen=True)
class Report:
    """All runs of one benchmark, or of a file that one wrote."""

    name: str
    about: Mapping[str, Any]  # server, model, lengths, seed, machine, time
    runs: Sequence[Mapping[str, Any]]  # as JSON, see Figures

    def write(self, path: Path) -> None:
        """Raises ValueError if the file cannot be written."""
        write_json(path, {"format": FORMAT, "name": self.name, **self.about, "runs": list(self.runs)})

    @classmethod
    def read(cls, path: Path) -> Report:
        """Raises ValueError for a file of another kind."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read as JSON: {error}") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT or not content.get("runs"):
            allowed = "what minisgl bench --json wrote without --perf-analyzer"
            raise ValueError(f"{path} holds no figures to compare; allowed: {allowed}")
        about = {name: value for name, value in content.items() if name not in ("format", "name", "runs")}
        return cls(str(content["name"]), about, content["runs"])


def check_writable(path: Path) -> None:
    """To be called before a measurement that would be lost. Raises ValueError."""
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--json is {str(path)!r}; allowed: a file that can be written, in a folder that is there")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Raises ValueError if the file cannot be written."""
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error}") from None


def describe_machine() -> dict[str, Any]:
    """The clients' machine, without its name."""
    return {"python": platform.python_version(), "system": platform.system(), "cpus": os.cpu_count()}


def label_of(load: Mapping[str, Any]) -> str:
    """A run's name in tables and pictures."""
    kind, value = next(iter(load.items()))
    if kind == "concurrency":
        return f"{value} at once"
    return f"{value:g} a second" if kind == "rate" else f"trace {value}"


def figures_table(runs: Sequence[Figures], title: str) -> FigureTable:
    """One column for each run."""
    rows = [
        ["requests", *(_requests(run) for run in runs)],
        ["requests/s", *(number(run.requests_per_s) for run in runs)],
        ["output tokens/s", *(number(run.output_tokens_per_s) for run in runs)],
        ["input tokens/s", *(number(run.input_tokens_per_s) for run in runs)],
        ["input tokens", *(_mean(run.input_tokens) for run in runs)],
        ["output tokens", *(_mean(run.output_tokens) for run in runs)],
    ]
    for row, name in _TIMES.items():
        values = [getattr(run, name) for run in runs]
        if any(value is not None for value in values):
            rows.append([f"{row} (ms)", *(_percentiles(value) for value in values)])
    if any(run.speculation is not None for run in runs):
        rows.append(["tokens a step with drafts", *(_tokens_per_step(run.speculation) for run in runs)])
        rows.append(["accepted, by position (%)", *(_accepted(run.speculation) for run in runs)])
    return FigureTable(title, ["", *(label_of(run.load) for run in runs)], rows, _caption(runs))


def _caption(runs: Sequence[Figures]) -> str:
    notes = ["Times: p50 / p90 / p99."]
    if any(run.counted_by == "pieces" and run.completed for run in runs):
        notes.append("The server told no token counts: each piece of an answer counts as one token.")
    most = max((run.tokens_per_piece or 0.0 for run in runs), default=0.0)
    if most >= _MANY_TOKENS_PER_PIECE:
        notes.append(f"Several tokens came at once, up to {number(most)} a piece: pieces are not tokens.")
    if any(run.late_ms is not None and run.late_ms.p99 > 20 for run in runs):
        notes.append("Requests were sent late: this machine is too slow for the load.")
    return " ".join(notes)


def _requests(run: Figures) -> str:
    extras = [f"{run.failed:,} failed"] if run.failed else []
    extras += [f"{run.unfinished:,} unfinished"] if run.unfinished else []
    return ", ".join([f"{run.completed:,}", *extras])


def _tokens_per_step(speculation: Speculation | None) -> str:
    return "-" if speculation is None else number(speculation.tokens_per_step)


def _accepted(speculation: Speculation | None) -> str:
    """Acceptance rates of draft tokens by position."""
    if speculation is None:
        return "-"
    both = zip(speculation.accepted, speculation.drafted, strict=True)
    return " / ".join(f"{100 * accepted / drafted:.0f}" if drafted else "-" for accepted, drafted in both)


def _mean(spread: Any) -> str:
    return "-" if spread is None else number(spread.mean)


def _percentiles(spread: Any) -> str:
    return "-" if spread is None else " / ".join(number(value) for value in (spread.p50, spread.p90, spread.p99))


def number(value: float | None) -> str:
    """Three significant digits, or all digits before the point."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """In the largest unit that gives at least two."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{number(seconds / length)} {unit}"
    return f"{number(seconds)} s"
