"""Fakes that other tests drive: a deterministic runner, and what a single request must produce with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minisgl_backend.arrays import NO_INT32, Float32Array, Int32Array
from minisgl_backend.kv.kinds import CacheKind, Chunked, Sliding
from minisgl_backend.request import Content, FinishReason, Request, SamplingParams
from minisgl_backend.scheduler.limits import SchedulerLimits
from minisgl_backend.scheduler.scheduler import Scheduler
from minisgl_backend.step import Logprobs, PrefillChunk, SequenceDetail, StepPlan, StepResult, Wants, vectors_key
from tests.proposers import Answers

if TYPE_CHECKING:
    from minisgl_backend.engine.core import EngineCore

VOCAB_SIZE = 97


def first_seen(kind: CacheKind, position: int) -> int:
    """By the token at `position`."""
    if isinstance(kind, Chunked):
        return position // kind.size * kind.size
    return max(0, position - kind.window + 1) if isinstance(kind, Sliding) else 0


def next_token(position: int, last_token: int, forbidden: Iterable[int] = (), vocab_size: int = VOCAB_SIZE) -> int:
    """The token at `position` after `last_token`; where it is forbidden, the next one that is not."""
    value = (position * 2654435761 + last_token * 40503 + 12345) & 0xFFFFFFFF
    value ^= value >> 15
    token = (value * 2246822519 & 0xFFFFFFFF) % vocab_size
    refused = set(forbidden)
    while token in refused:
        token = (token + 1) % vocab_size
    return token


def fake_answers(vocab_size: int = VOCAB_SIZE) -> Answers:
    """What FakeRunner says of requests that forbid nothing."""

    def answer(uid: int, token_ids: Int32Array, most: int) -> list[int]:
        tokens = token_ids.tolist()
        for _ in range(most):
            tokens.append(next_token(len(tokens), tokens[-1], (), vocab_size))
        return tokens[len(token_ids) :]

    return answer


def fake_logprobs(position: int, token: int) -> Logprobs:
    """The log-probabilities that FakeRunner reports for a token at a position."""
    logprob = -0.5 - token / 8
    return Logprobs(token_id=token, logprob=logprob, rank=1 + position % 3, top_ids=(token,), top=(logprob,))


def fake_state(position: int, token: int) -> Float32Array:
    """The hidden state of a token that FakeRunner pools."""
    return np.array([position, token, 1.0], dtype=np.float32)


def expected_vector(request: Request) -> bytes:
    """What a request with pooling must become."""
    tokens, pooling = np.frombuffer(request.token_ids, dtype="<i4"), request.pooling
    assert pooling is not None
    states = np.array([fake_state(at, token) for at, token in enumerate(tokens.tolist())])
    found = {"mean": states.mean(axis=0), "cls": states[0]}.get(pooling.kind, states[-1])
    return found.astype("<f4").tobytes()


@dataclass(frozen=True)
class FakePending:
    """A step whose result is known already."""

    value: StepResult
    unsampled: None = None

    def result(self) -> StepResult:
        return self.value


class FakeStates:
    """Slots that know the tokens which they stand for, and rings of each row's latest tokens, as the device has them.

    Each read is compared with the row's tokens, so that a state that is stale, another's, or folded into while someone
    reads it is found in the step that would have computed nonsense.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._page_size, self._size = limits.page_size, limits.page_size + limits.most_drafts
        self._slots: list[tuple[int, ...] | None] = [None] * (limits.num_state_slots + 1)  # None: nonsense
        self._rings = np.full((limits.max_running_requests, self._size, 2), -1, dtype=np.int64)  # position, token
        self._slot: dict[int, int] = {}  # by row, as the next two
        self._border: dict[int, int] = {}
        self._source: dict[int, int] = {}
        self.num_folds = self.num_checkpoints = 0

    def begin(self, plan: StepPlan, tokens: Int32Array, failing: set[int]) -> None:
        """What precedes the forward pass: rows that are admitted, then folds. What failing rows leave is nonsense."""
        for one in plan.admitted:
            assert one.state_slot > 0, "a row has a slot"
            assert bool(one.state_source) == bool(one.cached_len), "a cached prefix has a state behind it"
            self._slot[one.row], self._source[one.row] = one.state_slot, one.state_source
            self._border[one.row] = one.cached_len
            self._rings[one.row] = -1
        folds = [array.tolist() for array in (plan.fold_rows, plan.fold_sources, plan.fold_targets, plan.fold_borders)]
        assert len(set(folds[0])) == len(folds[0]), "a row is folded twice"
        assert len(set(folds[2])) == len(folds[2]), "two rows are folded into one slot"
        others = [{*folds[1][:at], *folds[1][at + 1 :]} for at in range(len(folds[1]))]
        assert not any(target in read for target, read in zip(folds[2], others, strict=True)), (
            "a row is folded into a slot that another one's fold, at the same time, reads"
        )
        read = {one.state_source for one in plan.admitted} | {slot for cp in plan.prefill for _, slot in cp.checkpoints}
        assert not read & set(folds[2]), "a slot is folded into that a chunk reads or writes"
        for row, source, target, border in zip(*folds, strict=True):
            assert source == self._slot[row], "a row's fold begins at its own slot"
            known = None if row in failing else self._known(row, tokens[row], border)
            assert border % self._page_size == 0
            assert border > self._border[row]
            self._slots[target] = known
            self._slot[row], self._border[row] = target, border
            self.num_folds += 1

    def compute_chunk(self, chunk: PrefillChunk, tokens: Int32Array, fails: bool) -> None:
        """`tokens`: of the row's token table."""
        row, page_size = chunk.row, self._page_size
        source = self._source.pop(row, self._slot[row])
        assert chunk.start % page_size == 0, "a chunk begins within a page"
        known = fails or chunk.start == 0 or self._slots[source] == tuple(tokens[: chunk.start].tolist())
        assert known, "a chunk begins with a state of other tokens"
        border = chunk.end // page_size * page_size
        for at, slot in chunk.checkpoints:
            assert chunk.start < at <= border, "a state is left outside the chunk"
            assert at % page_size == 0
            self._slots[slot] = None if fails else tuple(tokens[:at].tolist())
            self.num_checkpoints += 1
        self._slots[self._slot[row]] = None if fails else tuple(tokens[:border].tolist())
        self._border[row] = border
        for at in range(border, chunk.end):
            self._rings[row, at % self._size] = at, tokens[at]

    def compute(self, row: int, tokens: Int32Array, fails: bool) -> None:
        """A decode entry, the last of `tokens`."""
        at = len(tokens) - 1
        assert at - self._border[row] < self._size, "the ring has no room"
        self._rings[row, at % self._size] = at, tokens[at]
        if not fails:
            self._known(row, tokens, at + 1)

    def _known(self, row: int, tokens: Int32Array, end: int) -> tuple[int, ...]:
        """What state and ring stand for up to the token `end`."""
        border = self._border[row]
        known = self._slots[self._slot[row]] if border else ()
        assert known == tuple(tokens[:border].tolist()), "a row's state stands for other tokens"
        kept = self._rings[row, np.arange(border, end) % self._size]
        assert kept[:, 0].tolist() == list(range(border, end)), "a token of the ring is overwritten or missing"
        assert kept[:, 1].tolist() == tokens[border:end].tolist(), "a token of the ring is another"
        return (*known, *tokens[border:end].tolist())


