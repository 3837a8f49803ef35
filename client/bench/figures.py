"""Statistics of a run's requests."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from .generator import Record, Run
from .speculation import Speculation

_MAX_ERROR_KINDS = 20
_MAX_ERROR_LENGTH = 300


@dataclass(frozen=True)
class Spread:
    """The distribution of some values."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True)
class Figures:
    """One run; times in milliseconds. A time is None if nothing was measured."""

    load: dict[str, Any]  # {"concurrency": 8}, {"rate": 4.0} or {"trace": "FILE"}
    sent: int
    completed: int
    failed: int
    unfinished: int  # at Ctrl-C
    interrupted: bool
    errors: dict[str, int]  # message -> count; of messages that differ only in numbers, the first one
    seconds: float  # from the first request sent to the end of the last completed one
    requests_per_s: float  # completed ones, as for the tokens
    input_tokens_per_s: float | None
    output_tokens_per_s: float
    input_tokens: Spread | None  # per request
    output_tokens: Spread | None
    counted_by: str  # "usage": the server's count of output tokens; "pieces": ours, if it reported none
    ttft_ms: Spread | None  # time to first token; like `e2e_ms`, counted from the planned sending time
    between_ms: Spread | None  # from one piece of an answer to the next
    per_token_ms: Spread | None  # per answer of several pieces: mean time per token after the first piece
    e2e_ms: Spread | None  # the whole answer
    tokens_per_piece: float | None  # above 1 where a server sends several tokens at once
    late_ms: Spread | None  # delay of requests with a planned time: above a few ms, this machine is too slow
    speculation: Speculation | None = None  # if the server drafted tokens during the run

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def figures_of(run: Run, speculation: Speculation | None = None) -> Figures:
    """Only completed requests count, except for errors.

    Waits begin when a request should have been sent: if this machine falls behind its plan, users would wait, too.
    """
    records = run.records
    done = [record for record in records if record.finished]
    errors = _count_errors(records)
    started = min((record.sent for record in records), default=0.0)
    seconds = max((record.ended for record in done), default=started) - started
    output_tokens = [record.num_output_tokens for record in done]
    input_tokens = [record.input_tokens for record in done if record.input_tokens is not None]
    pieces = sum(len(record.deliveries) for record in done)
    return Figures(
        load=run.load.label,
        sent=len(records),
        completed=len(done),
        failed=sum(errors.values()),
        unfinished=sum(record.unfinished for record in records),
        interrupted=run.interrupted,
        errors=errors,
        seconds=seconds,
        requests_per_s=_rate(len(done), seconds),
        input_tokens_per_s=_rate(sum(input_tokens), seconds) if input_tokens else None,
        output_tokens_per_s=_rate(sum(output_tokens), seconds),
        input_tokens=spread(input_tokens),
        output_tokens=spread(output_tokens),
        counted_by="usage" if all(record.output_tokens is not None for record in done) else "pieces",
        ttft_ms=spread([1e3 * (record.deliveries[0] - record.planned) for record in done if record.deliveries]),
        between_ms=spread([1e3 * (after - before) for record in done for before, after in pairwise(record.deliveries)]),
        per_token_ms=spread([1e3 * time for time in map(_per_token, done) if time is not None]),
        e2e_ms=spread([1e3 * (record.ended - record.planned) for record in done]),
        tokens_per_piece=sum(output_tokens) / pieces if pieces else None,
        late_ms=spread([1e3 * (record.sent - record.planned) for record in records])
        if run.load.concurrency is None
        else None,
        speculation=speculation,
    )


def spread(values: Sequence[float]) -> Spread | None:
    """Mean, nearest-rank percentiles, maximum; None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    p50, p90, p99 = (percentile(ordered, share) for share in (50, 90, 99))
    return Spread(sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile of sorted values."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _per_token(record: Record) -> float | None:
    """Seconds; None for an answer in one piece, which has no time between tokens."""
    # If a server counts only at the end, its first piece is taken as one token.
    tokens = record.num_output_tokens - (record.first_tokens or 1)
    if len(record.deliveries) < 2 or tokens < 1:
        return None
    # Until the end, not until the last piece: the last tokens may have no text.
    return (record.ended - record.deliveries[0]) / tokens


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _count_errors(records: Sequence[Record]) -> dict[str, int]:
    """The most frequent first."""
    examples: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for record in records:
        if record.error:
            kind = re.sub(r"\d+", "#", record.error)
            examples.setdefault(kind, record.error[:_MAX_ERROR_LENGTH])
            counts[kind] += 1
    shown = {examples[kind]: count for kind, count in counts.most_common(_MAX_ERROR_KINDS)}
    rest = sum(counts.values()) - sum(shown.values())
    return {**shown, "(others)": rest} if rest else shown
