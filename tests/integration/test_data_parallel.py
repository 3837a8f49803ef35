"""Several engine cores behind one client: where requests go, what a death leaves. Tokens come from the null runner."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import ConfigError, EngineDeadError
from minisgl_backend.process.status_files import fronts_without_core
from minisgl_backend.request import FinishReason
from tests.integration.conftest import START_SECONDS, Front, alive, wait_for

TWO = EngineConfig(runner="null", num_pages=4096, null_runner_rate=100.0, dp=2)


def document(seed: int) -> list[int]:
    return [5 + (seed * 31 + place * 7) % 200 for place in range(1000)]


def test_requests_go_where_their_prefix_is_cached_and_else_to_the_idler_core(make_front: Callable[..., Front]) -> None:
    front = make_front(TWO)
    for seed in (1, 2, 1, 1, 2):
        uid = front.submit(document(seed), max_tokens=2)
        wait_for(lambda uid=uid: uid in front.reasons)
    by_core = [front.stats(core).values for core in range(2)]
    assert [stats["total_finished"] for stats in by_core] == [3, 2]
    assert [stats["total_prompt_tokens"] for stats in by_core] == [3000, 2000]
    assert [stats["total_cached_tokens"] for stats in by_core] == [2 * 992, 992], "each document was computed once"
    uids = [front.submit([seed + 5], max_tokens=2000) for seed in range(16)]
    wait_for(lambda: set(uids) <= set(front.tokens))
    assert [front.stats(core).values["num_running"] for core in range(2)] == [8, 8]
    front.client.abort(uids, FinishReason.CANCELLED)
    wait_for(lambda: set(uids) <= set(front.reasons))
    assert Counter(front.reasons[uid] for uid in uids) == {FinishReason.CANCELLED: 16}
    assert [front.stats(core).values["total_cancelled"] for core in range(2)] == [8, 8]


def test_a_death_takes_the_streams_of_its_core_alone(make_front: Callable[..., Front], socket_dir: Path) -> None:
    fronts = [make_front(TWO, index) for index in range(2)]
    uids = [front.submit([5, 6], max_tokens=400) for front in fronts for _ in range(8)]
    wait_for(lambda: all(len(front.tokens) == 8 for front in fronts))
    first, second = fronts[0].client.core_pids
    assert first is not None
    assert fronts[1].client.core_pids == [first, second]
    os.kill(first, signal.SIGKILL)
    for front in fronts:
        wait_for(lambda front=front: front.downs)
        assert len(front.lost) == 4
        uids.append(front.submit([7], max_tokens=400))  # to the one that lives
    assert fronts_without_core(socket_dir) == 0, "the server is ready while a core lives"
    for front in fronts:
        wait_for(lambda front=front: None not in front.client.core_pids, START_SECONDS)
        wait_for(lambda front=front: len(front.reasons) == 5)
        assert front.client.core_pids[1] == second
        assert {len(front.tokens[uid]) for uid in front.reasons} == {400}, "whole, to the last token"
        assert not set(front.reasons) & front.lost
        assert [front.stats(core).values["restarts"] for core in range(2)] == [1, 0]
        again = [front.submit([8], max_tokens=3) for _ in range(4)]
        wait_for(lambda front=front, again=again: set(again) <= set(front.reasons))
    assert fronts[0].stats(0).values["total_finished"] > 0, "it serves again"
    for pid in fronts[0].client.core_pids:
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: fronts_without_core(socket_dir) == 2)
    with pytest.raises(EngineDeadError):
        fronts[0].submit([5], max_tokens=1)


def test_cores_of_two_ranks_each(make_front: Callable[..., Front]) -> None:
    front = make_front(EngineConfig(dp=2, tp=2, num_pages=64, dtype="float32"))
    uids = [front.submit([5, 6, 7, 8], max_tokens=5, temperature=0.0) for _ in range(4)]
    wait_for(lambda: len(front.reasons) == 4)
    assert len({tuple(front.tokens[uid]) for uid in uids}) == 1, "one model, whichever core answers"
    assert [front.stats(core).values["total_finished"] for core in range(2)] == [2, 2]


def test_a_start_needs_all_cores(socket_dir: Path) -> None:
    front = Front(EngineConfig(model="/nowhere", dp=2), socket_dir)
    with pytest.raises(ConfigError, match="/nowhere"):
        front.client.start(timeout_s=START_SECONDS)
    front.client.close()
    assert front.downs == []
    assert not any(map(alive, filter(None, front.client.core_pids)))
