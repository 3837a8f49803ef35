"""A machine that disturbs a scheduler: arrivals, aborts, failures, plans and commits in any order.

After every move `check()` proves page conservation and the other laws, the fake runner proves that every page holds
what its reader expects, and at the end each answer equals the one that the reference computes alone.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minisgl_backend.request import Content, FinishReason, Grammar, PoolingParams, Request
from minisgl_backend.scheduler.limits import SchedulerLimits
from minisgl_backend.scheduler.scheduler import Scheduler
from minisgl_backend.speculation.proposer import DeviceProposals, Proposer
from minisgl_backend.step import StepPlan, StepResult
from tests.fakes import FakeRunner, Records, expected_answer, expected_vector, fake_answers, make_request
from tests.proposers import EveryDraft, KnowingProposer

EOS = (0,)
ON_DEVICE = "on the device"
POOLINGS = [None] * 6 + [PoolingParams(kind=kind) for kind in ("last", "mean", "cls")]
VOCAB_SIZE = 11
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
PARAMS = st.fixed_dictionaries(
    {
        "max_tokens": st.one_of(st.none(), st.integers(1, 12)),
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "ignore_eos": st.booleans(),
        "priority": st.sampled_from([0, 0, 0, 1, 9]),
        "stop_token_ids": st.sampled_from([(), (), (3,), (4, 5, 6)]),
        "logprobs": st.sampled_from([None, None, 1]),
        "prompt_logprobs": st.sampled_from([None, None, None, 0]),
        "grammar": st.sampled_from([None, None, None, Grammar(kind="json")]),
        "deadline": st.sampled_from([None, None, None, 5.0, 20.0]),
        "pooling": st.sampled_from(POOLINGS),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    """At most two steps are in flight: what the engine does with overlap, and everything below it."""

    bounds: SchedulerLimits
    # ON_DEVICE or one of tests.proposers.KINDS: every draft that there is room for is verified; "": none
    proposer_kind = ""
    careless = False  # admission expects every answer to end at once, so that preemption is common

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        proposer: Proposer | None = None
        control = None
        if self.proposer_kind:
            self.bounds = dataclasses.replace(
                self.bounds, most_drafts=4, most_draft_entries=self.bounds.max_running_requests + 6
            )
            if self.proposer_kind == ON_DEVICE:
                proposer = DeviceProposals(catches_up=True)
            else:
                proposer = KnowingProposer(self.proposer_kind, VOCAB_SIZE, fake_answers(VOCAB_SIZE))
            control = EveryDraft(4)
        self.scheduler = Scheduler(self.bounds, seed=1, clock=lambda: self.now, proposer=proposer, control=control)
        if self.careless:
            admission = self.scheduler._admission
            admission.expected_remaining = lambda admissions, generated, most, early: np.zeros_like(most)  # type: ignore[method-assign]
        self.runner = FakeRunner(self.bounds, VOCAB_SIZE)
        self.records = Records()
        self.requests: list[Request] = []
        self.disturbed: set[int] = set()  # aborted or failed: only the beginning of their answer must be right
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.next_uid = 0

    @rule(tokens=TOKENS, params=PARAMS, early=st.integers(0, 3))
    def add(self, tokens: list[int], params: dict[str, Any], early: int) -> None:
        params = dict(params)
        if params["max_tokens"] is not None:
            params["min_tokens"] = min(early, params["max_tokens"])
        if params["pooling"] is not None:
            params.update(n=1, prompt_logprobs=None)
        tokens = tokens[: self.scheduler.max_length - 1]
        if self.bounds.num_state_slots:
            params["stable_len"] = max(len(tokens) - self.next_uid % 4, 0)
            params["borders"] = (len(tokens) // 2,) if self.next_uid % 3 == 0 else ()
        if self.bounds.adapters:
            which = (sum(tokens) + self.next_uid) % (len(self.bounds.adapters) + 1)
            params["lora_name"] = [None, *(one.name for one in self.bounds.adapters)][which]
            params["cache_salt"] = [None, "a"][self.next_uid % 2]
        request = make_request(self.next_uid, tokens, **params)
        if self.bounds.encoder is not None:
            request = self.with_images(request)
        self.next_uid += request.params.n
        self.scheduler.add(request)
        self.requests.append(request)
        if request.deadline is not None:
            self.disturbed.update(range(request.uid, self.next_uid))

    def with_images(self, request: Request) -> Request:
        """Where its tokens say so, with one of few images each; an image's placeholders are all alike."""
        tokens, contents, at = np.frombuffer(request.token_ids, dtype="<i4").copy(), [], 1
        while at < len(tokens):
            number = int(2 * tokens[at] + tokens[at - 1])
            length = 1 + number
            if number and at + length <= len(tokens):
                shape = 1, 4 * length, 4, 3
                contents.append(Content(start=at, length=length, digest=bytes([number]), shape=shape))
                tokens[at : at + length] = VOCAB_SIZE - 1
            at += length + 1
        return msgspec.structs.replace(request, token_ids=tokens.tobytes(), contents=tuple(contents))

    @precondition(lambda self: self.next_uid)
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.CANCELLED, FinishReason.STOP]))
    def abort(self, data: st.DataObject, reason: FinishReason) -> None:
        self.abort_one(data.draw(st.integers(0, self.next_uid - 1)), reason)

    @precondition(lambda self: self.next_uid)
    @rule(data=st.data())
    def fail_from_now_on(self, data: st.DataObject) -> None:
        self.fail_one(data.draw(st.integers(0, self.next_uid - 1)))

    @rule(seconds=st.integers(1, 10))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @precondition(lambda self: len(self.in_flight) < 2)
    @rule()
    def plan(self) -> None:
        self.try_plan()

    @precondition(lambda self: self.in_flight)
    @rule()
    def commit(self) -> None:
        self.scheduler.commit(*self.in_flight.popleft())

    @rule(overlap=st.booleans(), count=st.integers(1, 8))
    def run_for_a_while(self, overlap: bool, count: int) -> None:
        for _ in range(count):
            if len(self.in_flight) < 2:
                self.try_plan()
            while len(self.in_flight) > overlap:
                self.commit()
            self.scheduler.check()
            self.records.take(self.scheduler)

    @invariant()
    def laws_hold(self) -> None:
        self.scheduler.check()
        self.records.take(self.scheduler)
        stats = self.scheduler.stats()
        assert stats.pages_free + stats.pages_cached + stats.pages_leased == self.bounds.num_pages
        states = stats.states_free, stats.states_cached, stats.states_owned
        assert (min(states) >= 0, sum(states)) == (True, self.bounds.num_state_slots)
        self.windows_are_kept()
        self.images_are_counted()

    def images_are_counted(self) -> None:
        """What the books have and what the runner has, once the next plan's have been dropped, is the same."""
        if (images := self.scheduler._running.images) is not None:
            books = images.books
            waiting = set(books._freed)
            held = {key: done for key, done in self.runner.encoded.items() if key not in waiting}
            assert held == {key: entry.done for key, entry in books._entries.items()}
            alone = len(books._entries) == 1
            # Chunks that end with pages need several at once, of which one may take more while it is encoded.
            vectors = sum(entry.vector_bytes for entry in books._entries.values())
            may_be_more = alone or (self.bounds.chunk_multiple > 1 and vectors <= books.capacity)
            assert books.used <= books.capacity or may_be_more, "more than there is room for"

    def windows_are_kept(self) -> None:
        """Of a group with a window a row holds what its next token and the chunks in flight may see, and no more."""
        running = self.scheduler._running
        groups, page_size = running.kv.groups, self.bounds.page_size
        if not groups.num_windows:
            return
        for one in running.active():
            assert one.lease is not None
            chunks = [chunk for plan, _ in self.in_flight for chunk in plan.prefill if chunk.row == one.row]
            in_flight = sum(-(-len(chunk.token_ids) // page_size) + 1 for chunk in chunks)
            drafts = [
                np.count_nonzero(plan.draft_tokens[plan.decode_rows == one.row] >= 0)
                for plan, _ in self.in_flight
                if len(plan.draft_tokens)
            ]
            in_flight += sum(-(-drafted // page_size) for drafted in drafts)
            in_flight += self.proposer_kind == ON_DEVICE and -(-4 // page_size)  # pages for what it proposes
            held = (running.kv.pages_of(one.lease)[groups.num_full :] > 0).sum(axis=1)
            assert (held <= groups.most_kept[:, 0] + 1 + in_flight).all(), (held, groups.most_kept, in_flight)

    def abort_one(self, uid: int, reason: FinishReason) -> None:
        self.scheduler.abort(uid, reason)
        self.disturbed.add(uid)

    def fail_one(self, uid: int) -> None:
        """From now on each step that computes this sequence fails."""
        self.runner.fail = {uid}.__contains__
        self.disturbed.add(uid)

    def teardown(self) -> None:
        for _ in range(10_000):
            busy = self.try_plan() or bool(self.in_flight)
            while self.in_flight:
                self.commit()
            self.laws_hold()
            if not busy:
                break
        assert not self.scheduler.has_work
        assert (self.scheduler.stats().pages_leased, self.scheduler.stats().states_owned) == (0, 0)
        assert self.runner.unseen == 0, "a proposer has not seen all tokens before those that it proposes"
        for request in self.requests:
            answer, reason = expected_answer(request, self.scheduler.max_length, EOS, VOCAB_SIZE)
            for uid in range(request.uid, request.uid + request.params.n):
                self.compare(uid, answer, reason)
            if request.pooling is not None:
                told = [detail.pooled for detail in self.records.details.get(request.uid, []) if detail.pooled]
                assert told == [expected_vector(request)] or (request.uid in self.disturbed and not told)

    def compare(self, uid: int, answer: list[int], reason: FinishReason) -> None:
        tokens = self.records.tokens.get(uid, [])
        if uid in self.disturbed and tokens != answer:
            assert tokens == answer[: len(tokens)]
            assert self.records.reasons[uid] in (FinishReason.CANCELLED, FinishReason.STOP, FinishReason.ERROR)
        else:
            assert tokens == answer
            assert uid in self.disturbed or self.records.reasons[uid] == reason

    def try_plan(self) -> bool:
        plan = self.scheduler.plan()
        if plan is not None:
            self.in_flight.append((plan, self.runner.execute(self.runner.prepare(plan)).result()))
        return plan is not None
