"""Which tokens a grammar allows next: has it compiled beside the step loop, follows each sequence by uid.

A step's masks are made once the step before is committed, while the device computes the logits that they will mask. So
they always rest on committed tokens and nothing is ever rolled back.
"""

from __future__ import annotations

import importlib.util
import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from minisgl_backend.engine.grammar_compilers import GrammarCompilers, Job
from minisgl_backend.engine.mask_filler import MaskFiller
from minisgl_backend.errors import CapacityError, InvalidRequestError, MinisglError
from minisgl_backend.request import FinishReason, Grammar, Request
from minisgl_backend.step import StepPlan, StepResult

log = logging.getLogger(__name__)

Int32Array = npt.NDArray[np.int32]

LATE_S = 0.25  # of the processor, for one token of one sequence or its mask: all others wait meanwhile
MAX_COMPILING = 256  # requests whose grammar waits for a compiler


@dataclass(frozen=True)
class CompiledRequest:
    """A request that may be scheduled now, or the error that its sender must see."""

    request: Request
    error: MinisglError | None


class Grammars:
    """The grammars of all sequences of one engine. Used by the step loop only."""

    def __init__(self, compilers: GrammarCompilers) -> None:
        """`close` closes the compilers."""
        self._compilers = compilers
        self._done: queue.SimpleQueue[tuple[Request, Any, MinisglError | None]] = queue.SimpleQueue()
        self._compiling: dict[int, Request] = {}  # by uid
        self._matchers: dict[int, Any] = {}  # by uid of the sequence
        self._rows: dict[int, int] = {}  # row -> uid, of sequences with a grammar
        self._complete: set[int] = set()  # uids whose answer is complete: their matchers take nothing more
        self._filler = MaskFiller(LATE_S)

    @property
    def num_compiling(self) -> int:
        return len(self._compiling)

    @property
    def room(self) -> int:
        """Requests that `submit` takes now, whatever their grammars are."""
        # Those that were cancelled count until the compilers have passed over them.
        return MAX_COMPILING - max(len(self._compiling), self._compilers.num_waiting)

    @property
    def num_ready(self) -> int:
        """Requests that `take_compiled` would return, those that were cancelled meanwhile included."""
        return self._done.qsize()

    def submit(self, request: Request, grammar: Grammar) -> None:
        """Has the request's grammar compiled; it comes back from `take_compiled`.

        Raises InvalidRequestError where a grammar cannot be served at all, CapacityError where too many wait.
        """
        if importlib.util.find_spec("xgrammar") is None:
            raise InvalidRequestError(
                "guided_decoding_guide: this server cannot constrain outputs, since the package xgrammar is missing "
                "(pip install 'xgrammar>=0.1.27')"
            )
        if request.params.min_tokens > 0:
            raise InvalidRequestError(
                f"min_tokens is {request.params.min_tokens}; allowed: 0 with guided decoding, where the grammar "
                "alone says when an answer may end"
            )
        if self.room <= 0 and not self._compilers.memory.is_settled(grammar):
            raise CapacityError(f"{MAX_COMPILING} requests wait for their grammars to be compiled; try again later")
        self._compiling[request.uid] = request
        job = Job(
            grammar=grammar,
            is_wanted=lambda: request.uid in self._compiling,
            done=lambda compiled, error: self._done.put((request, compiled, error)),
        )
        try:
            self._compilers.submit(job)
        except CapacityError:
            del self._compiling[request.uid]
            raise

    def take_compiled(self) -> list[CompiledRequest]:
        """Requests whose grammar is ready or wrong, since the last call."""
        ready: list[CompiledRequest] = []
        while self._compiling:
            try:
                request, compiled, error = self._done.get_nowait()
            except queue.Empty:
                break
            if request.uid not in self._compiling:
                continue  # cancelled meanwhile
            del self._compiling[request.uid]
            if error is None:
                import xgrammar

                for uid in range(request.uid, request.uid + request.params.n):
                    self._matchers[uid] = xgrammar.GrammarMatcher(compiled)
            ready.append(CompiledRequest(request, error))
        return ready

    def cancel(self, uid: int) -> int:
        """Forgets a request that is still being compiled; returns how many sequences it had, 0 where there is none."""
        request = self._compiling.pop(uid, None)
        return 0 if request is None else request.params.n

    def overdue(self, now: float) -> list[int]:
        """Uids of requests that are still being compiled although their deadline has passed."""
        return [uid for uid, one in self._compiling.items() if one.deadline is not None and one.deadline <= now]

    def drop(self, uid: int) -> None:
        """The sequence has ended."""
        self._matchers.pop(uid, None)
        self._complete.discard(uid)

    def begin(self, plan: StepPlan) -> None:
        """Notes which sequences take rows with this plan; plans come in order."""
        for admitted in plan.admitted:  # also while nobody has a grammar: a row must not keep what it had before
            self._rows.pop(admitted.row, None)
            if admitted.uid in self._matchers:
                self._rows[admitted.row] = admitted.uid

    def masks(self, plan: StepPlan, mask_lines: Callable[[int], Int32Array]) -> tuple[Int32Array, Int32Array] | None:
        """(result indices [k], bits [k, ceil(vocab / 32)]) of the plan's rows that have a grammar; None: no row has.

        Call it when all earlier steps are committed. Bit `t % 32` of word `t // 32` is 1 where token t is allowed; a
        row without any is one that must fail. A sequence whose answer is complete is not masked: its token is dropped.
        `mask_lines`: StepRunner's, where the bits are to lie. It is not kept: a compiler's thread holds this object
        until the process ends, and must not be the one that frees a runner.
        """
        matched = [(index, uid) for index, uid in self._matched(plan) if uid not in self._complete]
        if not matched:
            return None
        bits = mask_lines(len(matched))
        for line, error in self._filler.fill([self._matchers[uid] for _, uid in matched], bits).items():
            # Whatever the library raises ends one sequence, not the step; so does what takes too long.
            log.error("the grammar of sequence %d failed", matched[line][1], exc_info=error)
            bits[line] = 0
        return np.array([index for index, _ in matched], dtype=np.int32), bits

    def advance(self, plan: StepPlan, result: StepResult) -> list[tuple[int, FinishReason]]:
        """Follows the sampled tokens; returns sequences that must end although they may go on, and why: their answer
        is complete, or what their grammar said cannot be followed."""
        ended: list[tuple[int, FinishReason]] = []
        if not self._matchers:
            return ended
        tokens, computed = result.token_ids.tolist(), time.thread_time()
        now = began = time.perf_counter()
        for index, uid in self._matched(plan):
            matcher, started = self._matchers[uid], now
            try:
                if uid in self._complete or not matcher.accept_token(tokens[index]):
                    ended.append((uid, FinishReason.STOP))
                elif matcher.is_terminated():
                    self._complete.add(uid)
                    ended.append((uid, FinishReason.STOP))
            except Exception:  # whatever the library raises ends one sequence, not the step
                log.exception("the grammar of sequence %d failed", uid)
                ended.append((uid, FinishReason.ERROR))
                continue
            now = time.perf_counter()
            # Where the machine stood, this thread did not compute. Its clock is dear to ask for each token: for those
            # before this one it has computed for `started - began` at most.
            if now - started > LATE_S and time.thread_time() - computed - (started - began) > LATE_S:
                log.error("the grammar of sequence %d takes too long to follow", uid)
                ended.append((uid, FinishReason.ERROR))
        return ended

    def _matched(self, plan: StepPlan) -> list[tuple[int, int]]:
        """(result index, uid) of the sampled rows with a live matcher."""
        return [
            (index, uid)
            for index, row in enumerate(plan.sampled_rows.tolist())
            if (uid := self._rows.get(row)) is not None and uid in self._matchers
        ]

    def close(self) -> None:
        self._filler.close()
        self._compilers.close()
