"""The engine core behind sockets: takes commands from all fronts between steps, and sends each front its records."""

from __future__ import annotations

import dataclasses
import gc
import logging
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable

from minisgl_backend.engine.core import EngineCore
from minisgl_backend.engine.idle_cpus import IdleCpus
from minisgl_backend.engine.kv_events import KVEventPublisher
from minisgl_backend.environment import HANG_S
from minisgl_backend.ipc.channel import ALL, CoreChannel, Entries, split_by_front
from minisgl_backend.ipc.histogram import CANCELLATION_BOUNDS_S, Histogram
from minisgl_backend.ipc.messages import (
    Abort,
    Command,
    GetStats,
    Hello,
    HistogramCounts,
    Outputs,
    Stats,
    Submit,
    Welcome,
    front_of,
)
from minisgl_backend.process.liveness import Heartbeat
from minisgl_backend.process.resources import give_back_memory
from minisgl_backend.request import FinishReason
from minisgl_backend.scheduler.outputs import SequenceOutputs
from minisgl_backend.step import StepStats

log = logging.getLogger(__name__)

IDLE_WAIT_MS = 500  # longest sleep of an idle core between commands
STALLED_WAIT_MS = 2  # the same while a sequence waits for something other than a command
COLLECT_EVERY_S = 60.0
ALLOWED_STEPS = 2  # steps that a sequence may stay after its client was found to have left,
ALLOWED_S = 0.05  # and the seconds that it may stay apart from these
REMEMBERED_STEPS = 1024  # end times of steps


