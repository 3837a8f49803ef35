"""How many of a server's draft tokens were accepted during a run, by its metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from ..errors import Unavailable
from ..metrics import Metrics
from .targets import StreamClient

SETTLE_S = 0.5  # the server reports four times a second


@dataclass(frozen=True)
class DraftCounts:
    """Counts over all answers of a server, including other clients' requests."""

    drafts: int  # one per sequence and step
    drafted: Sequence[int]  # their tokens by position, from the first on
    accepted: Sequence[int]  # accepted ones of these

    def since(self, before: DraftCounts | None) -> Speculation | None:
        """The difference from `before`; None: nothing was drafted, or the server was restarted meanwhile."""
        before = before or DraftCounts(0, (), ())
        drafts = self.drafts - before.drafts
        drafted = _differences(self.drafted, before.drafted)
        accepted = _differences(self.accepted, before.accepted)
        if drafts <= 0 or min(drafted) < 0:
            return None
        return Speculation(drafts, drafted, accepted, tokens_per_step=1 + sum(accepted) / drafts)


@dataclass(frozen=True)
class Speculation(DraftCounts):
    """The counts of a run."""

    tokens_per_step: float  # delivered by a step with a draft, per sequence: accepted tokens and the model's own


async def fetch_draft_counts(client: StreamClient) -> DraftCounts | None:
    """Counts since the server's start. None: it does not speculate, or has no such metrics."""
    try:
        if (await client.metrics()).value("minisgl_engine_up") is None:
            return None
        await asyncio.sleep(SETTLE_S)
        return draft_counts(await client.metrics())
    except Unavailable:
        return None


def draft_counts(metrics: Metrics) -> DraftCounts | None:
    """None: nothing has been drafted."""
    drafts = metrics.value("minisgl_drafts_total")
    if not drafts:
        return None
    positions = sorted(int(one.labels["position"]) for one in metrics.select("minisgl_draft_tokens_total"))
    drafted, accepted = (
        [int(metrics.value(name, position=str(position)) or 0) for position in positions]
        for name in ("minisgl_draft_tokens_total", "minisgl_accepted_draft_tokens_total")
    )
    return DraftCounts(int(drafts), drafted, accepted)


def _differences(now: Sequence[int], before: Sequence[int]) -> list[int]:
    """By position, of which there may be more by now."""
    return [one - other for one, other in zip_longest(now, before, fillvalue=0)]
