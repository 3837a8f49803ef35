"""Steps of a proposer on the device: what they bring it, and that they are in nobody's way."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import msgspec
import numpy as np
import pytest

from minisgl_backend.arrays import Int32Array
from minisgl_backend.encoder_limits import EncoderLimits
from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.request import Content, Grammar
from minisgl_backend.scheduler.forced_drafts import ForcedTokens, no_forced_tokens
from minisgl_backend.scheduler.limits import SchedulerLimits
from minisgl_backend.scheduler.proposing import SHADOW_EVERY
from minisgl_backend.scheduler.scheduler import Scheduler
from minisgl_backend.speculation.control import DraftControl
from minisgl_backend.speculation.proposer import DeviceProposals
from minisgl_backend.step import StepPlan
from tests.fakes import FakePending, FakeRunner, Loop, expected_answer, make_request
from tests.proposers import EveryDraft

MOST = 4
LIMITS = SchedulerLimits(
    page_size=4,
    num_pages=400,
    max_seq_len=1000,
    max_running_requests=4,
    max_waiting_requests=100,
    max_prefill_length=32,
    mixed_prefill_length=32,
    most_drafts=MOST,
    most_draft_entries=24,
)
PROMPT = [*range(1, 61)]


class NeverOn(DraftControl):
    """Speculation does not pay, whatever is right."""

    def decide_depth(self, *args: object) -> None:
        self.is_on = False


def loop_of(
    limits: SchedulerLimits = LIMITS,
    control: DraftControl | None = None,
    forced: ForcedTokens = no_forced_tokens,
) -> Loop:
    control = control or EveryDraft(MOST)
    scheduler = Scheduler(limits, seed=0, proposer=DeviceProposals(catches_up=True), control=control, forced=forced)
    return Loop(scheduler, FakeRunner(limits), overlap=True)


def answer(loop: Loop, uid: int, prompt: list[int] = PROMPT, max_tokens: int = 20, **params: Any) -> None:
    """All of the loop's steps until the request is answered, as it is without a proposer."""
    request = make_request(uid, prompt, max_tokens=max_tokens, ignore_eos=True, **params)
    loop.scheduler.add(request)
    loop.run()
    tokens, reason = expected_answer(request, loop.scheduler.max_length, ())
    assert (loop.records.tokens[uid], loop.records.reasons[uid]) == (tokens, reason)
    assert loop.runner.unseen == 0


def proposer_plans(loop: Loop) -> list[StepPlan]:
    return [plan for plan in loop.runner.plans if plan.num_proposed]


def test_it_sees_each_token_once() -> None:
    loop = loop_of()
    answer(loop, 1)
    plans = proposer_plans(loop)
    chunks = [chunk for plan in plans for chunk in plan.prefill]
    assert [(chunk.start, chunk.end) for chunk in chunks] == [(0, 32), (32, 61)]
    late = sum(len(plan.decode_rows) - plan.num_proposing for plan in plans)
    assert 0 < late <= len(plans)  # the last of the drafts that were all right
    counts = loop.scheduler.stats().speculation
    assert counts.drafted == counts.accepted


def test_cached_prefixes_have_been_seen() -> None:
    loop = loop_of()
    answer(loop, 1)
    before = len(loop.runner.plans)
    answer(loop, 2, [*PROMPT, 70, 71])
    chunks = [chunk for plan in loop.runner.plans[before:] if plan.num_proposed for chunk in plan.prefill]
    assert not chunks  # what is new is few tokens: entries beside the row's own


def test_prefixes_of_requests_that_refuse_it_have_not_been_seen() -> None:
    loop = loop_of()
    loop.scheduler.add(make_request(1, PROMPT, max_tokens=20, speculative=False))
    loop.run()
    assert not proposer_plans(loop)
    answer(loop, 2)
    assert sum(len(chunk.token_ids) for plan in proposer_plans(loop) for chunk in plan.prefill) == 61


def test_the_model_has_every_other_step() -> None:
    """Also while the proposer still reads a prompt."""
    loop = loop_of(dataclasses.replace(LIMITS, max_prefill_length=8, mixed_prefill_length=8))
    answer(loop, 1)
    kinds = [plan.num_proposed > 0 for plan in loop.runner.plans]
    assert sum(kinds) > 8
    assert not any(one and other for one, other in itertools.pairwise(kinds))


