"""One sequence of a request, from the queue to its last token.

What changes with every token is kept in `rows.RowState`, not here. Only the methods below change a sequence.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from minisgl_backend.adapters.served import NO_ADAPTER, ServedAdapter
from minisgl_backend.arrays import Float32Array, IdArray, Int32Array
from minisgl_backend.cache.content_ids import content_ids
from minisgl_backend.cache.lease import PageLease
from minisgl_backend.request import SEED_RANGE, Content, PoolingParams, SamplingParams
from minisgl_backend.scheduler import pooling as pooled_vectors
from minisgl_backend.step import Logprobs, SequenceDetail, Wants

# Spreads the seeds of one request's sequences (n > 1) over the whole range: 2**64 divided by the golden ratio.
SEED_STRIDE = 0x9E3779B97F4A7C15

# The level of requests without a priority: levels 1 to 7 are more urgent, those from 9 on less.
DEFAULT_LEVEL = 8


class SequenceState(enum.Enum):
    """The state of a sequence. A half-computed prompt is a token count, not a state of its own."""

    WAITING = enum.auto()  # in the queue, or held back until its group's prompt is cached
    RUNNING = enum.auto()  # has a row and a lease; planned
    PREEMPTED = enum.auto()  # in no later plan; keeps row and lease until no step in flight includes it, then waits
    ENDED = enum.auto()  # its reason is recorded; keeps row and lease until no step in flight includes it


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """The scheduler's record of one answer. `arrival` orders requests, `admission` orders running sequences."""

    uid: int
    token_ids: Int32Array  # while waiting: all tokens so far; while running: those it was admitted with
    params: SamplingParams  # seed is never None
    level: int  # 1 is the most urgent
    arrival: int
    deadline: float | None  # by the scheduler's clock
    admissions_before: int = 0  # admissions of all sequences before this one arrived
    pooling: PoolingParams | None = None  # not None: the sequence ends with its prompt, which becomes a vector
    tenant: int = 0  # the tenant's number, where shares are fair
    contents: tuple[Content, ...] = ()  # images and the like in its prompt
    adapter: ServedAdapter = NO_ADAPTER
    salt: bytes = b""  # of its prefix (`cache.salt`)
    stable_len: int = 0  # leading tokens that a later prompt is likely to have, and
    borders: tuple[int, ...] = ()  # of parts that others have, too (`Request`)

    prompt_len: int = field(init=False)
    first_planned: float = 0.0  # by the scheduler's clock; 0: not yet
    state: SequenceState = SequenceState.WAITING
    row: int = -1  # -1: none
    lease: PageLease | None = None
    admission: int = -1  # -1: not running
    group: Group | None = None
    failed: bool = False  # one of its steps has failed: its pages may hold NaN
    reports_prompt: bool = False  # it reports the prompt's details for all sequences of its request
    kept_states: dict[int, int] = field(default_factory=dict)  # of this admission's prompt (`states_to_keep`)
    cached_tokens: int | None = None  # prompt tokens that the cache supplied at the first admission
    prompt_logprobs: list[Logprobs] | None = None  # collected chunk by chunk; None: not requested, or sent
    pooled: Float32Array | None = None  # the sum of its chunks' pooling outputs; None as above
    draft_tokens: int = 0  # verified
    accepted_draft_tokens: int = 0  # and accepted

    def __post_init__(self) -> None:
        self.prompt_len = len(self.token_ids)

    @property
    def resumed(self) -> bool:
        """True once the sequence has been admitted before: it waits because it was preempted."""
        return self.cached_tokens is not None

    @property
    def is_background(self) -> bool:
        """Whether it has a lower priority than the default, as requests of batches do."""
        return self.level > DEFAULT_LEVEL

    def cache_ids(self, token_ids: Int32Array) -> IdArray:
        """The prefix cache's ids for its first tokens, which are `token_ids`."""
        return content_ids(token_ids, self.contents) if self.contents else token_ids

    @property
    def reads_cache(self) -> bool:
        """Whether its prompt may use pages of the prefix cache. Prompt log-probabilities and means need all tokens."""
        return self.prompt_logprobs is None and (self.pooling is None or self.pooling.reads_cache)

    def wants(self, start: int, end: int) -> int:
        """The outputs (`Wants`) requested of the chunk from token `start` to `end`."""
        is_last = end == len(self.token_ids)
        if self.pooling is not None:
            return pooled_vectors.wants(self.pooling, is_first=start == 0, is_last=is_last)
        wants = Wants.TOKEN if is_last else Wants.NOTHING
        return wants if self.prompt_logprobs is None else wants | Wants.PROMPT_LOGPROBS

    def report_prompt(self) -> None:
        """Makes this the sequence of its request that computes and reports the prompt's details."""
        self.reports_prompt = True
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = []

    def admit(self, row: int, lease: PageLease, admission: int, cached_tokens: int) -> None:
        """WAITING to RUNNING. `cached_tokens`: supplied by the prefix cache; the first admission's count is kept."""
        self.state, self.row, self.lease, self.admission = SequenceState.RUNNING, row, lease, admission
        if self.cached_tokens is None:
            self.cached_tokens = cached_tokens
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.clear()  # a preempted prompt starts again
        self.pooled = None

    def keep_states(self, borders: dict[int, int]) -> None:
        """Its prompt leaves states behind these borders (`states_to_keep`)."""
        self.kept_states = borders

    def note_planned(self, now: float) -> None:
        """A step with one of its tokens has been planned; records the first time."""
        self.first_planned = self.first_planned or now

    def preempt(self) -> None:
        """RUNNING to PREEMPTED; the row and the lease stay until `requeue`."""
        self.state = SequenceState.PREEMPTED

    def finish(self) -> None:
        """To ENDED; a row and a lease stay until `vacate`."""
        self.state = SequenceState.ENDED

    def fail(self) -> None:
        """One of its steps has failed, or has computed NaN."""
        self.failed = True

    def vacate(self) -> None:
        """Its row and lease have been taken back."""
        self.row, self.lease, self.admission = -1, None, -1

    def requeue(self, token_ids: Int32Array) -> None:
        """PREEMPTED to WAITING, without row and lease. `token_ids`: prompt and answer so far, [num_tokens]."""
        self.vacate()
        self.state, self.token_ids = SequenceState.WAITING, token_ids

    def note_drafts(self, drafted: int, accepted: int) -> None:
        """A step has verified `drafted` drafts; `accepted` of them became tokens of the answer."""
        self.draft_tokens += drafted
        self.accepted_draft_tokens += accepted

    def add_prompt_logprobs(self, logprobs: Iterable[Logprobs]) -> None:
        """Adds those of one more chunk, if they are collected."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.extend(logprobs)

    def take_prompt_logprobs(self) -> tuple[Logprobs, ...]:
        """Those of every prompt token but the first, once; () if none are collected."""
        gathered, self.prompt_logprobs = self.prompt_logprobs, None
        return tuple(gathered[: self.prompt_len - 1]) if gathered else ()  # the runner may add one

    def first_detail(self, first_token: float, **outputs: Any) -> SequenceDetail:
        """What its first record tells, with these outputs of its prompt. `first_token`: when it came, by the
        scheduler's clock."""
        cached, planned = self.cached_tokens, self.first_planned
        return SequenceDetail(cached_tokens=cached, first_planned=planned, first_token=first_token, **outputs)

    def add_pooled(self, vector: Float32Array) -> None:
        """Adds the pooling output of one more chunk, [width]."""
        self.pooled = vector if self.pooled is None else self.pooled + vector

    def take_pooled(self) -> bytes:
        """The vector of the whole prompt; float32, little-endian."""
        assert self.pooling is not None, "it becomes a vector"
        assert self.pooled is not None, "its last chunk has been computed"
        return pooled_vectors.finish(self.pooling, self.pooled, self.prompt_len).astype("<f4").tobytes()


