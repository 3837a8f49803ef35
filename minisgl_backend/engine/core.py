"""The loop around scheduler and runner: commands between steps, plan, prepare, execute, commit, outputs."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable
from typing import NoReturn

import msgspec
import numpy as np

from minisgl_backend.cache.changes import CacheChange
from minisgl_backend.engine.adapters import AdapterLoader
from minisgl_backend.engine.partial_steps import failed_result, masks_of, rows_of, with_left_out
from minisgl_backend.engine.stages import PendingStep, StepRunner
from minisgl_backend.errors import CapacityError, EngineDeadError, InvalidRequestError, MinisglError
from minisgl_backend.grammar.manager import GrammarManager
from minisgl_backend.ipc.messages import AdapterCommand, Done, Failed, Rejected
from minisgl_backend.request import FinishReason, Request
from minisgl_backend.scheduler.adapters import AdapterStats
from minisgl_backend.scheduler.fairness import TenantStats
from minisgl_backend.scheduler.outputs import SequenceOutputs
from minisgl_backend.scheduler.scheduler import Scheduler
from minisgl_backend.step import RowError, StepPlan, StepResult, StepStats

log = logging.getLogger(__name__)


MAX_FAILED_STEPS = 3  # in a row; then the engine gives up, unless a health-check step succeeds
# Parts of error texts after which the device cannot be used any more.
FATAL_DEVICE_ERRORS = ("CUDA error", "device-side assert", "illegal memory access", "NCCL", "Connection closed by peer")


@dataclasses.dataclass(frozen=True, slots=True)
class _Launched:
    """A launched step."""

    plan: StepPlan
    pending: PendingStep | None  # None: nothing was executed
    failed_rows: frozenset[int] = frozenset()  # rows whose part was not executed
    why: str = ""  # the reason, for their clients


class _FailedStep:
    """A launched step whose tokens could not be sampled."""

    unsampled = None

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> StepResult:
        raise self._error


class EngineCore:
    """One engine: a scheduler, a runner and the order of their stages. Used by one thread.

    With overlap scheduling the next step is launched before the previous one is committed; without it, after.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        *,
        overlap: bool,
        grammars: GrammarManager | None = None,
        adapters: AdapterLoader | None = None,
        health_check_plan: StepPlan | None = None,
    ) -> None:
        """`health_check_plan`: a step of the padding row only, which distinguishes a broken engine from requests that
        break steps; None: there is none."""
        self._scheduler = scheduler
        self._runner = runner
        self._overlap = overlap
        self._grammars = grammars
        self._adapters = adapters
        self._guides = False  # a request with a grammar has come; until then steps ask for no masks
        self._health_check_plan = health_check_plan
        self._in_flight: _Launched | None = None
        self._failed_steps = 0  # failures in a row
        self._last_error = ""  # as text: the exception object would keep the step's tensors alive
        self._rejected: list[Rejected] = []
        self._answers: list[tuple[int, Done | Failed]] = []
        self._names: dict[int, str] = {}  # uid -> request id, of all sequences that have not ended, for the log
        self._early_aborts: list[tuple[int, FinishReason]] = []  # of sequences that the scheduler never saw

    def submit(self, request: Request) -> None:
        """Queues the request; `take_rejected` returns it if it cannot be taken."""
        name = request.request_id or f"uid {request.uid}"
        self._names.update(dict.fromkeys(_uids(request), name))
        try:
            if self._adapters is not None and self._adapters.holds(request, self._scheduler.max_waiting):
                return
            if not request.params.is_guided:
                self._scheduler.add(request)
            elif self._grammars is None:
                name = "thinking_token_budget" if request.params.grammar is None else "guided_decoding_guide"
                raise InvalidRequestError(f"{name}: this engine cannot constrain outputs")
            elif request.params.grammar is None:
                self._guides = True
                self._scheduler.add(request)
                self._grammars.track_thinking(request)
            else:
                self._guides = True
                self._grammars.submit(request, request.params.grammar)
        except (InvalidRequestError, CapacityError) as error:
            self._reject(request, error)

    def abort(self, uids: Iterable[int], reason: FinishReason) -> None:
        """Ends sequences; each still gets its last record. Unknown uids are ignored."""
        for uid in uids:
            count = 0 if self._grammars is None else self._grammars.cancel(uid)
            if self._adapters is not None:
                count = count or self._adapters.cancel(uid)
            if count:
                self._early_aborts += [(uid + k, reason) for k in range(count)]
            else:
                self._scheduler.abort(uid, reason)

    def step(self) -> bool:
        """Runs one turn of the loop. False: there was nothing to do, and without a command there will be nothing.

        Raises EngineDeadError when the device or several steps in a row have failed; the engine is then unusable.
        """
        self._admit_compiled()
        if self._adapters is not None:
            self._admit_adapted(self._adapters)
        plan = self._scheduler.plan()
        launched = self._launch(plan) if plan is not None else None
        ready, self._in_flight = self._in_flight, launched
        if ready is not None:
            self._commit(ready)
        if launched is not None and launched.pending is not None and launched.pending.unsampled is not None:
            # Grammar masks depend on the tokens just committed; the device computes logits meanwhile.
            self._in_flight = launched = self._sample(launched)
            self._end_guided()
        # The step after a failed one must not be planned on tokens that were not computed.
        if launched is not None and (launched.failed_rows or not self._overlap):
            self._commit(launched)
            self._in_flight = None
        if self._failed_steps >= MAX_FAILED_STEPS:  # now that no step waits to be sampled
            self._check_health()
        return ready is not None or launched is not None

    def drain_outputs(self) -> SequenceOutputs | None:
        """The records since the last call, as parallel arrays; None when there are none."""
        outputs = self._scheduler.drain_outputs()
        if self._early_aborts:
            outputs = _with_early_aborts(outputs, self._early_aborts)
            self._early_aborts = []
        if outputs is None:
            return None
        ended = outputs.reasons.nonzero()[0]
        if len(ended):
            self._note_ended(outputs, ended.tolist())
        return outputs

    def take_cache_changes(self) -> list[CacheChange]:
        """What the prefix cache has stored and removed since the last call, if that is recorded."""
        return self._scheduler.take_cache_changes()

    def obey(self, command: AdapterCommand) -> None:
        """Between steps; `take_answers` says when it is done."""
        if self._adapters is not None:
            self._adapters.obey(command)
        else:
            message = "there is no room for adapters; allowed: a server that is started with max_lora_rank"
            self._answers.append((command.front, Failed(id=command.id, kind="ConfigError", message=message)))

    @property
    def adapter_folders(self) -> dict[str, str]:
        """Of the adapters that were loaded by name."""
        return {} if self._adapters is None else {name: one.folder for name, one in self._adapters.sources.items()}

    def take_answers(self) -> list[tuple[int, Done | Failed]]:
        """(front, answer) of commands that are done."""
        if self._adapters is not None:
            return self._adapters.take_answers()
        answers, self._answers = self._answers, []
        return answers

    def forget_front(self, front: int) -> None:
        """It gives no commands any more."""
        if self._adapters is not None:
            self._adapters.forget_front(front)

    def take_rejected(self) -> list[Rejected]:
        """Requests refused since the last call."""
        rejected, self._rejected = self._rejected, []
        return rejected

    def stats(self) -> StepStats:
        """Counters after the last commit."""
        return self._scheduler.stats()

    def adapter_stats(self) -> dict[str, AdapterStats]:
        """By name."""
        return self._scheduler.adapter_stats()

    def tenant_stats(self) -> dict[str, TenantStats]:
        """By name; {} without fair shares."""
        return self._scheduler.tenant_stats()

    @property
    def num_compiling(self) -> int:
        """Requests whose grammar is being compiled; the scheduler has not seen them yet."""
        return 0 if self._grammars is None else self._grammars.num_compiling

    @property
    def num_reading(self) -> int:
        """Requests whose adapter is being read; the scheduler has not seen them yet."""
        return 0 if self._adapters is None else self._adapters.num_waiting

    @property
    def waits_for_thread(self) -> bool:
        """True while a grammar is being compiled or an adapter is read, so that `step` will have work without a
        command."""
        return self.num_compiling > 0 or (self._adapters is not None and self._adapters.is_busy)

    @property
    def room_for_grammars(self) -> int:
        """Number of requests that `submit` takes now, with any grammar; known grammars need no room."""
        return 0 if self._grammars is None else self._grammars.room

    def close(self) -> None:
        """Waits for the step in flight and ends the compiler."""
        if self._in_flight is not None and self._in_flight.pending is not None:
            try:
                self._in_flight.pending.result()
            except Exception as error:
                log.debug("the last step failed while closing: %s", error)
        self._in_flight = None
        if self._grammars is not None:
            self._grammars.close()

    def _admit_compiled(self) -> None:
        if self._grammars is None or not self._guides or not self._grammars.num_compiling:
            return
        self.abort(self._grammars.overdue(time.monotonic()), FinishReason.CANCELLED)
        for compiled in self._grammars.drain_compiled():
            try:
                if compiled.error is not None:
                    raise compiled.error
                if self._adapters is not None and self._adapters.holds(compiled.request, self._scheduler.max_waiting):
                    self._drop_grammars(_uids(compiled.request))  # it begins anew once its adapter is read again
                    continue
                self._scheduler.add(compiled.request)
            except MinisglError as error:
                self._drop_grammars(_uids(compiled.request))
                self._reject(compiled.request, error)

    def _admit_adapted(self, adapters: AdapterLoader) -> None:
        if adapters.num_waiting:
            self.abort(adapters.overdue(time.monotonic()), FinishReason.CANCELLED)
        for admitted in adapters.poll():
            if admitted.error is None:
                self.submit(admitted.request)
            else:
                self._reject(admitted.request, admitted.error)

    def _reject(self, request: Request, error: MinisglError) -> None:
        for uid in _uids(request):
            self._names.pop(uid, None)
        self._rejected.append(
            Rejected(uid=request.uid, kind=type(error).__name__, message=str(error), count=request.params.n)
        )

    def _drop_grammars(self, uids: Iterable[int]) -> None:
        if self._grammars is not None:
            for uid in uids:
                self._grammars.drop(uid)

    def _note_ended(self, outputs: SequenceOutputs, ended: list[int]) -> None:
        uids = outputs.uids[ended].tolist()
        self._drop_grammars(uids)
        failed = []
        for index, uid in zip(ended, uids, strict=True):
            name = self._names.pop(uid, f"uid {uid}")
            if outputs.reasons[index] == FinishReason.ERROR:
                failed.append(name)
        if failed:
            log.error("ended with an error: %s", _request_list(failed))

    def _launch(self, plan: StepPlan) -> _Launched:
        """Launches the plan, or as much of it as possible: a sequence that cannot be prepared is left out alone; where
        the whole step fails, running sequences are tried again without the step's prompts."""
        if self._grammars is not None and self._guides:
            self._grammars.begin(plan)
        prompts = {chunk.row for chunk in plan.prefill}
        left_out: frozenset[int] = frozenset()
        why, counted = "", False
        while True:
            try:
                rest = plan.without(left_out) if left_out else plan
                pending = self._runner.execute(self._runner.prepare(rest))
                return _Launched(plan, pending, left_out, why)
            except RowError as error:
                why = self._note_failure(plan, error, counts=False)
                more = left_out | {error.row}
            except Exception as error:
                why = self._note_failure(plan, error, counts=not counted)
                counted, more = True, left_out | prompts
            if more == left_out:
                return _Launched(plan, None, rows_of(plan), why)
            left_out = more

    def _sample(self, launched: _Launched) -> _Launched:
        """Continues a step that waits for grammar masks; a failure shows when the step is committed."""
        try:
            masks = None
            if self._grammars is not None:
                masks = self._grammars.masks(launched.plan, self._runner.grammar_bitmask)
            self._runner.sample(launched.pending, masks_of(launched.plan, masks, launched.failed_rows))
        except Exception as error:
            return dataclasses.replace(launched, pending=_FailedStep(error))
        return launched

    def _commit(self, launched: _Launched) -> None:
        plan, result, why = launched.plan, None, launched.why
        if launched.pending is not None:
            try:
                result = launched.pending.result()
                if not launched.failed_rows or launched.failed_rows != rows_of(plan):  # else nothing was computed
                    self._failed_steps = 0
            except Exception as error:
                why = self._note_failure(plan, error)
        if result is None:
            result = failed_result(plan, why, executed=launched.pending is not None)
        elif launched.failed_rows:
            result = with_left_out(plan, result, launched.failed_rows, why)
        if len(plan.draft_tokens):
            result = msgspec.structs.replace(result, accepted=plan.accepted(result.token_ids))
        if self._grammars is not None and self._guides:
            self._grammars.advance(plan, result)
        self._scheduler.commit(plan, result)
        self._end_guided()

    def _end_guided(self) -> None:
        """Ends the sequences whose grammar is complete."""
        if self._grammars is not None and self._guides:
            for ended in self._grammars.drain_ended():
                self._scheduler.abort(ended.uid, ended.reason, ended.detail)

    def _note_failure(self, plan: StepPlan, error: Exception, *, counts: bool = True) -> str:
        """Logs a failure and gives up if the device is lost; otherwise returns the message for the clients."""
        self._failed_steps += counts
        self._last_error = str(error)
        log.error(
            "step %d failed (%d prompt tokens, %d running sequences)",
            plan.step,
            plan.num_tokens - len(plan.decode_rows),
            len(plan.decode_rows),
            exc_info=error,
        )
        if isinstance(error, EngineDeadError) or any(text in str(error) for text in FATAL_DEVICE_ERRORS):
            self._give_up(f"the device failed: {error}", error)
        cause = str(error) if isinstance(error, RowError) else f"{type(error).__name__}: {error}"
        return f"the engine failed to compute this answer: {cause}"[:500]

    def _check_health(self) -> None:
        """Gives up unless a health-check step succeeds."""
        if self._health_check_plan is None or not self._computes(self._health_check_plan):
            self._give_up(f"{self._failed_steps} steps in a row failed; the last error: {self._last_error}")
        log.warning("%d steps in a row failed because of their requests: the engine computes", self._failed_steps)
        self._failed_steps = 0

    def _computes(self, plan: StepPlan) -> bool:
        try:
            self._runner.execute(self._runner.prepare(plan)).result()
        except Exception as error:
            log.error("the health-check step failed, too", exc_info=error)
            return False
        return True

    def _give_up(self, reason: str, cause: Exception | None = None) -> NoReturn:
        log.error("lost with the engine: %s", _request_list(self._names.values()))
        raise EngineDeadError(reason) from cause


def _uids(request: Request) -> range:
    return range(request.uid, request.uid + request.params.n)


def _request_list(names: Iterable[str]) -> str:
    """Request ids, each once, in order: «2 requests: 'a', 'b'»."""
    unique = [repr(name) for name in dict.fromkeys(names)]
    return f"{len(unique)} request{'' if len(unique) == 1 else 's'}: {', '.join(unique)}"


def _with_early_aborts(outputs: SequenceOutputs | None, aborted: list[tuple[int, FinishReason]]) -> SequenceOutputs:
    uids = np.array([uid for uid, _ in aborted], dtype=np.int64)
    token_ids = np.full(len(aborted), -1, dtype=np.int32)
    reasons = np.array([reason for _, reason in aborted], dtype=np.uint8)
    if outputs is None:
        return SequenceOutputs(uids, token_ids, reasons)
    return SequenceOutputs(
        np.concatenate([outputs.uids, uids]),
        np.concatenate([outputs.token_ids, token_ids]),
        np.concatenate([outputs.reasons, reasons]),
        outputs.details,
    )