class CoreServer:
    """Runs an EngineCore for its fronts until `stop`, or until the core gives up."""

    def __init__(
        self,
        core: EngineCore,
        channel: CoreChannel,
        welcome: Welcome,
        *,
        idle_cpus: IdleCpus | None = None,
        heartbeat: Heartbeat | None = None,
        kv_events: KVEventPublisher | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`heartbeat` is told when a turn of the loop begins and ends, `kv_events` what changes in the prefix cache."""
        self._core = core
        self._channel = channel
        self._welcome = welcome
        self._idle_cpus = idle_cpus or IdleCpus("sleep")
        self._heartbeat = heartbeat or Heartbeat(HANG_S)
        self._kv_events = kv_events
        self._clock = clock
        self._started = clock()
        self._live: dict[int, set[int]] = {}  # front -> uids of its open sequences
        self._cancellations = Cancellations()
        self._status = StatusLine(self._started)
        self._collected = self._started
        self._stopped = False
        self._was_busy = False

    def stop(self) -> None:
        """Ends `run` after the current step; may be called from a signal handler."""
        self._stopped = True

    def run(self) -> None:
        """Serves until `stop`. Raises EngineDeadError when the core can no longer compute."""
        gc.collect()
        gc.freeze()
        give_back_memory()
        gc.disable()  # garbage is collected in `_housekeep`, not during a step
        busy = False
        while not self._stopped:
            with self._heartbeat.step():
                busy = self.turn(busy)

    def turn(self, busy: bool) -> bool:
        """One turn: commands, a step, its outputs. `busy`: the last turn had work; returns whether this one had."""
        for command in self._channel.receive(0 if busy else self._idle_wait_ms()):
            self._obey(command)
        for front in self._channel.take_lost():
            self._forget_front(front)
        busy = self._core.step()
        ended = self._send_events()
        if self._kv_events is not None and (changes := self._core.take_cache_changes()):
            self._kv_events.publish(changes)
        self._cancellations.end_turn(ended, self._clock(), stepped=busy)
        self._housekeep(busy)
        return busy

    def _idle_wait_ms(self) -> int:
        if self._core.waits_for_thread or self._core.stats().num_waiting:
            return STALLED_WAIT_MS
        return IDLE_WAIT_MS

    def _obey(self, command: Command) -> None:
        if isinstance(command, Submit):
            request = command.request
            if not self._channel.is_attached(front_of(request.uid)):
                return  # it left after it had sent this
            self._live.setdefault(front_of(request.uid), set()).update(
                range(request.uid, request.uid + request.params.n)
            )
            self._core.submit(request)
        elif isinstance(command, Abort):
            if command.found_at:
                self._cancellations.begin(command.uids, command.found_at)
            self._core.abort(command.uids, FinishReason(command.reason))
        elif isinstance(command, GetStats):
            self._channel.send(command.front, self._stats())
        elif isinstance(command, Hello):
            self._forget_front(command.front)
            log.info("front %d attached (process %d)", command.front, command.pid)
            self._channel.send(command.front, self._welcome)
        else:
            self._core.obey(command)

    def _forget_front(self, front: int) -> None:
        self._core.forget_front(front)
        abandoned = self._live.pop(front, None)
        if abandoned:
            log.warning("front %d is gone; its %d sequences are cancelled", front, len(abandoned))
            self._core.abort(abandoned, FinishReason.CANCELLED)

    def _send_events(self) -> list[int]:
        """Returns the uids of the sequences that have ended."""
        if self._channel.has_backlog:
            self._channel.flush()
        for rejected in self._core.take_rejected():
            uids = range(rejected.uid, rejected.uid + rejected.count)
            self._live.get(front_of(rejected.uid), set()).difference_update(uids)
            self._channel.send(front_of(rejected.uid), rejected)
        for front, answer in self._core.take_answers():
            self._channel.send(front, answer)
        outputs = self._core.drain_outputs()
        if outputs is None:
            return []
        ended: list[int] = outputs.uids[outputs.reasons != 0].tolist()
        for uid in ended:
            self._live.get(front_of(uid), set()).discard(uid)
        for front, entries in split_by_front(outputs.uids):
            self._channel.send(front, to_message(outputs, entries))
        return ended

    def _housekeep(self, busy: bool) -> None:
        now = self._clock()
        if not (busy and self._was_busy):
            self._idle_cpus.note(busy, now)
        self._was_busy = busy
        if now >= self._status.due:
            self._status.update(self._core.stats(), now)
        if now - self._collected >= (COLLECT_EVERY_S if busy else 1.0):
            gc.collect(1)
            self._collected = self._clock()

    def _stats(self) -> Stats:
        stats = self._core.stats()
        names = [spec.name for spec in dataclasses.fields(stats) if spec.name != "speculation"]
        values = {name: float(getattr(stats, name)) for name in names} | stats.speculation.values()
        values["uptime_s"] = self._clock() - self._started
        values["total_cancelled_late"] = float(self._cancellations.num_late)
        seconds = self._cancellations.seconds
        counts = HistogramCounts(counts=tuple(seconds.counts), sum=seconds.sum)
        tenants = {name: dataclasses.asdict(stats) for name, stats in self._core.tenant_stats().items()}
        adapters = {name: dataclasses.asdict(one) for name, one in self._core.adapter_stats().items()}
        return Stats(values=values, histograms={"cancellation_seconds": counts}, tenants=tenants, adapters=adapters)


def to_message(outputs: SequenceOutputs, entries: Entries = ALL) -> Outputs:
    """The records at `entries` as a message."""
    details = {}
    if outputs.details:
        if isinstance(entries, slice):
            new_index = {index: index for index in outputs.details}
        else:
            new_index = {index: kept for kept, index in enumerate(entries.tolist())}
        details = {new_index[index]: detail for index, detail in outputs.details.items() if index in new_index}
    return Outputs(
        uids=outputs.uids[entries].tobytes(),
        token_ids=outputs.token_ids[entries].tobytes(),
        reasons=outputs.reasons[entries].tobytes(),
        details=details,
    )


class StatusLine:
    """Logs a status line every `period_s` while there is work, and one when the work has ended."""

    def __init__(self, now: float, period_s: float = 10.0) -> None:
        self._period_s = period_s
        self.due = now + period_s  # when to call `update` next
        self._since = now
        self._last: StepStats | None = None  # at the last line

    def update(self, stats: StepStats, now: float) -> str | None:
        """Logs and returns the line; None where nothing has happened since the last one."""
        self.due = now + self._period_s
        last, since, self._since = self._last, self._since, now
        is_idle = stats.step == last.step if last is not None else not stats.total_prompt_tokens
        if is_idle and not stats.num_running:
            return None
        self._last = stats
        line = _describe(stats, last, max(now - since, 1e-3))
        log.info("%s", line)
        return line


def _describe(stats: StepStats, last: StepStats | None, seconds: float) -> str:
    generated = stats.total_generated_tokens - (last.total_generated_tokens if last else 0)
    prompt = stats.total_prompt_tokens - (last.total_prompt_tokens if last else 0)
    cached = stats.total_cached_tokens - (last.total_cached_tokens if last else 0)
    free = stats.pages_free + stats.pages_cached
    rare = {"cancelled": stats.total_cancelled, "failed": stats.total_failed, "preempted": stats.total_preempted}
    states, free_states = "", stats.states_free + stats.states_cached
    if stats.states_total:
        missed = stats.total_state_misses - (last.total_state_misses if last else 0)
        without = f" ({100 * missed / max(prompt, 1):.0f}% had pages without a state)" if missed else ""
        states = f"free states {free_states} of {stats.states_total}{without}, "
    return (
        f"running {stats.num_running}, waiting {stats.num_waiting}, "
        f"generated {generated / seconds:.0f} tok/s, prompts {(prompt - cached) / seconds:.0f} tok/s, "
        f"cache hits {100 * cached / max(prompt, 1):.0f}%, "
        f"free pages {free} of {stats.pages_total}, {states}finished {stats.total_finished}"
        + "".join(f", {name} {count}" for name, count in rare.items() if count)
    )


class Cancellations:
    """How long sequences stay after their client has left, and which of them stayed too long.

    All times are time.monotonic() seconds, which all processes of a machine share.
    """

    def __init__(self) -> None:
        self.seconds = Histogram(CANCELLATION_BOUNDS_S)  # from detecting that a client has left to the release of pages
        self.num_late = 0  # took more than ALLOWED_STEPS steps and ALLOWED_S
        self._found: dict[int, float] = {}  # by uid, until the turn of the engine loop ends
        self._step_ends: deque[float] = deque(maxlen=REMEMBERED_STEPS)

    def begin(self, uids: Iterable[int], found_at: float) -> None:
        """The core has heard that the client of these sequences left at `found_at`."""
        for uid in uids:
            self._found.setdefault(uid, found_at)

    def end_turn(self, ended: Iterable[int], now: float, *, stepped: bool) -> None:
        """A turn of the engine loop has ended; `ended` are the sequences whose last record is among its outputs.

        The step that was in flight when they ended has been committed in this turn: no step uses their pages any more.
        """
        if stepped:
            self._step_ends.append(now)
        if not self._found:
            return
        for uid in ended:
            if (found_at := self._found.pop(uid, None)) is not None:
                self._observe(found_at, now)
        self._found.clear()  # the others had ended before

    def _observe(self, found_at: float, now: float) -> None:
        self.seconds.observe(max(0.0, now - found_at))
        if now - found_at <= ALLOWED_S:
            return
        ends = list(self._step_ends)
        last_allowed = bisect_right(ends, found_at) + ALLOWED_STEPS - 1
        if last_allowed < len(ends) and now - ends[last_allowed] > ALLOWED_S:
            self.num_late += 1