class Group:
    """The sequences of one request with n > 1. Its leader computes the prompt, the others are held back until the
    prompt's pages are in the prefix cache."""

    __slots__ = ("held_back", "leader")

    def __init__(self, sequences: list[Sequence]) -> None:
        self.leader: Sequence | None = None  # None: the prompt is in the prefix cache, and no sequence is held back
        self.held_back = list(sequences)
        for sequence in sequences:
            sequence.group = self

    def next_leader(self) -> Sequence:
        """Makes the next of the held-back sequences the leader."""
        self.leader = self.held_back.pop(0)
        self.leader.report_prompt()
        return self.leader

    def open(self) -> list[Sequence]:
        """The prompt is cached: returns the sequences that were held back, which may run now."""
        released, self.held_back, self.leader = self.held_back, [], None
        return released

    def leave(self, sequence: Sequence) -> Sequence | None:
        """A sequence has ended; returns the new leader, if it was the leader and others need one."""
        if sequence in self.held_back:
            self.held_back.remove(sequence)
        elif self.leader is sequence:
            self.leader = None
            if self.held_back:
                return self.next_leader()
        return None


def preempted_first(sequence: Sequence) -> tuple[int, int]:
    """Sort key of victims, the largest is preempted first: the least urgent level, then the latest admission."""
    return sequence.level, sequence.admission


def with_seed_of(params: SamplingParams, seed: int, index: int) -> SamplingParams:
    """The parameters of a request's sequence number `index`; `seed` is that of the first one."""
    return params.with_seed((seed + index * SEED_STRIDE) % SEED_RANGE)
