"""Compiles grammars in separate processes, so that a slow compilation only affects the request that asked for it.

While all grammars compile quickly there is one process. A slow compilation continues in parallel, up to a few of them
and up to a deadline, while another process takes the next grammar. Further slow ones wait in a queue of their own, and
a grammar that was slow before goes there at once. Requests for a grammar that is being compiled share its result;
compiled and recently refused grammars are answered from a cache.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from minisgl_backend.errors import CapacityError, InvalidRequestError, MinisglError
from minisgl_backend.grammar.compiling.cache import GrammarCache
from minisgl_backend.grammar.compiling.processes import CompilerProcess, Processes
from minisgl_backend.grammar.compiling.tokenizer_info import TokenizerSource
from minisgl_backend.request import Grammar

log = logging.getLogger(__name__)

CACHE_BYTES = 128 << 20  # of compiled grammars


# (xgrammar's CompiledGrammar, None) or (None, error).
Outcome = tuple[Any, MinisglError | None]


@dataclass(frozen=True)
class Job:
    """A grammar to compile. Both callbacks are called on a worker's thread, or on that of `submit`."""

    grammar: Grammar
    is_awaited: Callable[[], bool]  # False: the request was cancelled
    done: Callable[[Any, MinisglError | None], None]  # called with an Outcome


@dataclass(frozen=True)
class Limits:
    """Limits of all compilers of an engine. Seconds are wall time."""

    quick_s: float = 1.0  # a longer compilation is slow
    deadline_s: float = 30.0  # timeout of a slow compilation, in addition to quick_s
    poll_s: float = 0.2  # how often a slow compilation is checked for cancellation
    idle_s: float = 60.0  # after which all idle workers but one end
    max_quick: int = 1  # workers for grammars that are not known to be slow
    queue_per_worker: int = 8  # queued grammars for each such worker, above which another one starts
    max_slow: int = 2  # slow compilations in parallel, each of which takes a CPU
    max_slow_waiting: int = 16


@dataclass
class _InFlight:
    """A grammar that is queued or being compiled, with all jobs that wait for it."""

    leader: Job
    followers: list[Job] = field(default_factory=list)

    def is_awaited(self) -> bool:
        return any(job.is_awaited() for job in (self.leader, *self.followers))