def test_nothing_is_proposed_beyond_its_context() -> None:
    loop = loop_of(dataclasses.replace(LIMITS, longest_drafted=72))
    answer(loop, 1, max_tokens=40)
    lengths = [length + plan.num_proposed for plan in proposer_plans(loop) for length in plan.decode_lengths.tolist()]
    assert 68 < max(lengths) <= 72


def test_while_it_does_not_pay_it_is_asked_now_and_then() -> None:
    control = NeverOn(MOST)
    loop = loop_of(control=control)
    answer(loop, 1, max_tokens=600)
    assert 3 <= sum(plan.num_proposing > 0 for plan in proposer_plans(loop)) <= 600 // SHADOW_EVERY
    assert loop.scheduler.stats().speculation.drafts == 0
    assert control._all.rates.min() > 0.8  # what it would have been is known


def test_nothing_waits_for_it_under_load() -> None:
    """Where a step has no room for drafts, steps overlap, however long nothing was proposed."""
    loop = loop_of(dataclasses.replace(LIMITS, most_draft_entries=3), NeverOn(MOST))
    for uid in range(4):
        loop.scheduler.add(make_request(uid, PROMPT, max_tokens=200, ignore_eos=True))
    loop.run()
    assert not proposer_plans(loop)
    drafting = loop.scheduler._drafting
    assert drafting is not None
    assert drafting._steps is not None
    assert not drafting._steps.is_due


@pytest.mark.parametrize("control", [EveryDraft(MOST), NeverOn(MOST)], ids=["on", "off"])
def test_what_a_grammar_forces_needs_no_step_of_the_proposer(control: DraftControl) -> None:
    request = make_request(1, PROMPT, max_tokens=40, ignore_eos=True)
    tokens, _ = expected_answer(request, 1000, ())

    def forced(uid: int, most: int) -> Int32Array:
        done = len(loop.records.tokens.get(uid, []))
        return np.array(tokens[done : done + most], dtype=np.int32)

    loop = loop_of(control=control, forced=forced)
    answer(loop, 1, max_tokens=40, grammar=Grammar(kind="json"))
    assert not proposer_plans(loop)
    counts = loop.scheduler.stats().speculation
    assert counts.drafted == counts.accepted
    assert sum(counts.accepted) >= 30


@pytest.mark.parametrize("fails", ["in vain", "as a whole"])
def test_a_step_that_fails_costs_drafts_alone(fails: str) -> None:
    loop = loop_of()
    execute = loop.runner.execute

    def failing(batch: StepPlan) -> FakePending:
        pending = execute(batch)
        if not batch.num_proposed:
            return pending
        failed = frozenset(batch.decode_rows.tolist()) if fails == "as a whole" else frozenset[int]()
        return FakePending(msgspec.structs.replace(pending.value, proposed=None, failed_rows=failed))

    loop.runner.execute = failing  # type: ignore[method-assign]
    answer(loop, 1)
    assert loop.scheduler.stats().speculation.drafts == 0
    assert np.count_nonzero([plan.num_proposed for plan in loop.runner.plans]) > 0


def test_images_are_refused_where_a_model_proposes() -> None:
    """Its drafts would not see them. Also an image whose vectors can never be kept, with its number."""
    encoder = EncoderLimits(
        num_layers=2, capacity=64, vector_bytes=8, state_bytes=1, patch_area=16, patch_cost=0.1, pair_cost=0.0
    )
    limits = dataclasses.replace(LIMITS, encoder=encoder)
    image = Content(start=3, length=4, digest=b"cat", shape=(1, 4, 16, 3))
    request = msgspec.structs.replace(make_request(1, PROMPT), contents=(image,))
    with pytest.raises(InvalidRequestError, match="speculation by ngram, or none"):
        loop_of(limits).scheduler.add(request)
    large = msgspec.structs.replace(image, start=10, length=9)
    with pytest.raises(InvalidRequestError, match="image 2 has 9 tokens, whose vectors take 72 bytes; allowed: 64"):
        Scheduler(limits, seed=0).add(msgspec.structs.replace(request, contents=(image, large)))
    Scheduler(limits, seed=0).add(request)
