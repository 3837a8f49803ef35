"""Traces: arrival times and lengths of recorded requests.

One JSON object per line, with `timestamp` (seconds), `input_length` and `output_length` (tokens); other keys are
ignored. Published serving traces use these names, some with other units: Mooncake's timestamps, which NVIDIA's tools
also read, are in milliseconds, for which there is `--time-scale 0.001`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Arrival:
    """One request of a trace."""

    at: float  # after the first request
    input_tokens: int
    output_tokens: int


def read_trace(path: Path, *, limit: int | None = None, time_scale: float = 1.0) -> list[Arrival]:
    """The first `limit` requests, sorted by time; times are multiplied by `time_scale`.

    Raises ValueError, which names file and line, for an invalid trace.
    """
    arrivals: list[Arrival] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if limit is not None and len(arrivals) == limit:
                    break
                if line.strip():
                    arrivals.append(_parse(f"{path}, line {number}", line))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the trace {path} cannot be read: {error}") from None
    if not arrivals:
        raise ValueError(f"the trace {path} holds no request")
    arrivals.sort(key=lambda arrival: arrival.at)
    start = arrivals[0].at
    return [Arrival((one.at - start) * time_scale, one.input_tokens, one.output_tokens) for one in arrivals]


def _parse(location: str, line: str) -> Arrival:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{location}: no JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{location}: {line.strip()[:80]!r}; allowed: a JSON object")
    return Arrival(
        _seconds(location, record),
        _tokens(location, record, "input_length"),
        _tokens(location, record, "output_length"),
    )


def _seconds(location: str, record: dict[str, Any]) -> float:
    value = _field(location, record, "timestamp")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{location}: timestamp is {value!r}; allowed: seconds, 0 or more")
    return float(value)


def _tokens(location: str, record: dict[str, Any], name: str) -> int:
    value = _field(location, record, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{location}: {name} is {value!r}; allowed: a whole number from 1")
    return value


def _field(location: str, record: dict[str, Any], name: str) -> Any:
    if name not in record:
        raise ValueError(f"{location}: {name} is missing")
    return record[name]
