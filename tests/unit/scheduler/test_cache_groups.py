"""Mixtures of cache groups in the scheduler: what is left when requests are aborted."""

from __future__ import annotations

import pytest

from minisgl_backend.kv.kinds import FULL, Chunked, Sliding
from minisgl_backend.request import FinishReason
from tests.fakes import make_request
from tests.unit.scheduler.test_scheduler import limits, make_loop


@pytest.mark.parametrize("cache_type", ["radix", "naive"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_steps", range(1, 8))
def test_aborts_give_back_the_pages_of_every_group(num_steps: int, overlap: bool, cache_type: str) -> None:
    """In the first chunk of a prompt, in a later one, and in decode, with a step in flight or without."""
    kinds = (FULL, Sliding(5), Chunked(12))
    loop = make_loop(limits(cache_kinds=kinds, max_prefill_length=16, num_pages=120, cache_type=cache_type), overlap)
    manager = loop.scheduler._running.kv
    loop.scheduler.add(make_request(0, list(range(50)), ignore_eos=True, max_tokens=100))
    loop.scheduler.add(make_request(1, list(range(30)), ignore_eos=True, max_tokens=100))
    for _ in range(num_steps):
        loop.step()
        (table,) = [manager.pages_of(one.lease) for one in loop.scheduler._running.active() if one.uid == 0]
        assert (table > 0).any(axis=1).all(), "it has pages of every group"
    loop.scheduler.abort(0, FinishReason.CANCELLED)
    loop.step()
    loop.scheduler.abort(1, FinishReason.CANCELLED)
    loop.run()
    stats = loop.scheduler.stats()
    assert stats.pages_leased == 0
    assert stats.pages_free + stats.pages_cached == 120
    assert (stats.pages_cached > 0) == (cache_type == "radix")
    assert manager.num_available == 120, "no page of any group is in use"
    loop.scheduler.add(make_request(2, list(range(150)), ignore_eos=True, max_tokens=9))  # takes pages of each of them
    loop.run()
    assert loop.records.reasons == {0: FinishReason.CANCELLED, 1: FinishReason.CANCELLED, 2: FinishReason.LENGTH}