class FakeRunner:
    """Executes plans on a pretended device: a page table, a token table, and one token for each slot of the cache.

    Each step it asserts that the cache, read through the page table, holds exactly the tokens of the sequence: a page
    that was shared, reused or freed wrongly is found in the step that would have read it. What a failing sequence
    writes is no number: no other may have it in its pages, not even beyond its end.
    """

    def __init__(self, limits: SchedulerLimits, vocab_size: int = VOCAB_SIZE) -> None:
        rows, length = limits.max_running_requests, limits.max_seq_len
        self._page_size = limits.page_size
        self._chunk_multiple = limits.chunk_multiple
        self._eos = limits.eos_token_ids
        self._vocab_size = vocab_size
        self._kinds = limits.cache_kinds
        shape = len(limits.cache_kinds), rows, -(-length // limits.page_size)
        self._page_table = np.zeros(shape, dtype=np.int32)
        self._token_table = np.full((rows, length + 1), -1, dtype=np.int32)
        self._slots = np.full((limits.num_pages + 1) * limits.page_size, -1, dtype=np.int32)
        self._unsound = np.full(len(self._slots), -1, dtype=np.int64)  # by slot: who wrote what is no number; -1: none
        # By slot, what a proposer on the device has seen there.
        self._proposers = np.full(len(self._slots), -1, dtype=np.int32)
        self.unseen = 0  # proposals that such a proposer made without having seen all tokens before
        self.states = FakeStates(limits) if limits.num_state_slots else None
        self._params: dict[int, SamplingParams] = {}
        self._prompt_len = np.zeros(rows, dtype=np.int32)
        self.fail: Callable[[int], bool] = lambda uid: False  # which sequences' steps fail
        self._uids: dict[int, int] = {}
        self.plans: list[StepPlan] = []
        self.computed_tokens = 0
        self._encoder = limits.encoder
        self.encoded: dict[bytes, int] = {}  # layers of each image that it has, or is encoding
        self._contents: dict[int, tuple[Content, ...]] = {}  # by row
        self.adapters = {one.name: one.number for one in limits.adapters}  # what names stand for
        self.hosted = set(self.adapters.values())  # numbers whose factors it has
        self.adapter_of: dict[int, int] = {}  # by uid, where its name has stood for another one since
        # What each slot of adapters has, and what has written each slot of the cache; -1: none.
        self._adapters = [-1, *range(limits.num_adapter_slots)]
        self._written_with = np.full(len(self._slots), -1, dtype=np.int64)
        self._adapter_slot: dict[int, int] = {}  # by row
        self.loads = 0

    def prepare(self, plan: StepPlan) -> StepPlan:
        return plan

    def sample(self, pending: object, masks: object) -> None:
        raise AssertionError("a step was sampled twice")

    def execute(self, batch: StepPlan) -> FakePending:
        plan = batch
        self.plans.append(plan)
        self._apply(plan)
        if self.states is not None:
            self.states.begin(plan, self._token_table, {row for row, uid in self._uids.items() if self.fail(uid)})
        if plan.num_proposed:
            return FakePending(StepResult(plan.step, NO_INT32, proposed=self._propose(plan)))
        tokens: list[int] = []
        logprobs: dict[int, Logprobs] = {}
        prompt_logprobs: dict[int, list[Logprobs]] = {}
        pooled: dict[int, Float32Array] = {}
        for chunk in plan.prefill:
            assert chunk.start % self._chunk_multiple == 0, "a chunk ends its prompt or at a multiple"
            self._look(chunk)
            self._compute(chunk.row, chunk.start, chunk.token_ids)
            if self.states is not None:
                self.states.compute_chunk(chunk, self._token_table[chunk.row], self.fail(self._uids[chunk.row]))
            if chunk.wants & Wants.PROMPT_LOGPROBS:
                last = min(chunk.end + 1, int(self._prompt_len[chunk.row]))
                prompt_logprobs[chunk.row] = [
                    fake_logprobs(at, int(self._token_table[chunk.row, at])) for at in range(chunk.start + 1, last)
                ]
            if chunk.pools:
                pooled[chunk.row] = self._pool(chunk)
            if chunk.samples:
                tokens.append(self._sample(chunk.row, chunk.end, len(tokens), logprobs))
        first = len(tokens)
        drafts = plan.draft_tokens.tolist() or [-1] * len(plan.decode_rows)
        for row, length, draft in zip(plan.decode_rows.tolist(), plan.decode_lengths.tolist(), drafts, strict=True):
            if draft >= 0:
                self._token_table[row, length - 1] = draft
            self._compute(row, length - 1, self._token_table[row, length - 1 : length])
            if self.states is not None:
                self.states.compute(row, self._token_table[row, :length], self.fail(self._uids[row]))
            tokens.append(self._sample(row, length, len(tokens), logprobs))
        self._token_table[plan.decode_rows, plan.decode_lengths] = tokens[first:]  # drafts were there
        rows = {chunk.row for chunk in plan.prefill} | set(plan.decode_rows.tolist())
        rows |= {one.row for one in plan.encode}
        failed = frozenset(row for row in rows if self.fail(self._uids[row]))
        ids = np.array(tokens, dtype=np.int32)
        accepted = plan.accepted(ids) if len(plan.draft_tokens) else None  # as the engine core does
        result = StepResult(plan.step, ids, logprobs, prompt_logprobs, failed, accepted=accepted, pooled=pooled)
        return FakePending(result)

    def _encode(self, plan: StepPlan) -> None:
        for key in plan.freed_vectors:
            assert self.encoded.pop(key, None) is not None, "what is freed was there"
        for one in plan.encode:
            assert self._encoder is not None
            assert self.encoded.get(one.key, 0) == one.first < one.last <= self._encoder.num_units(one.content)
            self.encoded[one.key] = one.last

    def _look(self, chunk: PrefillChunk) -> None:
        if self._encoder is None:
            return
        for content in self._contents.get(chunk.row, ()):
            if content.start < chunk.end and content.end > chunk.start:
                key = vectors_key(content, self._params[chunk.row].cache_salt)
                assert self.encoded.get(key) == self._encoder.num_units(content), "a chunk runs without its vectors"
                inside = content.start < chunk.end < content.end
                assert not (self._encoder.bidirectional and inside), "a chunk ends where tokens see later ones"

    def _apply(self, plan: StepPlan) -> None:
        groups = plan.page_groups if len(self._kinds) > 1 else np.zeros_like(plan.page_rows)
        assert len(plan.page_groups) in (0, len(groups)), "groups are named where there are several"
        entries = list(zip(groups.tolist(), plan.page_rows.tolist(), plan.page_columns.tolist(), strict=True))
        assert len(set(entries)) == len(entries), "an entry of the page table is written twice in one step"
        assert (plan.page_rows >= 0).all(), "an entry of the page table without a row"
        holes = [self._kinds[group] for group in groups[plan.page_ids == 0]]
        assert not any(kind.keeps_all for kind in holes), "page 0 is the padding page"
        assert len(set(plan.cleared_pages.tolist())) == len(plan.cleared_pages), "a page is cleared twice in one step"
        for array in (self._slots, self._unsound, self._proposers):
            array.reshape(-1, self._page_size)[plan.cleared_pages] = -1
        self._page_table[groups, plan.page_rows, plan.page_columns] = plan.page_ids
        for slot, number in plan.adapter_loads:
            assert number in self.hosted, "an adapter is loaded that was dropped"
            self._adapters[slot] = number
            self.loads += 1
        for admitted in plan.admitted:
            self._adapter_slot[admitted.row] = admitted.adapter
            self._token_table[admitted.row] = -1
            self._token_table[admitted.row, : len(admitted.token_ids)] = admitted.token_ids
            self._params[admitted.row] = admitted.params
            self._prompt_len[admitted.row] = admitted.prompt_len
            self._uids[admitted.row] = admitted.uid
            self._contents[admitted.row] = admitted.contents
            assert admitted.params.seed is not None
        self._encode(plan)

    def _slots_of(self, group: int, row: int, start: int, end: int) -> np.ndarray:
        at = np.arange(start, end)
        pages = self._page_table[group, row, at // self._page_size]
        assert (pages > 0).all(), "a page that is needed is not there"
        return pages * self._page_size + at % self._page_size

    def _compute(self, row: int, start: int, token_ids: np.ndarray) -> None:
        end = start + len(token_ids)
        assert len(token_ids) > 0
        assert (token_ids >= 0).all(), "an input token is not on the device yet"
        assert np.array_equal(self._token_table[row, start:end], token_ids)
        uid, name = self._uids[row], self._params[row].lora_name
        adapter = self._adapters[self._adapter_slot[row]]
        expected = -1 if name is None else self.adapter_of[uid] if uid in self.adapter_of else self.adapters[name]
        assert adapter == expected, "a row's slot has another's adapter"
        for group in range(len(self._kinds)):
            slots = self._slots_of(group, row, start, end)
            self._slots[slots], self._unsound[slots] = token_ids, uid if self.fail(uid) else -1
            self._written_with[slots] = adapter
        for group, kind in enumerate(self._kinds):
            first = first_seen(kind, start)
            context = self._slots[self._slots_of(group, row, first, end)]
            assert (self._written_with[self._slots_of(group, row, first, end)] == adapter).all(), "another's prefix"
            assert np.array_equal(context, self._token_table[row, first:end]), "the cache holds others' tokens"
            pages = self._page_table[group, row, : -(-end // self._page_size)]
            unsound = self._unsound.reshape(-1, self._page_size)[pages]
            assert np.isin(unsound, (-1, uid)).all(), "another's NaN is in a page"
        self.computed_tokens += len(token_ids)

    def _propose(self, plan: StepPlan) -> np.ndarray:
        """What follows, as the model has it. The proposer sees the tokens that the plan brings, and its own."""
        count, windows = (
            plan.num_proposing,
            len(self._kinds) > 1 or not self._kinds[0].keeps_all,
        )  # with windows not all pages are there
        parts = [(chunk.row, chunk.start, chunk.end) for chunk in plan.prefill]
        entries = list(zip(plan.decode_rows.tolist(), plan.decode_lengths.tolist(), strict=True))
        parts += [(row, length - 1, length) for row, length in entries[count:]]
        for row, start, end in () if windows else parts:
            self._proposers[self._slots_of(0, row, start, end)] = self._token_table[row, start:end]
        proposed = np.zeros((count, plan.num_proposed), dtype=np.int32)
        for which, (row, total) in enumerate(entries[:count]):
            for length in range(total, total + plan.num_proposed):
                last = self._token_table[row, length - 1]
                self._proposers[self._slots_of(0, row, length - 1, length)] = last
                token = next_token(length, int(last), (), self._vocab_size)
                proposed[which, length - total] = self._token_table[row, length] = token
            if not windows:
                seen = self._proposers[self._slots_of(0, row, 0, total)]
                self.unseen += int((seen != self._token_table[row, :total]).any())
        return proposed

    def _pool(self, chunk: PrefillChunk) -> Float32Array:
        states = [fake_state(chunk.start + at, token) for at, token in enumerate(chunk.token_ids.tolist())]
        if chunk.wants & Wants.STATE_SUM:
            return np.sum(states, axis=0, dtype=np.float32)
        return states[0] if chunk.wants & Wants.FIRST_STATE else states[-1]

    def _sample(self, row: int, position: int, index: int, logprobs: dict[int, Logprobs]) -> int:
        params = self._params[row]
        early = position - int(self._prompt_len[row]) < params.min_tokens
        forbidden = (*self._eos, *params.stop_token_ids) if early else ()
        token = next_token(position, int(self._token_table[row, position - 1]), forbidden, self._vocab_size)
        self._token_table[row, position] = token
        if params.logprobs is not None:
            logprobs[index] = fake_logprobs(position, token)
        return token


def make_request(uid: int, prompt: Sequence[int], **params: object) -> Request:
    """A request; these go to it, and all else to its sampling parameters."""
    names = ("priority", "deadline", "pooling", "tenant", "stable_len", "borders")
    outer = {name: params.pop(name) for name in names if name in params}
    token_ids = np.array(prompt, dtype="<i4").tobytes()
    return Request(uid=uid, token_ids=token_ids, params=SamplingParams(**params), **outer)  # type: ignore[arg-type]


def expected_answer(
    request: Request, max_length: int, eos: tuple[int, ...] = (), vocab_size: int = VOCAB_SIZE
) -> tuple[list[int], FinishReason]:
    """What each sequence of a request must produce: computed alone, one token after the other."""
    params = request.params
    if request.pooling is not None:
        return [], FinishReason.STOP
    tokens = np.frombuffer(request.token_ids, dtype="<i4").tolist()
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    answer: list[int] = []
    while True:
        early = len(answer) < params.min_tokens
        forbidden = (*eos, *params.stop_token_ids) if early else ()
        answer.append(next_token(len(tokens), tokens[-1], forbidden, vocab_size))
        tokens.append(answer[-1])
        if answer[-1] in stops and len(answer) >= params.min_tokens:
            return answer, FinishReason.STOP
        if len(tokens) >= max_length or len(answer) == params.max_tokens:
            return answer, FinishReason.LENGTH


class Records:
    """Everything that the clients of a scheduler have heard, by uid."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.details: dict[int, list[SequenceDetail]] = {}

    def take(self, scheduler: Scheduler | EngineCore) -> None:
        outputs = scheduler.drain_outputs()
        if outputs is None:
            return
        assert (outputs.uids.dtype, outputs.token_ids.dtype, outputs.reasons.dtype) == (np.int64, np.int32, np.uint8)
        records = zip(outputs.uids.tolist(), outputs.token_ids.tolist(), outputs.reasons.tolist(), strict=True)
        for index, (uid, token, reason) in enumerate(records):
            assert uid not in self.reasons, "a record after the last one"
            if token >= 0:
                self.tokens.setdefault(uid, []).append(token)
            else:
                assert reason, "a record without a token says why the sequence ended"
            if reason:
                self.reasons[uid] = FinishReason(reason)
            if index in outputs.details:
                self.details.setdefault(uid, []).append(outputs.details[index])


class Loop:
    """Scheduler and runner joined as the engine joins them, one half step at a time."""

    def __init__(self, scheduler: Scheduler, runner: FakeRunner, overlap: bool, check: bool = True) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.records = Records()
        self._overlap = overlap
        self._check = check
        self._pending: tuple[StepPlan, FakePending] | None = None

    def step(self) -> bool:
        """Plans and executes a step; with overlap commits the one before, else this one. False: nothing to do."""
        plan = self.scheduler.plan()
        self._verify()
        executed = None if plan is None else (plan, self.runner.execute(self.runner.prepare(plan)))
        if self._overlap:
            executed, self._pending = self._pending, executed
        if executed is not None:
            self.scheduler.commit(executed[0], executed[1].result())
            self._verify()
        self.records.take(self.scheduler)
        return plan is not None or executed is not None

    def run(self, most_steps: int = 100_000) -> Records:
        """Until nothing is left to do."""
        for _ in range(most_steps):
            if not self.step():
                assert not self.scheduler.has_work, "nothing can run, yet there is work"
                return self.records
        raise AssertionError(f"work is left after {most_steps} steps")

    def _verify(self) -> None:
        if self._check:
            self.scheduler.check()
