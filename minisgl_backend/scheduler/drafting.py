"""Drafts of running sequences: which ones a step verifies, and how many were accepted.

A row with k drafts has 1 + k entries in a step's decode part. Its next step depends on how many were accepted, so
while there are drafts a step is planned only after the one before is committed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

import numpy as np

from minisgl_backend.arrays import NO_INT32, BoolArray, IndexArray, Int32Array, Int64Array
from minisgl_backend.scheduler.forced_drafts import ForcedDrafts, ForcedTokens, no_forced_tokens
from minisgl_backend.scheduler.limits import SchedulerLimits
from minisgl_backend.scheduler.outputs import OutputCollector
from minisgl_backend.scheduler.proposing import ProposerSteps
from minisgl_backend.scheduler.running import RunningSet
from minisgl_backend.scheduler.sequence import Sequence
from minisgl_backend.scheduler.step_plan_builder import StepPlanBuilder
from minisgl_backend.speculation.control import DraftControl
from minisgl_backend.speculation.proposer import DeviceProposals, Proposer
from minisgl_backend.step import DraftStats, StepPlan, StepResult

IDLE_S = 2e-3  # between a commit and the next plan
DECIDE_EVERY = 4  # steps between two decisions on whether speculation pays
SHADOWED = 4  # rows per step whose proposals are compared with their tokens while speculation is off


@dataclass(frozen=True)
class Drafted:
    """Decode entries with drafts, in row order; [num_entries] each."""

    rows: Int32Array
    uids: Int64Array
    lengths: Int32Array
    draft_tokens: Int32Array


@dataclass(frozen=True)
class _Shadow:
    """A proposal that was not verified, to be compared with the tokens that came."""

    uid: int
    total: int  # length of the sequence at that time
    token_ids: Int32Array


@dataclass
class _Settled:
    """The result of a row's drafts."""

    sequence: Sequence
    drafted: int
    delivered: int = 0  # accepted drafts before the end of the answer


