"""Which tokens a grammar allows next: has it compiled beside the step loop, follows each sequence by uid.

A step's masks are made once the step before is committed, while the device computes the logits that they will mask. So
they rest on committed tokens, but for those behind drafts: there a matcher follows the drafts and is rolled back.
"""

from __future__ import annotations

import importlib.util
import logging
import queue
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from minisgl_backend.arrays import NO_INT32, Int32Array
from minisgl_backend.errors import CapacityError, InvalidRequestError, MinisglError, status_of
from minisgl_backend.grammar.compilers import GrammarCompilers
from minisgl_backend.grammar.draft_masks import DraftMasks, has_token_limit
from minisgl_backend.grammar.jobs import Job
from minisgl_backend.grammar.mask_filler import MaskFiller
from minisgl_backend.grammar.thinking_budget import ThinkingBudget
from minisgl_backend.grammar.time_budget import BUSY, MIN_COUNTED_S, TOO_SLOW, ThreadClock, TimeBudget
from minisgl_backend.request import FinishReason, Grammar, Request
from minisgl_backend.step import SequenceDetail, StepPlan, StepResult

log = logging.getLogger(__name__)


MAX_COMPILING = 256  # requests whose grammar waits for a compiler


@dataclass(frozen=True)
class CompiledRequest:
    """A request that may be scheduled now, or the error that its sender must see."""

    request: Request
    error: MinisglError | None


@dataclass(frozen=True)
class Ended:
    """A sequence that must end although it may go on."""

    uid: int
    reason: FinishReason  # STOP: its answer is complete, or what its grammar said cannot be followed; ERROR
    detail: SequenceDetail | None  # with ERROR, what its sender must see


