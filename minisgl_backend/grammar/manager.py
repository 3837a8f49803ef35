"""Guided decoding of all sequences: compiles grammars outside the step loop, keeps a matcher per sequence, fills masks.

The masks of a step are filled once the previous step is committed, while the device computes the logits that they will
mask. So they depend on committed tokens only, except those after drafts: there a matcher accepts the drafts and is
rolled back.
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
from minisgl_backend.grammar.compiling.compilers import GrammarCompilers, Job
from minisgl_backend.grammar.draft_masks import DraftMasks, has_token_limit
from minisgl_backend.grammar.mask_filler import MaskFiller
from minisgl_backend.grammar.thinking_budget import ThinkingBudget
from minisgl_backend.grammar.time_budget import BUSY, MIN_COUNTED_S, TOO_SLOW, ThreadClock, TimeBudget
from minisgl_backend.request import FinishReason, Grammar, Request
from minisgl_backend.step import SequenceDetail, StepPlan, StepResult

log = logging.getLogger(__name__)


MAX_COMPILING = 256  # requests that wait for their grammar to be compiled


@dataclass(frozen=True)
class CompiledRequest:
    """A request that may be scheduled now, or the error to answer it with."""

    request: Request
    error: MinisglError | None


@dataclass(frozen=True)
class Ended:
    """A sequence that its grammar ends."""

    uid: int
    reason: FinishReason  # STOP: its text is complete, or the grammar cannot continue; ERROR
    detail: SequenceDetail | None  # with ERROR, the error to answer with


class GrammarManager:
    """Grammars and thinking budgets of all sequences of one engine. Used by the step loop only."""

    def __init__(self, compilers: GrammarCompilers, budget: TimeBudget | None = None) -> None:
        """`close` closes the compilers. `budget`: CPU time that grammars may take."""
        self._compilers = compilers
        self._done: queue.SimpleQueue[tuple[Request, Any, MinisglError | None]] = queue.SimpleQueue()
        self._compiling: dict[int, Request] = {}  # by uid
        self._matchers: dict[int, Any] = {}  # by uid of the sequence
        self._grammars: dict[int, Grammar] = {}  # by uid of the sequence
        self._thinking: dict[int, ThinkingBudget] = {}  # by uid of the sequence
        self._rows: dict[int, int] = {}  # row -> uid, of sequences with a grammar or a thinking budget
        self._ended: list[Ended] = []
        self._budget = budget or TimeBudget()
        self._filler = MaskFiller(self._budget)
        self._draft_masks = DraftMasks()
        self._no_jump_forward: set[int] = set()  # uids for which finding forced text failed or was slow

    @property
    def num_compiling(self) -> int:
        return len(self._compiling)

    @property
    def room(self) -> int:
        """Number of requests that `submit` takes now with any grammar; requests with a cached grammar need no room."""
        # Compiled requests no longer wait for a compiler; cancelled ones count until they leave the compilers' queue.
        return MAX_COMPILING - max(len(self._compiling) - self.num_ready, self._compilers.num_waiting)

    @property
    def num_ready(self) -> int:
        """Number of requests that `drain_compiled` has to process, including cancelled ones."""
        return self._done.qsize()

    def submit(self, request: Request, grammar: Grammar) -> None:
        """Starts compiling the request's grammar; `drain_compiled` returns the request once it is done.

        Raises InvalidRequestError if grammars or this combination cannot be served, CapacityError if too many wait.
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
        """Requests whose grammar was compiled or refused since the last call."""
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
        """Applies the request's `thinking_token_budget`, if any, to its sequences."""
        params = request.params
        if params.thinking_tags is not None and params.thinking_token_budget is not None:
            for uid in range(request.uid, request.uid + params.n):
                self._thinking[uid] = ThinkingBudget(
                    params.thinking_tags, params.thinking_token_budget, has_grammar=params.grammar is not None
                )

    def cancel(self, uid: int) -> int:
        """Drops a request whose grammar is being compiled; returns its number of sequences, 0 if there is none."""
        request = self._compiling.pop(uid, None)
        return 0 if request is None else request.params.n

    def overdue(self, now: float) -> list[int]:
        """Uids of requests whose deadline has passed while their grammar is being compiled."""
        return [uid for uid, one in self._compiling.items() if one.deadline is not None and one.deadline <= now]

    def drop(self, uid: int) -> None:
        """The sequence has ended."""
        self._matchers.pop(uid, None)
        self._grammars.pop(uid, None)
        self._thinking.pop(uid, None)
        self._no_jump_forward.discard(uid)

    def forced_tokens(self, uid: int, most: int) -> Int32Array:
        """Draft tokens for jump-forward decoding: the text that a sequence's grammar forces after its committed tokens,
        int32 [at most `most`]."""
        matcher, forced_text_tokenizer = self._matchers.get(uid), self._compilers.processes.forced_text_tokenizer
        if matcher is None or forced_text_tokenizer is None or uid in self._thinking or uid in self._no_jump_forward:
            return NO_INT32
        grammar, clock = self._grammars[uid], ThreadClock()
        started, text = clock.now, b""
        try:
            if not has_token_limit(grammar) and not matcher.is_terminated():
                text = matcher.find_jump_forward_string().encode()
        except UnicodeDecodeError as error:
            text = error.object  # the forced bytes end within a character
        except Exception as error:  # whatever xgrammar raises: decoding continues without these drafts
            log.debug("no jump-forward text from a grammar: %s", error)
            self._no_jump_forward.add(uid)
        now = time.perf_counter()
        if now - started > MIN_COUNTED_S and (seconds := clock.cpu_seconds_since(started, now)) > MIN_COUNTED_S:
            self._budget.charge(grammar, seconds)
            self._no_jump_forward.add(uid)
        return forced_text_tokenizer.encode(text, most) if text else NO_INT32

    def drain_ended(self) -> list[Ended]:
        """Sequences that `masks` and `advance` have ended, and dropped, since the last call."""
        ended = self._ended
        if ended:
            self._ended = []
        return ended

    def begin(self, plan: StepPlan) -> None:
        """Begins a step: assigns rows to the sequences that the plan admits. Plans come in order."""
        self._budget.begin_step()
        self._draft_masks.begin()  # also for steps without masks
        for admitted in plan.admitted:  # even without grammars, since a row must not keep its previous sequence
            self._rows.pop(admitted.row, None)
            if admitted.uid in self._matchers or admitted.uid in self._thinking:
                self._rows[admitted.row] = admitted.uid

    def masks(
        self, plan: StepPlan, grammar_bitmask: Callable[[int], Int32Array]
    ) -> tuple[Int32Array, Int32Array] | None:
        """(result indices, int32 [k]; token bitmask, int32 [k, ceil(vocab / 32)]) of the plan's results that a grammar
        or a thinking budget constrains; None: there are none.

        Call it when all earlier steps are committed. Bit `t % 32` of word `t // 32` is 1 if token t is allowed; a row
        without any 1 makes its sequence fail. A sequence that has ended is not masked: its token is dropped.
        `grammar_bitmask`: StepRunner's method, which returns the buffer for the bitmask. It is not kept here, since
        the compilers' threads may keep this object alive until the process ends, and must not be the ones that free a
        runner.
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
            bitmask[mask_row] = -1  # all allowed: an empty mask would count as a failed row; the token is dropped
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
        """Splits results into (result index, uid) of those whose input token is committed, and (result index, uid,
        draft) of those whose input token is a draft."""
        first_decode = len(plan.sampled_rows) - len(plan.decode_rows)
        drafts = [-1] * first_decode + plan.draft_tokens.tolist()
        committed = [(index, uid) for index, uid in rows if drafts[index] < 0]
        return committed, [(index, uid, drafts[index]) for index, uid in rows if drafts[index] >= 0]

    def _split_forced(self, rows: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Splits results into (result index, uid) of those that a grammar masks, and (result index, token) of those
        whose next token is forced by a thinking budget. All others are unconstrained while they reason."""
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
        """Fills the masks of forced tokens, which come after those of grammars, and allows the token that may open the
        reasoning in the masks of grammars."""
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
        """Advances matchers by the accepted tokens; clears `result.accepted` for those after the end of a sequence."""
        if not self._matchers and not self._thinking:
            return
        tokens, clock, accepted = result.token_ids.tolist(), ThreadClock(), result.accepted
        if accepted is not None:
            accepted[self._draft_masks.unmasked] = False
        now = clock.now
        for index, uid in self._constrained_rows(plan):
            if accepted is not None:
                accepted[index] &= uid in self._matchers or uid in self._thinking  # False: the sequence has ended
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
        """Ends one sequence, not the step, after an error of xgrammar or an exceeded time budget."""
        if isinstance(error, MinisglError):
            text = str(error)
        else:
            text = f"the grammar could not be followed: {type(error).__name__}: {error}"[:500]
            log.error("the grammar of sequence %d failed", uid, exc_info=error)
        self._end(Ended(uid, FinishReason.ERROR, SequenceDetail(error=text, status=status_of(error))))

    def _enforce_budget(self) -> None:
        """Refuses too slow grammars for a while, since a client that sends one again would delay all others again. Ends
        all sequences of a grammar that exceeds the step's budget, including those that still wait for a row."""
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
        """(result index, uid) of the sampled rows with a matcher or a thinking budget."""
        return [
            (index, uid)
            for index, row in enumerate(plan.sampled_rows.tolist())
            if (uid := self._rows.get(row)) is not None and (uid in self._matchers or uid in self._thinking)
        ]

    def close(self) -> None:
        self._filler.close()
        self._compilers.close()
