"""One sequence of a request, from the queue to its last token.

What changes with every token lives in `rows.RowState`, not here.
"""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt

from minisgl_backend.cache.kv_manager import PageLease
from minisgl_backend.request import SamplingParams
from minisgl_backend.step import Logprobs

Int32Array = npt.NDArray[np.int32]


class SequenceState(enum.Enum):
    """Where a sequence stands. A prompt that is half computed is a number, not a state of its own."""

    WAITING = enum.auto()  # in the queue, or held back until its group's prompt is cached
    RUNNING = enum.auto()  # has a row and a lease; planned
    PREEMPTED = enum.auto()  # lost its place; keeps row and lease until no step in flight names it, then waits
    ENDED = enum.auto()  # has told its reason; keeps row and lease until no step in flight names it


class Sequence:
    """The scheduler's record of one answer. `arrival` orders requests, `admission` orders running sequences."""

    __slots__ = (
        "admission",
        "admissions_before",
        "arrival",
        "cached_tokens",
        "deadline",
        "first_planned",
        "group",
        "lease",
        "level",
        "new_request",
        "params",
        "prompt_len",
        "prompt_logprobs",
        "row",
        "sound",
        "state",
        "tells_prompt",
        "token_ids",
        "uid",
    )

    def __init__(
        self,
        uid: int,
        token_ids: Int32Array,
        params: SamplingParams,
        level: int,
        arrival: int,
        deadline: float | None,
    ) -> None:
        self.uid = uid
        self.token_ids = token_ids  # while waiting: all tokens so far; while running: those it was admitted with
        self.params = params  # seed is never None
        self.prompt_len = len(token_ids)
        self.level = level  # 1 is the most urgent
        self.arrival = arrival
        self.deadline = deadline  # of the scheduler's clock
        self.first_planned = 0.0  # of the scheduler's clock; 0: not yet
        self.state = SequenceState.WAITING
        self.row = -1  # -1: none
        self.lease: PageLease | None = None
        self.admission = -1  # -1: not running
        self.admissions_before = 0  # admissions of all sequences when this one arrived
        self.group: Group | None = None
        self.sound = True  # false once a step of it has failed: its pages may hold NaN
        self.new_request = False  # counts against max_waiting_requests
        self.tells_prompt = False  # of all sequences of its request it tells what is known of their prompt
        self.cached_tokens: int | None = None  # prompt tokens that the cache supplied at the first admission
        self.prompt_logprobs: list[Logprobs] | None = None  # collected over the chunks; None: not wanted or done

    @property
    def resumed(self) -> bool:
        """True once the sequence has been admitted before: it only waits because it was preempted."""
        return self.cached_tokens is not None


class Group:
    """The sequences of one request with n > 1. One of them computes the prompt, the others wait for its pages."""

    __slots__ = ("held_back", "leader")

    def __init__(self, sequences: list[Sequence]) -> None:
        self.leader: Sequence | None = None  # None: the prompt is in the prefix cache, nobody has to wait any more
        self.held_back = list(sequences)
        for sequence in sequences:
            sequence.group = self