class GrammarCompilers:
    """All grammar compilers of one engine; nothing is started before `warm_up` or the first grammar."""

    def __init__(
        self,
        source: TokenizerSource,
        *,
        stubbed: Sequence[str] = (),
        limits: Limits = Limits(),
        jump_forward: bool = False,
    ) -> None:
        """`stubbed`: packages that xgrammar imports and this process does not use. No other thread may import them
        while the first grammar is compiled. `jump_forward`: texts that grammars force are tokenized, too."""
        self.cache = GrammarCache(CACHE_BYTES)
        self.limits = limits
        self.processes = Processes(source, stubbed, jump_forward=jump_forward)
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        # For the attributes below. Reentrant: garbage collection may close an engine on any thread.
        self._lock = threading.RLock()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._num_slow = 0  # slow compilations that are running
        self._slow_queue: deque[Job] = deque()
        self._in_flight: dict[Grammar, _InFlight] = {}

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def num_waiting(self) -> int:
        """Queued grammars, including cancelled ones."""
        return self._queue.qsize() + len(self._slow_queue)

    def warm_up(self) -> None:
        """Starts a compiler before the first grammar comes. Other processes do nearly all the work; errors are reported
        to the first request with a grammar."""
        if not self._threads:
            self._add_thread()

    def submit(self, job: Job) -> None:
        """Raises CapacityError if no thread can be started for the first job."""
        try:
            compiled = self.cache.get(job.grammar)
        except InvalidRequestError as refused:
            job.done(None, refused)
            return
        if compiled is not None:
            job.done(compiled, None)
            return
        if not self._threads:
            self._add_thread()
        if not self._threads:
            raise CapacityError("grammars cannot be compiled now: the machine has no thread left; try again later")
        self._enqueue(job)

    def close(self) -> None:
        """Ends threads and processes; queued jobs are dropped."""
        with self._lock:
            self._closed = True
        self.processes.close()
        self._queue.put(None)

    def _add_thread(self) -> None:
        with self._lock:
            if self._closed or len(self._threads) >= self.limits.max_quick + self.limits.max_slow:
                return
            thread = threading.Thread(target=Worker(self).run, name="grammar-compiler", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                log.warning("no thread for another grammar compiler: %s", error)
                return
            self._threads.append(thread)

    # Shared by the workers.

    def next_job(self) -> Job | None:
        """Waits for a job. None: the compilers are closed, or this worker is idle and not needed."""
        while True:
            try:
                job = self._queue.get(timeout=self.limits.idle_s)
            except queue.Empty:
                with self._lock:
                    if len(self._threads) > 1 + self._num_slow:
                        self._threads.remove(threading.current_thread())
                        return None
                continue
            if job is None or self._closed:
                self._queue.put(None)  # for the next worker
                return None
            return job

    def next_slow_job(self) -> Job | None:
        """The next job of the slow queue; None: it is empty, or too many slow jobs are running. The caller calls
        `slow_job_ended` afterwards."""
        with self._lock:
            if self._closed or not self._slow_queue or not self.begin_slow_job():
                return None
            return self._slow_queue.popleft()

    def begin_slow_job(self) -> bool:
        """False if the maximum number of slow jobs is running. If True, another worker takes the next quick jobs."""
        with self._lock:
            if self._num_slow >= self.limits.max_slow:
                return False
            self._num_slow += 1
            self._add_thread()
            return True

    def slow_job_ended(self) -> None:
        with self._lock:
            self._num_slow -= 1

    def postpone(self, job: Job) -> None:
        """Queues the job until a slow one has ended. Raises CapacityError if that queue is full."""
        with self._lock:
            if len(self._slow_queue) >= self.limits.max_slow_waiting:
                left = [one for one in self._slow_queue if not self._in_flight[one.grammar].is_awaited()]
                for one in left:
                    self._slow_queue.remove(one)
                    self.finish(one, None)
            if len(self._slow_queue) >= self.limits.max_slow_waiting:
                raise CapacityError(
                    f"guided_decoding_guide takes longer than {self.limits.quick_s:g} s to compile, and "
                    f"{self.limits.max_slow_waiting} others that do wait for their turn; try again later"
                )
            self._slow_queue.append(job)

    def is_awaited(self, grammar: Grammar) -> bool:
        """Whether any job still waits for the grammar, not only the first one."""
        with self._lock:
            return self._in_flight[grammar].is_awaited()

    def finish(self, job: Job, outcome: Outcome | None) -> None:
        """Passes the outcome to all other jobs with the same grammar; None: it was abandoned, they are queued again."""
        with self._lock:
            followers = self._in_flight.pop(job.grammar).followers
        for follower in followers:
            if outcome is None:
                self._enqueue(follower)
            else:
                follower.done(*outcome)

    def _enqueue(self, job: Job) -> None:
        """Queues the job for a worker, or lets it wait for the job with the same grammar."""
        with self._lock:
            in_flight = self._in_flight.get(job.grammar)
            if in_flight is None:
                self._in_flight[job.grammar] = _InFlight(job)
                self._queue.put(job)
                num_quick = len(self._threads) - self._num_slow
                if (
                    num_quick < self.limits.max_quick
                    and self._queue.qsize() >= self.limits.queue_per_worker * num_quick
                ):
                    self._add_thread()
            else:
                # Drops cancelled jobs, since a client that sends and cancels repeatedly would grow the list.
                in_flight.followers = [*(one for one in in_flight.followers if one.is_awaited()), job]


class Worker:
    """A thread with a compiler process, which is replaced after it died or was killed."""

    def __init__(self, compilers: GrammarCompilers) -> None:
        self._compilers = compilers
        self._cache = compilers.cache
        self._processes = compilers.processes
        self._process: CompilerProcess | None = None
        self._ended = False  # the process has died or was killed, and is not replaced yet

    def run(self) -> None:
        """Runs until the compilers are closed. The process starts before the first grammar comes."""
        self._start_process()
        try:
            while (job := self._compilers.next_job()) is not None:
                self._run(job, self._compile)
                self._replace_process()
                while (slow := self._compilers.next_slow_job()) is not None:
                    try:
                        self._run(slow, self._compile_slowly)
                    finally:
                        self._compilers.slow_job_ended()
                    self._replace_process()
        finally:
            self._end_process()

    def _replace_process(self) -> None:
        """Starts a new process at once, not with the next grammar: a start takes seconds, and another worker may be
        ready to compile meanwhile."""
        if self._ended and self._process is None and not self._compilers.closed:
            self._ended = False
            self._start_process()

    def _start_process(self) -> None:
        try:
            self._process = self._processes.start()
        except Exception as error:  # reported again to the next request with a grammar
            if not self._compilers.closed:
                log.warning("%s", error)

    def _run(self, job: Job, compile_: Callable[[Job], Any]) -> None:
        """Runs a job and reports its outcome, unless it was postponed."""
        outcome: Outcome | None = None
        is_postponed = False
        try:
            if self._compilers.is_awaited(job.grammar):
                outcome = self._outcome(job, compile_)
                job.done(*outcome)
        except PostponedError:
            is_postponed = True
        except AbandonedError as error:  # jobs that came since are queued again by `finish`
            job.done(None, InvalidRequestError(str(error)))
        finally:
            if not is_postponed:
                self._compilers.finish(job, outcome)

    def _outcome(self, job: Job, compile_: Callable[[Job], Any]) -> Outcome:
        """Raises PostponedError and AbandonedError."""
        try:
            compiled = self._cache.get(job.grammar)
            return (compile_(job) if compiled is None else compiled), None
        except (PostponedError, AbandonedError):
            raise
        except MinisglError as error:
            return None, error
        except (EOFError, OSError) as error:
            self._end_process()
            if not self._compilers.closed:
                log.error("a grammar compiler died: %s", error or type(error).__name__)
            return None, InvalidRequestError("guided_decoding_guide cannot be compiled: the compiler died of it")
        except Exception as error:
            log.exception("a grammar could not be compiled")
            return None, InvalidRequestError(f"guided_decoding_guide cannot be compiled: {error}")

    def _compile(self, job: Job) -> Any:
        """Raises PostponedError if the grammar is slow and the maximum number of slow jobs is running."""
        process = None
        if not self._cache.is_slow(job.grammar):
            process = self._begin(job)
            if process.replies_within(self._compilers.limits.quick_s):
                return self._receive(process, job)
            self._cache.note_slow(job.grammar, True)
        if not self._compilers.begin_slow_job():
            if process is not None:
                self._end_process()
            self._compilers.postpone(job)
            raise PostponedError
        try:
            return self._compile_slowly(job, process)
        finally:
            self._compilers.slow_job_ended()

    def _compile_slowly(self, job: Job, process: CompilerProcess | None = None) -> Any:
        """`process`: the one that is already compiling the grammar, if any."""
        if process is None:
            process = self._begin(job)
            self._cache.note_slow(job.grammar, not process.replies_within(self._compilers.limits.quick_s))
        self._wait_slowly(process, job)
        return self._receive(process, job)

    def _begin(self, job: Job) -> CompilerProcess:
        process = self._send(job)
        try:
            # In parallel with the compilation, since the first time this takes most of a second.
            self._processes.load_tokenizer()
        except Exception:
            self._end_process()  # otherwise its reply would be taken for that of the next grammar
            raise
        return process

    def _send(self, job: Job) -> CompilerProcess:
        if self._process is not None:
            try:
                self._process.begin(job.grammar)
                return self._process
            except OSError:  # it died earlier, not because of this grammar
                self._end_process()
        self._process = self._processes.start()
        self._process.begin(job.grammar)
        return self._process

    def _wait_slowly(self, process: CompilerProcess, job: Job) -> None:
        """Waits until the process replies. Raises InvalidRequestError after the deadline, AbandonedError if all
        requests for the grammar were cancelled."""
        limits = self._compilers.limits
        deadline = time.monotonic() + limits.deadline_s
        reason = f"guided_decoding_guide takes longer than {limits.deadline_s:g} s to compile; allowed: a simpler one"
        while not process.replies_within(limits.poll_s):
            if time.monotonic() > deadline:
                self._end_process()
                self._cache.note_refused(job.grammar, reason)
                raise InvalidRequestError(reason)
            if not self._compilers.is_awaited(job.grammar):
                self._end_process()
                raise AbandonedError(reason)

    def _receive(self, process: CompilerProcess, job: Job) -> Any:
        reply = process.reply()
        if reply.error:
            self._cache.note_refused(job.grammar, reply.error)
            raise InvalidRequestError(reply.error)
        compiled = self._processes.load(reply)
        self._cache.note_compiled(job.grammar, compiled, compiled.memory_size_bytes)
        return compiled

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._ended = True
            with contextlib.suppress(OSError):
                self._processes.end(process)


class PostponedError(Exception):
    """The job was moved to the slow queue, and has no outcome yet."""


class AbandonedError(Exception):
    """All requests for the grammar were cancelled; the message is for the first one."""
