"""Continuous batching: decides what each step computes (`plan`) and records its results (`commit`).

docs/scheduler.md explains the invariants and where the time goes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np

from minisgl_backend.adapters.served import NO_ADAPTER
from minisgl_backend.arrays import BoolArray, IndexArray
from minisgl_backend.cache.changes import CacheChange
from minisgl_backend.errors import CapacityError, InvalidRequestError
from minisgl_backend.request import FinishReason, Request
from minisgl_backend.scheduler.adapters import AdapterBook, AdapterQueue, AdapterStats
from minisgl_backend.scheduler.admission import AdmissionControl
from minisgl_backend.scheduler.arrivals import Arrivals, Deadlines
from minisgl_backend.scheduler.drafting import Drafting
from minisgl_backend.scheduler.fairness import FairShares, TenantStats
from minisgl_backend.scheduler.forced_drafts import ForcedTokens, no_forced_tokens
from minisgl_backend.scheduler.limits import SchedulerLimits
from minisgl_backend.scheduler.outputs import NO_TOKEN, OutputCollector, SequenceOutputs
from minisgl_backend.scheduler.planner import Planner
from minisgl_backend.scheduler.policy import QUEUES, WaitingQueue
from minisgl_backend.scheduler.running import RunningSet
from minisgl_backend.scheduler.sequence import Group, Sequence, SequenceState
from minisgl_backend.speculation.control import DraftControl
from minisgl_backend.speculation.proposer import Proposer
from minisgl_backend.step import DraftStats, PrefillChunk, SequenceDetail, StepPlan, StepResult, StepStats

NO_LOGITS = "the model produced NaN or infinite logits, or every token is masked"


class Scheduler:
    """Owner of the queue, the running sequences and their pages. Not thread-safe: one loop calls it.

    Args:
        limits: all configuration that it depends on.
        seed: seeds the generator for requests without a seed; None: from the operating system.
        clock: seconds; the same clock as Request.deadline.
        proposer: proposes drafts, of which `control` says how many a step verifies; None: no speculation.
        forced: tokens that grammars force; drafted where there is speculation.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        proposer: Proposer | None = None,
        control: DraftControl | None = None,
        forced: ForcedTokens = no_forced_tokens,
    ) -> None:
        self._limits = limits
        self._clock = clock
        new_queue = partial(QUEUES[limits.schedule_policy], self._cached_tokens)
        self._shares = FairShares(limits, new_queue) if limits.fair_shares else None
        self._queue: WaitingQueue = new_queue() if self._shares is None else self._shares.queue
        self.adapters = AdapterBook(limits)
        self._held: AdapterQueue | None = None  # where adapters may lack slots
        if len(limits.adapters) > limits.num_adapter_slots or limits.adapters_change:
            self._queue = self._held = AdapterQueue(self._queue, self.adapters)
            if self._shares is not None:
                self._shares.count_held(self._held.num_held)
        self._running = RunningSet(limits, self._queue, self.adapters)
        self._arrivals = Arrivals(limits, self._running.max_length, seed, self.adapters)
        self._admission = AdmissionControl()
        self._drafting: Drafting | None = None
        if proposer is not None:
            control = control or DraftControl(limits.most_drafts, limits.step_times)
            self._drafting = Drafting(limits, self._running, proposer, control, forced)
        self._planner = Planner(limits, self._running, self._queue, self._admission, self._shares, self._drafting)
        self._outputs = OutputCollector()
        self._sequences: dict[int, Sequence] = {}  # by uid; those that have not ended
        self._deadlines = Deadlines()
        self._in_flight: deque[StepPlan] = deque()
        self._next_step = 0
        self._new_requests: set[int] = set()  # one uid for each request of which nothing has run yet
        self._ended = dict.fromkeys(FinishReason, 0)
        self._generated_tokens = 0
        self._last_prefill_tokens = 0
        self._last_decode_tokens = 0

    @property
    def max_length(self) -> int:
        """The most tokens, prompt and answer, that one sequence can have."""
        return self._running.max_length

    @property
    def max_waiting(self) -> int:
        """Requests that the queue holds at most."""
        return self._limits.max_waiting_requests

    @property
    def has_work(self) -> bool:
        """Whether a sequence waits, runs or is still part of a step in flight."""
        return bool(self._sequences or self._running.releasing)

    def add(self, request: Request) -> None:
        """Queues the sequences of a request.

        Raises:
            InvalidRequestError: it can never run.
            CapacityError: the queue is full.
        """
        token_ids = self._arrivals.prompt_of(request)
        params = request.params
        for uid in range(request.uid, request.uid + params.n):
            if uid in self._sequences:
                raise InvalidRequestError(f"uid is {uid}; allowed: one that no running or waiting sequence has")
        if len(self._new_requests) >= self._limits.max_waiting_requests:  # backpressure
            raise CapacityError(
                f"{len(self._new_requests)} requests are waiting, all that max_waiting_requests allows; try again later"
            )
        if request.contents and self._running.images is not None:
            self._running.images.check_request(request.contents)
            if self._drafting is not None and self._drafting.on_device:
                raise InvalidRequestError(
                    "images are not taken with speculation by a model, whose drafts would not see them; allowed: "
                    "speculation by ngram, or none"
                )
        tenant = 0 if self._shares is None else self._shares.enter(request.tenant, params.n)
        sequences = self._arrivals.sequences_of(request, token_ids, tenant, self._planner.admitter.num_admissions)
        if (adapter := sequences[0].adapter) is not NO_ADAPTER:
            self.adapters.note_begin(adapter, len(sequences))
        for sequence in sequences:
            self._sequences[sequence.uid] = sequence
            if sequence.deadline is not None:
                self._deadlines.add(sequence.deadline, sequence.uid, self._sequences)
        self._new_requests.add(request.uid)
        # Siblings wait for the prompt's pages, if there is a whole page to share and a cache that keeps it.
        if params.n > 1 and self._running.kv.keeps_prefixes and len(token_ids) > self._limits.page_size:
            self._queue.push(Group(sequences).next_leader())
        else:
            sequences[0].report_prompt()
            for sequence in sequences:
                self._queue.push(sequence)

    def abort(
        self, uid: int, reason: FinishReason = FinishReason.CANCELLED, detail: SequenceDetail | None = None
    ) -> None:
        """Ends a sequence now, with one last record: no token, but this detail. An unknown uid is ignored, since its
        sequence may have ended meanwhile."""
        sequence = self._sequences.get(uid)
        if sequence is not None:
            self._outputs.add(uid, NO_TOKEN, reason, detail)
            self._end(sequence, reason)
            self._running.release_finished()

    def plan(self) -> StepPlan | None:
        """The next step; None when nothing can run now, or not before the step in flight is committed. May be called
        while steps are in flight."""
        if self._deadlines.first <= (now := self._clock()):
            for uid in self._deadlines.take_expired(now):
                self.abort(uid, FinishReason.CANCELLED)
        self._running.release_finished()
        drafting, in_flight = self._drafting, self._in_flight
        if drafting is not None and in_flight and drafting.waits(in_flight[-1], self._planner.prompts_wait):
            return None
        if self._held is not None and (victims := self._held.open_slots(self._running.rows.sequences, now)):
            # Who has not sampled since it got its row would begin anew: each turn brings a token.
            sampled = self._running.rows.sampled
            self._planner.preemption.for_adapter([one for one in victims if sampled[one.row]])
        plan = self._planner.plan(self._next_step)
        if plan is None:
            return None
        if self._held is not None and (loads := self.adapters.take_loads()):
            plan = msgspec.structs.replace(plan, adapter_loads=loads)
        if drafting is not None:
            drafting.note_plan(plan, behind_another=bool(in_flight))
        if plan.admitted:
            self._note_admissions(plan)
        self._next_step += 1
        self._in_flight.append(plan)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Records the tokens of a step. Steps are committed in the order in which they were planned."""
        if not self._in_flight or plan is not self._in_flight[0] or result.step != plan.step:
            raise RuntimeError(f"step {plan.step} cannot be committed with the result of step {result.step} now")
        self._in_flight.popleft()
        if self._running.steps.in_flight:
            self._running.steps.note_end(plan.step, self._clock())
        self._last_prefill_tokens = self._last_decode_tokens = 0
        if (images := self._running.images) is not None:
            self._end_unencoded(plan, result)
            images.note_end(plan, result.failed_rows, executed=result.executed)
        if plan.num_proposed and self._drafting is not None:
            self._drafting.take_proposals(plan, result)
        else:
            self._commit_tokens(plan, result)
        if not result.executed:  # its rows have ended; its page changes for other rows are sent again
            self._running.send_again(plan)
            self.adapters.load_again(plan.adapter_loads)
        self._running.commit(plan.step)
        if self._drafting is not None:
            self._drafting.note_end(plan)

    def drain_outputs(self) -> SequenceOutputs | None:
        """All records for clients since the last call; None when there are none."""
        return self._outputs.drain()

    def take_cache_changes(self) -> list[CacheChange]:
        """What the prefix cache has stored and removed since the last call, in order; empty unless the limits ask for
        recording."""
        return self._running.kv.take_cache_changes()

    def stats(self) -> StepStats:
        """Counters as of the last commit."""
        kv, planner = self._running.kv, self._planner
        free, cached = kv.num_free, kv.num_evictable
        return StepStats(
            step=self._running.committed,
            num_running=self._running.num_active,
            num_waiting=len(self._sequences) - self._running.num_active,
            pages_total=kv.num_pages,
            pages_free=free,
            pages_cached=cached,
            pages_leased=kv.num_pages - free - cached,
            prefill_tokens=self._last_prefill_tokens,
            decode_tokens=self._last_decode_tokens,
            total_prompt_tokens=planner.admitter.prompt_tokens,
            total_cached_tokens=planner.admitter.cached_tokens,
            total_generated_tokens=self._generated_tokens,
            total_finished=self._ended[FinishReason.STOP] + self._ended[FinishReason.LENGTH],
            total_cancelled=self._ended[FinishReason.CANCELLED],
            total_failed=self._ended[FinishReason.ERROR],
            total_preempted=planner.preemption.num_preemptions,
            **self._state_stats(),
            **self._adapter_stats(),
            **({} if self._running.images is None else self._running.images.stats()),
            speculation=DraftStats() if self._drafting is None else self._drafting.stats(),
        )

    def _state_stats(self) -> dict[str, int]:
        if (states := self._running.kv.states) is None:
            return {}
        free, cached = states.num_free, states.num_evictable
        return {
            "states_total": states.num_slots,
            "states_free": free,
            "states_cached": cached,
            "states_owned": states.num_slots - free - cached,
            "total_state_misses": self._planner.admitter.state_misses,
        }

    def _adapter_stats(self) -> dict[str, int]:
        if not self._limits.num_adapter_slots:
            return {}
        return {
            "adapter_slots": self.adapters.num_slots,
            "adapters_open": len(self.adapters.opened()),
            "adapters_waiting": 0 if self._held is None else self._held.num_adapters,
            "total_adapter_loads": self.adapters.num_loads,
        }

    def adapter_stats(self) -> dict[str, AdapterStats]:
        """By name."""
        return self.adapters.stats(self._running.rows.sequences) if self._limits.num_adapter_slots else {}

    def tenant_stats(self) -> dict[str, TenantStats]:
        """By name; {} without fair shares."""
        return {} if self._shares is None else self._shares.stats()

    def check(self) -> None:
        """Raises AssertionError unless every invariant holds. Slow; for tests and debugging."""
        self._running.check()
        waiting = set()
        for sequence in self._queue:
            assert sequence.state is SequenceState.WAITING, "only waiting sequences are in the queue"
            assert (sequence.row, sequence.lease) == (-1, None), "a waiting sequence holds nothing"
            waiting.add(sequence.uid)
        for uid, sequence in self._sequences.items():
            assert sequence.state is not SequenceState.ENDED, "an ended sequence is forgotten"
            group = sequence.group
            held_back = group is not None and sequence in group.held_back
            assert sum([uid in waiting, held_back, sequence.row >= 0]) == 1, (
                "a sequence waits, is held back or has a row"
            )
            assert not held_back or (group is not None and group.leader is not None), "held back without a leader"
            assert uid not in self._new_requests or not sequence.resumed, "a request that has run counts as new"
        assert self._new_requests <= self._sequences.keys(), "a request of which nothing is left counts as new"

    def _cached_tokens(self, sequence: Sequence) -> int:
        ids = sequence.cache_ids(sequence.token_ids[:-1])
        return self._running.kv.cached_tokens(ids, sequence.salt)

    def _note_admissions(self, plan: StepPlan) -> None:
        now = self._clock()
        for admitted in plan.admitted:
            self._sequences[admitted.uid].note_planned(now)
            self._new_requests.discard(admitted.uid)

    # ---- results

    def _commit_tokens(self, plan: StepPlan, result: StepResult) -> None:
        first_decode = 0
        for chunk in plan.prefill:
            self._commit_chunk(chunk, first_decode, result)
            first_decode += chunk.samples
        if len(plan.decode_rows):
            self._commit_decode(plan, first_decode, result)

    def _commit_chunk(self, chunk: PrefillChunk, index: int, result: StepResult) -> None:
        """Records a prompt chunk; `index` is the result index of its token, if it samples."""
        sequence = self._running.rows.sequences[chunk.row]
        assert sequence is not None, "a row in flight keeps its sequence"
        self._last_prefill_tokens += len(chunk.token_ids)
        failed = chunk.row in result.failed_rows
        if failed:
            sequence.fail()
        if sequence.state is SequenceState.ENDED:
            return
        if failed:
            self._end_with_error(sequence, result.why)
            return
        sequence.add_prompt_logprobs(result.prompt_logprobs.get(chunk.row, ()))
        if chunk.row in result.pooled:
            sequence.add_pooled(result.pooled[chunk.row])
        is_last = chunk.samples if sequence.pooling is None else chunk.end == sequence.prompt_len
        self._running.commit_chunk(sequence, chunk, self._next_step - 1, is_last=is_last)
        if not is_last:
            return
        if sequence.pooling is not None:
            pooled = sequence.first_detail(self._clock(), pooled=sequence.take_pooled())
            self._outputs.add(sequence.uid, NO_TOKEN, FinishReason.STOP, pooled)
            self._end(sequence, FinishReason.STOP)
            return
        detail = self._first_detail(sequence, chunk, result, index)
        if sequence.group is not None and sequence.group.leader is sequence:
            for sibling in sequence.group.open():
                self._queue.push(sibling)
        self._append_first(sequence, int(result.token_ids[index]), chunk.end, detail)

    def _append_first(self, sequence: Sequence, token: int, position: int, detail: SequenceDetail | None) -> None:
        """Appends the token that a prompt's last chunk sampled."""
        reason = self._running.rows.append_one(sequence, position, token)
        self._outputs.add(sequence.uid, token, reason, detail)
        self._generated_tokens += 1
        if self._shares is not None:
            self._shares.note_sampled([sequence.row])
        self._last_decode_tokens += 1
        if reason:
            self._end(sequence, reason)

    def _first_detail(
        self, sequence: Sequence, chunk: PrefillChunk, result: StepResult, index: int
    ) -> SequenceDetail | None:
        """The detail of a prompt's first token. A resumed sequence has sent most of it before."""
        logprobs = result.logprobs.get(index)
        if chunk.end > sequence.prompt_len or not sequence.reports_prompt:
            return SequenceDetail(logprobs=logprobs) if logprobs is not None else None
        prompt_logprobs = sequence.take_prompt_logprobs()
        return sequence.first_detail(self._clock(), logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def _commit_decode(self, plan: StepPlan, first: int, result: StepResult) -> None:
        """Records the decode entries of a step, whose tokens begin at `first`."""
        if result.accepted is None:
            self._commit_entries(plan, first, result)
            return
        assert self._drafting is not None, "it has planned the drafts"
        accepted = result.accepted[first:]
        self._drafting.settle(plan, accepted, result.failed_rows)
        records = len(self._outputs)
        for entries in self._drafting.rounds(plan, accepted):
            self._commit_entries(plan, first, result, entries)
        self._drafting.tell(self._outputs, records)
        self._drafting.give_back(plan)

    def _commit_entries(
        self, plan: StepPlan, first: int, result: StepResult, entries: IndexArray | None = None
    ) -> None:
        """Records all decode entries, or those in `entries`, at once: at most one of each row."""
        state = self._running.rows
        rows, uids, lengths = plan.decode_rows.astype(np.intp), plan.decode_uids, plan.decode_lengths
        tokens = np.array(result.token_ids[first:], dtype=np.int32)  # a copy: the runner reuses its buffer
        if entries is not None:
            rows, uids, lengths, tokens = rows[entries], uids[entries], lengths[entries], tokens[entries]
        dropped = state.ended.take(rows)  # rows that ended while the step was in flight
        if result.failed_rows:
            dropped |= self._fail_rows(rows, dropped, result)
        kept = entries
        if True in dropped:
            stay = np.flatnonzero(~dropped)
            kept = stay if entries is None else entries[stay]
            rows, uids, lengths, tokens = rows[stay], uids[stay], lengths[stay], tokens[stay]
        reasons = state.append(rows, lengths, tokens)
        self._generated_tokens += len(rows)
        if self._shares is not None:
            self._shares.note_sampled(rows)
        self._last_decode_tokens += len(rows)
        start = self._outputs.add_run(uids, tokens, reasons)
        if result.logprobs:
            self._outputs.add_logprobs(result.logprobs, first, start, kept)
        for index in reasons.nonzero()[0]:
            sequence = state.sequences[rows[index]]
            assert sequence is not None, "a row in flight keeps its sequence"
            self._end(sequence, FinishReason(int(reasons[index])))

    # ---- ends

    def _fail_rows(self, rows: IndexArray, dropped: BoolArray, result: StepResult) -> BoolArray:
        failed = np.isin(rows, list(result.failed_rows))
        for row, ended in zip(rows[failed], dropped[failed], strict=True):
            sequence = self._running.rows.sequences[row]
            assert sequence is not None, "a row in flight keeps its sequence"
            sequence.fail()  # its pages may hold NaN, even where it has ended already
            if not ended:
                self._end_with_error(sequence, result.why)
        return failed

    def _end_unencoded(self, plan: StepPlan, result: StepResult) -> None:
        """Ends the sequences whose image could not be encoded, and of which the step computes nothing else."""
        computed = {chunk.row for chunk in plan.prefill}
        for row in {one.row for one in plan.encode if one.row in result.failed_rows} - computed:
            sequence = self._running.rows.sequences[row]
            assert sequence is not None, "a row in flight keeps its sequence"
            if sequence.state is not SequenceState.ENDED:
                self._end_with_error(sequence, result.why)

    def _end_with_error(self, sequence: Sequence, why: str) -> None:
        self._outputs.add(sequence.uid, NO_TOKEN, FinishReason.ERROR, SequenceDetail(error=why or NO_LOGITS))
        self._end(sequence, FinishReason.ERROR)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Everything that follows from an end except its record."""
        self._ended[reason] += 1
        del self._sequences[sequence.uid]
        if self._shares is not None:
            self._shares.leave(sequence.tenant)
        group = sequence.group
        if sequence.row >= 0:
            if reason in (FinishReason.STOP, FinishReason.LENGTH) and sequence.pooling is None:
                self._admission.saw_answer(int(self._running.rows.total[sequence.row]) - sequence.prompt_len)
            self._running.finish(sequence)
        else:
            if group is None or sequence not in group.held_back:
                self._queue.remove(sequence)
            sequence.finish()
        is_new = sequence.uid in self._new_requests
        self._new_requests.discard(sequence.uid)
        leader = group.leave(sequence) if group is not None else None
        if leader is not None:
            if is_new:
                self._new_requests.add(leader.uid)
            self._queue.push(leader)
        if sequence.adapter is not NO_ADAPTER:
            self.adapters.note_end(sequence.adapter)
