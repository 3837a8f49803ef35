"""Sequences aborted at random moments: they vanish, and nobody else notices."""

from __future__ import annotations

import random
from typing import Any

import pytest

from minisgl_backend import LLM
from minisgl_backend.request import FinishReason
from tests.gauge.harness import GREEDY, Gauge, drive, engine, expect_short_answers, pages_for_three, request_of

ABORT_SHARE = 0.04  # of the remaining victims, in each step

FIRST_UID = 10_000  # the engine has answered questions of its own before

RUNS: dict[str, tuple[bool, dict[str, Any]]] = {
    "overlapped": (True, {"max_prefill_length": 64}),
    "sequential-page-1-naive": (False, {"page_size": 1, "cache_type": "naive"}),
    "overlapped-page-64": (True, {"page_size": 64, "max_prefill_length": 64}),
}


class Aborts:
    """Aborts half of the sequences, a few in each step, from before the first one on."""

    def __init__(self, llm: LLM, uids: range, seed: int) -> None:
        self._core = llm.engine.core
        self._random = random.Random(seed)
        self._left = self._random.sample(uids, len(uids) // 2)
        self.victims = frozenset(self._left)

    def before_step(self, step: int) -> None:
        chosen = [uid for uid in self._left if self._random.random() < ABORT_SHARE]
        self._left = [uid for uid in self._left if uid not in chosen]
        self._core.abort(chosen, FinishReason.CANCELLED)


@pytest.mark.parametrize("starved", [False, True], ids=["roomy", "starved"])
@pytest.mark.parametrize("run", sorted(RUNS))
def test_aborted_sequences_vanish_and_change_no_other_answer(
    gauge: Gauge, full_matrix: bool, run: str, starved: bool
) -> None:
    overlap, options = RUNS[run]
    expected = [output.token_ids for output in gauge.baseline(gauge.starved_questions)]
    prompts = [output.prompt_token_ids for output in gauge.baseline(gauge.starved_questions)]
    if starved:
        answers = gauge.baseline(gauge.starved_questions)
        options = {**options, "num_pages": pages_for_three(answers, options.get("page_size", 16))}
    with engine(overlap=overlap, **options) as llm:
        if starved:
            expect_short_answers(llm)
        for seed in range(5 if full_matrix else 1):
            uids = range(FIRST_UID + seed * len(prompts), FIRST_UID + (seed + 1) * len(prompts))
            aborts = Aborts(llm, uids, seed)
            requests = [request_of(uid, prompt, GREEDY) for uid, prompt in zip(uids, prompts, strict=True)]
            heard = drive(llm.engine.core, requests, aborts.before_step)
            cancelled = [uid for uid in heard if heard[uid].reason is FinishReason.CANCELLED]
            assert cancelled, "the abort came too late for everybody"
            assert aborts.victims.issuperset(cancelled)
            for uid, one in heard.items():
                if uid in cancelled:
                    assert one.token_ids == expected[uids.index(uid)][: len(one.token_ids)]
                else:
                    assert (one.token_ids, one.reason) == (expected[uids.index(uid)], FinishReason.STOP)
            stats = llm.stats
            assert (stats.num_running, stats.num_waiting, stats.pages_leased) == (0, 0, 0)