class Drafting:
    """Used by the planner and, for the results of its plans, by the scheduler."""

    def __init__(
        self,
        limits: SchedulerLimits,
        running: RunningSet,
        proposer: Proposer,
        control: DraftControl,
        forced: ForcedTokens = no_forced_tokens,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`forced`: tokens that grammars force, drafted whatever the proposer says."""
        self._most, self._most_entries = limits.most_drafts, limits.most_draft_entries
        self._running = running
        self._proposer = proposer
        self._control = control
        self._clock = clock
        self._forced = ForcedDrafts(running.rows, forced, self._most)
        self._forced_uids: set[int] = set()  # sequences whose drafts in the last planned step are forced
        # None: the proposer has no steps of its own.
        self._steps: ProposerSteps | None = None
        if isinstance(proposer, DeviceProposals):
            self._steps = ProposerSteps(limits, running, proposer, control, self._forced)
        self._shadows: dict[int, _Shadow] = {}  # by row
        self._next_shadow = 0
        self._turns = 0
        self._started: dict[int, tuple[float, bool]] = {}  # step -> time planned, whether none was in flight
        self._last_end = 0.0
        self._settled: dict[int, _Settled] = {}  # by uid: results of this step's drafts
        self._drafts = 0
        self._drafted = np.zeros(self._most, dtype=np.int64)  # by position
        self._accepted = np.zeros(self._most, dtype=np.int64)

    @property
    def on_device(self) -> bool:
        """Whether a model proposes."""
        return self._steps is not None

    def waits(self, in_flight: StepPlan, prompts_wait: bool) -> bool:
        """Whether the next step must wait until this one is committed."""
        if len(in_flight.draft_tokens) or in_flight.num_proposed:
            return True
        if prompts_wait:
            return False
        if not (self._control.is_on or (self._steps is not None and self._steps.is_due)):
            return self._forced_pay()
        return bool(self._running.rows.may_draft.take(self._running.decode_index).any())

    def note_plan(self, plan: StepPlan, *, behind_another: bool) -> None:
        """A step has been planned; `behind_another`: while another was in flight."""
        self._started[plan.step] = self._clock(), behind_another
        if self._steps is not None:
            self._steps.note_plan(plan)

    def plan_proposals(self, builder: StepPlanBuilder, step: int) -> None:
        """Fills the builder where the next step is the proposer's own (a proposer that runs on the device)."""
        if self._steps is not None:
            self._steps.plan(builder, step)

    def take_proposals(self, plan: StepPlan, result: StepResult) -> None:
        """Takes the result of the proposer's own step."""
        assert self._steps is not None, "it has planned the step"
        for row, uid, total, tokens in self._steps.take(plan, result):
            if not self._control.is_on:
                self._shadows[row] = _Shadow(uid, total, tokens)

    def propose(self, index: IndexArray, lengths: Int32Array, *, all_committed: bool) -> list[tuple[int, Int32Array]]:
        """Drafts for some of these rows, as (position in `index`, tokens); the total per step is bounded.

        index: rows that decode, intp [num_rows]; lengths: cached tokens after a step without drafts, [num_rows].
        `all_committed`: no step is in flight, so the lengths count known tokens only.
        """
        state, control = self._running.rows, self._control
        room = self._most_entries - len(index)
        at = np.flatnonzero(state.may_draft.take(index))
        rows, uids = index[at].tolist(), state.uid.take(index[at]).tolist()
        self._turns += 1
        if self._steps is None and (self._turns % DECIDE_EVERY == 0 or not len(rows) or room < 1):
            control.decide(rows, uids, len(index), room)
        self._forced_uids.clear()
        if not control.is_on or not all_committed:
            self._shadow(rows, uids)
            if not all_committed or room < 1:
                return []
        most = np.minimum(state.limit.take(index[at]) - lengths[at] - 1, self._most).tolist()
        proposed = [self._proposal(row, uid, count) for row, uid, count in zip(rows, uids, most, strict=True)]
        counts = control.choose(rows, uids, proposed, len(index), room, self._forced_uids)
        for row, uid, tokens, count in zip(rows, uids, proposed, counts, strict=True):
            if not control.is_on or uid in self._forced_uids:
                continue
            known = state.tokens_of(row)
            if count:
                self._shadows.pop(row, None)
            elif self._compare(row, uid, known) and len(tokens):
                self._shadows[row] = _Shadow(uid, len(known), tokens)
        found = zip(at.tolist(), proposed, counts, strict=True)
        return [(position, tokens[:count]) for position, tokens, count in found if count]

    def _proposal(self, row: int, uid: int, most: int) -> Int32Array:
        """The tokens that may follow a row's committed ones, int32 [up to `most`]: those that its grammar forces, or
        the proposer's where these agree with the forced ones and are longer."""
        if most < 1:
            return NO_INT32
        forced = self._forced.of(row)[:most]
        if self._control.is_on and len(forced) < most:
            tokens = self._proposer.propose(row, uid, self._running.rows.tokens_of(row), most)[:most]
            tokens = _without_placeholders(self._running.rows.sequences[row], tokens)
            self._control.note_found(row, uid, len(tokens) > 0)
            if not len(forced) or (len(tokens) > len(forced) and np.array_equal(tokens[: len(forced)], forced)):
                return tokens
        if len(forced):
            self._forced_uids.add(uid)
        return forced

    def expand(
        self, rows: Int32Array, uids: Int64Array, lengths: Int32Array, drafts: list[tuple[int, Int32Array]]
    ) -> Drafted:
        """The decode part with these drafts; `lengths` are those without drafts."""
        counts = np.ones(len(rows), dtype=np.intp)
        for position, tokens in drafts:
            counts[position] += len(tokens)
        first = np.cumsum(counts) - counts
        draft_tokens = np.full(int(counts.sum()), -1, dtype=np.int32)
        for position, tokens in drafts:
            start = first[position] + 1
            draft_tokens[start : start + len(tokens)] = tokens
        offsets = np.arange(len(draft_tokens)) - np.repeat(first, counts)
        return Drafted(
            rows=np.repeat(rows, counts),
            uids=np.repeat(uids, counts),
            lengths=np.repeat(lengths, counts) + offsets.astype(np.int32),
            draft_tokens=draft_tokens,
        )

    def settle(self, plan: StepPlan, accepted: BoolArray, failed: Container[int]) -> None:
        """Records the result of a step's drafts; `accepted` [num_decode] marks the accepted decode entries."""
        first = _first_entries(plan)
        counts = np.diff(np.append(first, len(accepted))) - 1
        right = np.add.reduceat(accepted, first, dtype=np.int32) - 1
        state = self._running.rows
        state.settle(plan.decode_rows[first], plan.decode_lengths[first] + right)
        with_drafts = np.flatnonzero(counts)
        for which in with_drafts[~state.ended.take(plan.decode_rows[first[with_drafts]])].tolist():
            row, uid = int(plan.decode_rows[first[which]]), int(plan.decode_uids[first[which]])
            if row in failed:
                continue
            drafted = int(counts[which])
            if uid in self._forced_uids:
                self._control.note_forced(drafted, int(right[which]))
            else:
                self._control.note(row, uid, drafted, int(right[which]))
            sequence = state.sequences[row]
            assert sequence is not None, "a row in flight keeps its sequence"
            self._settled[uid] = _Settled(sequence, drafted)

    def rounds(self, plan: StepPlan, accepted: BoolArray) -> Iterator[IndexArray]:
        """The accepted decode entries of a step: first those of the rows' first tokens, then of their second ones, and
        so on. Ask for the next ones after recording these: rows whose answer has ended are left out."""
        state, index = self._running.rows, np.arange(len(accepted))
        offsets = index - np.maximum.accumulate(np.where(plan.draft_tokens < 0, index, 0))
        for offset in range(int(offsets[accepted].max()) + 1):
            entries = np.flatnonzero(accepted & (offsets == offset))
            if offset:
                entries = entries[~state.ended.take(plan.decode_rows[entries])]
            yield entries
            if offset:
                for uid in plan.decode_uids[entries].tolist():
                    if uid in self._settled:
                        self._settled[uid].delivered += 1

    def tell(self, outputs: OutputCollector, first: int) -> None:
        """Counts this step's drafts (accepted ones only if delivered) and adds the counts to the step's records, which
        begin at `first`."""
        for one in self._settled.values():
            self._drafts += 1
            self._drafted[: one.drafted] += 1
            self._accepted[: one.delivered] += 1
            one.sequence.note_drafts(one.drafted, one.delivered)
        for index, uid in enumerate(outputs.records_from(first), start=first):
            if (settled := self._settled.pop(uid, None)) is not None:
                sequence = settled.sequence
                outputs.add_drafts(index, sequence.draft_tokens, sequence.accepted_draft_tokens)
        self._settled.clear()

    def give_back(self, plan: StepPlan) -> None:
        """Frees the pages of a step's rows that only rejected drafts needed."""
        state, first = self._running.rows, _first_entries(plan)
        rows = plan.decode_rows[first].astype(np.intp)
        self._running.give_back(rows[state.active.take(rows)])

    def note_end(self, plan: StepPlan) -> None:
        """A step has been committed."""
        now, (start, behind_another) = self._clock(), self._started.pop(plan.step)
        if not plan.prefill and len(plan.decode_rows):
            # The time between two steps counts as part of them, unless the engine was idle.
            seconds = now - (self._last_end if start - self._last_end < IDLE_S else start)
            if plan.num_proposed:
                self._control.note_proposing(plan.num_proposed, seconds)
            else:
                self._control.note_step(len(plan.decode_rows), seconds, overlapped=behind_another)
        self._last_end = now

    def stats(self) -> DraftStats:
        return DraftStats(self._drafts, tuple(self._drafted.tolist()), tuple(self._accepted.tolist()))

    def _forced_pay(self) -> bool:
        """Whether the tokens that grammars force justify planning the next step only after the one in flight."""
        index, state = self._running.decode_index, self._running.rows
        room = self._most_entries - len(index)
        if room < 1:
            return False
        rows = index[state.may_draft.take(index) & state.has_grammar.take(index)].tolist()
        counts = [len(forced) - 1 for row in rows if len(forced := self._forced.of(row)) > 1]
        return bool(counts) and self._control.forced_pay(counts, len(index), room)

    def _shadow(self, rows: list[int], uids: list[int]) -> None:
        """Compares earlier proposals with the tokens that came, and asks for new proposals."""
        state, control = self._running.rows, self._control
        if self._steps is not None:
            for row in list(self._shadows):
                self._compare(row, int(state.uid[row]), state.tokens_of(row))
            return
        for turn in range(min(SHADOWED, len(rows))):
            which = (self._next_shadow + turn) % len(rows)
            row, uid = rows[which], uids[which]
            known = state.tokens_of(row)
            if self._compare(row, uid, known):
                tokens = self._proposer.propose(row, uid, known, self._most)
                control.note_found(row, uid, len(tokens) > 0)
                if len(tokens):
                    self._shadows[row] = _Shadow(uid, len(known), tokens)
        self._next_shadow += SHADOWED

    def _compare(self, row: int, uid: int, known: Int32Array) -> bool:
        """Compares a row's unverified proposal with its tokens. False: it is right so far, but more tokens are
        needed."""
        before = self._shadows.get(row)
        if before is None:
            return True
        if before.uid == uid:
            came = known[before.total : before.total + len(before.token_ids)]
            wrong = np.flatnonzero(came != before.token_ids[: len(came)])
            if not len(wrong) and len(came) < len(before.token_ids):
                return False
            self._control.note(row, uid, len(before.token_ids), int(wrong[0]) if len(wrong) else len(came))
        del self._shadows[row]
        return True


def _first_entries(plan: StepPlan) -> IndexArray:
    """The first entry of each row in a plan with drafts; all others are drafts."""
    return np.flatnonzero(plan.draft_tokens < 0)


def _without_placeholders(sequence: Sequence | None, tokens: Int32Array) -> Int32Array:
    """A draft up to the first token that stands for a part of an image: no answer has one."""
    if sequence is None or not sequence.contents:
        return tokens
    placeholders = {int(sequence.token_ids[one.vector_runs()[0][0]]) for one in sequence.contents}
    found = np.flatnonzero(np.isin(tokens, list(placeholders)))
    return tokens[: found[0]] if len(found) else tokens