class GrammarManager:
    """The grammars of all sequences of one engine. Used by the step loop only."""

    def __init__(self, compilers: GrammarCompilers, budget: TimeBudget | None = None) -> None:
        """`close` closes the compilers. `budget`: what grammars may take."""
        self._compilers = compilers
        self._done: queue.SimpleQueue[tuple[Request, Any, MinisglError | None]] = queue.SimpleQueue()
        self._compiling: dict[int, Request] = {}  # by uid
        self._matchers: dict[int, Any] = {}  # by uid of the sequence
        self._grammars: dict[int, Grammar] = {}  # likewise
        self._thinking: dict[int, ThinkingBudget] = {}  # likewise
        self._rows: dict[int, int] = {}  # row -> uid, of sequences with a grammar or bounded thoughts
        self._ended: list[Ended] = []
        self._budget = budget or TimeBudget()
        self._filler = MaskFiller(self._budget)
        self._draft_masks = DraftMasks()
        self._no_jump_forward: set[int] = set()  # uids whose grammars are not asked for forced text any more

    @property
    def num_compiling(self) -> int:
        return len(self._compiling)

    @property
    def room(self) -> int:
        """Requests that `submit` takes now, whatever their grammars are; beyond, only those whose are known."""
        # Those that are ready wait for no compiler any more, and those that were cancelled count until the compilers
        # have passed over them.
        return MAX_COMPILING - max(len(self._compiling) - self.num_ready, self._compilers.num_waiting)

    @property
    def num_ready(self) -> int:
        """Requests that `drain_compiled` would return, those that were cancelled meanwhile included."""
        return self._done.qsize()

    def submit(self, request: Request, grammar: Grammar) -> None:
        """Has the request's grammar compiled; it comes back from `drain_compiled`.

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
        if self.room <= 0 and not self._compilers.cache.is_known(grammar):
            raise CapacityError(f"{MAX_COMPILING} requests wait for their grammars to be compiled; try again later")
        self._compiling[request.uid] = request
        job = Job(
            grammar=grammar,
            is_awaited=lambda: request.uid in self._compiling,
            done=lambda compiled, error: self._done.put((request, compiled, error)),
        )
        try:
            self._compilers.submit(job)
        except CapacityError:
            del self._compiling[request.uid]
            raise

    def drain_compiled(self) -> list[CompiledRequest]:
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
            if error is None and request.params.grammar is not None:
                import xgrammar

                for uid in range(request.uid, request.uid + request.params.n):
                    self._matchers[uid] = xgrammar.GrammarMatcher(compiled)
                    self._grammars[uid] = request.params.grammar
                self.track_thinking(request)
            ready.append(CompiledRequest(request, error))
        return ready

    def track_thinking(self, request: Request) -> None:
        """Bounds the thoughts of its sequences, where it asks for that."""
        params = request.params
        if params.thinking_tags is not None and params.thinking_token_budget is not None:
            for uid in range(request.uid, request.uid + params.n):
                self._thinking[uid] = ThinkingBudget(
                    params.thinking_tags, params.thinking_token_budget, has_grammar=params.grammar is not None
                )

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
        self._grammars.pop(uid, None)
        self._thinking.pop(uid, None)
        self._no_jump_forward.discard(uid)

    def forced_tokens(self, uid: int, most: int) -> Int32Array:
        """The text that a sequence's grammar leaves no choice about behind its committed tokens, as drafts: int32 [at
        most `most`], the next token first."""
        matcher, forced_text_tokenizer = self._matchers.get(uid), self._compilers.forced_text_tokenizer
        if matcher is None or forced_text_tokenizer is None or uid in self._thinking or uid in self._no_jump_forward:
            return NO_INT32
        grammar, clock = self._grammars[uid], ThreadClock()
        started, text = clock.now, b""
        try:
            if not has_token_limit(grammar) and not matcher.is_terminated():
                text = matcher.find_jump_forward_string().encode()
        except UnicodeDecodeError as error:
            text = error.object  # it ends within a character
        except Exception as error:  # whatever the library raises: without drafts it may do
            log.debug("what a grammar forces is not known: %s", error)
            self._no_jump_forward.add(uid)
        now = time.perf_counter()
        if now - started > MIN_COUNTED_S and (seconds := clock.cpu_seconds_since(started, now)) > MIN_COUNTED_S:
            self._budget.charge(grammar, seconds)
            self._no_jump_forward.add(uid)
        return forced_text_tokenizer.encode(text, most) if text else NO_INT32

    def drain_ended(self) -> list[Ended]:
        """Sequences that `masks` and `advance` found since the last call; each comes once, and is dropped."""
        ended = self._ended
        if ended:
            self._ended = []
        return ended

    def begin(self, plan: StepPlan) -> None:
        """Notes which sequences take rows with this plan; plans come in order. What is computed from now on belongs to
        a step of its own."""
        self._budget.begin_step()
        self._draft_masks.begin()  # also of steps that ask for no masks
        for admitted in plan.admitted:  # also while nobody has a grammar: a row must not keep what it had before
            self._rows.pop(admitted.row, None)
            if admitted.uid in self._matchers or admitted.uid in self._thinking:
                self._rows[admitted.row] = admitted.uid

    def masks(
        self, plan: StepPlan, grammar_bitmask: Callable[[int], Int32Array]
    ) -> tuple[Int32Array, Int32Array] | None:
        """(result indices [k], bits [k, ceil(vocab / 32)]) of the plan's rows of which a grammar, or the end of their
        thoughts, says what may come next; None: there is none.

        Call it when all earlier steps are committed. Bit `t % 32` of word `t // 32` is 1 where token t is allowed; a
        row without any is one that must fail. A sequence that has ended is not masked: its token is dropped.
        `grammar_bitmask`: StepRunner's, the buffer for the bits. It is not kept: a compiler's thread holds this object
        until the process ends, and must not be the one that frees a runner.
        """
        matched = self._constrained_rows(plan)
        forced: list[tuple[int, int]] = []
        drafted: list[tuple[int, int, int]] = []
        if len(plan.draft_tokens):
            matched, drafted = self._split_drafts(plan, matched)
        if self._thinking:
            matched, forced = self._split_forced(matched)
        if not matched and not forced:
            return None
        bitmask = grammar_bitmask(len(matched) + len(forced) + len(drafted))
        indices = [index for index, _ in matched]
        errors = self._filler.fill(
            [self._matchers[uid] for _, uid in matched],
            bitmask,
            lambda mask_row: self._grammars[matched[mask_row][1]],
            num_new=bisect_left(indices, sum(chunk.samples for chunk in plan.prefill)),
        )
        for mask_row, error in errors.items():
            bitmask[mask_row] = -1  # the model computed well: the row fails nowhere, and its token is dropped
            self._fail(matched[mask_row][1], error)
        self._enforce_budget()
        if self._thinking:
            self._fill_thinking_masks(matched, forced, bitmask)
        indices = [index for index, _ in (*matched, *forced)]
        if drafted:
            indices += self._draft_masks.fill(drafted, self._matchers, self._grammars, bitmask[len(indices) :])
            bitmask = bitmask[: len(indices)]
        return np.array(indices, dtype=np.int32), bitmask

    def _split_drafts(
        self, plan: StepPlan, rows: list[tuple[int, int]]
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
        """Of (result index, uid): those whose input is committed; and (result index, uid, draft) of those whose input
        is a draft."""
        first_decode = len(plan.sampled_rows) - len(plan.decode_rows)
        drafts = [-1] * first_decode + plan.draft_tokens.tolist()
        committed = [(index, uid) for index, uid in rows if drafts[index] < 0]
        return committed, [(index, uid, drafts[index]) for index, uid in rows if drafts[index] >= 0]

    def _split_forced(self, rows: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Of (result index, uid): those that are masked by their grammar, and (result index, token) of those of which
        one token must come next. All others are free to think."""
        matched: list[tuple[int, int]] = []
        forced: list[tuple[int, int]] = []
        for index, uid in rows:
            thinking = self._thinking.get(uid)
            if thinking is not None and thinking.forced is not None:
                forced.append((index, thinking.forced))
            elif uid in self._matchers and not (thinking is not None and thinking.is_thinking):
                matched.append((index, uid))
        return matched, forced

    def _fill_thinking_masks(
        self, matched: list[tuple[int, int]], forced: list[tuple[int, int]], bitmask: Int32Array
    ) -> None:
        """Masks of forced tokens, behind those of grammars; and in these the token that may open the thoughts."""
        words = bitmask.view(np.uint32)
        words[len(matched) : len(matched) + len(forced)] = 0
        for mask_row, (_, token) in enumerate(forced, len(matched)):
            words[mask_row, token // 32] = 1 << token % 32
        for mask_row, (_, uid) in enumerate(matched):
            thinking = self._thinking.get(uid)
            if thinking is not None and (opening := thinking.opening) is not None:
                bit = np.uint32(1 << opening % 32)
                thinking.allow_opening(is_new=not words[mask_row, opening // 32] & bit)
                words[mask_row, opening // 32] |= bit

    def advance(self, plan: StepPlan, result: StepResult) -> None:
        """Follows the sampled tokens that count; in `result.accepted` those behind the end of an answer do not."""
        if not self._matchers and not self._thinking:
            return
        tokens, clock, accepted = result.token_ids.tolist(), ThreadClock(), result.accepted
        if accepted is not None:
            accepted[self._draft_masks.unmasked] = False
        now = clock.now
        for index, uid in self._constrained_rows(plan):
            if accepted is not None:
                accepted[index] &= uid in self._matchers or uid in self._thinking  # else its answer has ended before
                if not accepted[index]:
                    continue
            thinking = self._thinking.get(uid)
            if (thinking is not None and not thinking.accept(tokens[index])) or uid not in self._matchers:
                continue
            matcher, grammar, started = self._matchers[uid], self._grammars[uid], now
            if self._budget.over_budget and grammar in self._budget.over_budget:
                continue
            if self._budget.refuses_all:
                self._fail(uid, CapacityError(BUSY))
                continue
            try:
                if not matcher.accept_token(tokens[index]) or matcher.is_terminated():
                    self._end(Ended(uid, FinishReason.STOP, None))
            except Exception as error:
                self._fail(uid, error)
            now = time.perf_counter()
            if now - started <= MIN_COUNTED_S:
                continue
            is_too_slow = self._budget.charge(grammar, clock.cpu_seconds_since(started, now))
            if is_too_slow and uid in self._matchers:
                self._fail(uid, InvalidRequestError(TOO_SLOW))
        self._enforce_budget()

    def _fail(self, uid: int, error: Exception) -> None:
        """Whatever the library raises ends one sequence, not the step; so does what takes too long."""
        if isinstance(error, MinisglError):
            text = str(error)
        else:
            text = f"the grammar could not be followed: {type(error).__name__}: {error}"[:500]
            log.error("the grammar of sequence %d failed", uid, exc_info=error)
        self._end(Ended(uid, FinishReason.ERROR, SequenceDetail(error=text, status=status_of(error))))

    def _enforce_budget(self) -> None:
        """Refuses what was too slow: whoever sent it again would let all others wait again. All sequences of a grammar
        that takes too much of the step end, also those that wait for a row."""
        for grammar in self._budget.drain_too_slow():
            log.error("a grammar (%s) takes too long to follow, and is refused for a while", grammar.kind)
            self._compilers.cache.note_refused(grammar, TOO_SLOW)
        if self._budget.over_budget:
            for uid in [uid for uid, grammar in self._grammars.items() if grammar in self._budget.over_budget]:
                self._fail(uid, InvalidRequestError(TOO_SLOW))

    def _end(self, ended: Ended) -> None:
        self._ended.append(ended)
        self.drop(ended.uid)

    def _constrained_rows(self, plan: StepPlan) -> list[tuple[int, int]]:
        """(result index, uid) of the sampled rows with a live matcher, or bounded thoughts."""
        return [
            (index, uid)
            for index, row in enumerate(plan.sampled_rows.tolist())
            if (uid := self._rows.get(row)) is not None and (uid in self._matchers or uid in self._thinking)
        ]

    def close(self) -> None:
        self._filler.close()
        self._compilers.close()
