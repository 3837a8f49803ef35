"""Compiles grammars in separate processes, so that a slow compilation only affects the request that asked for it.

While all grammars compile quickly there is one process. A slow compilation continues in parallel, up to a few of them
and up to a deadline, while another process takes the next grammar. Further slow ones wait in a queue of their own, and
a grammar that was slow before goes there at once. Requests for a grammar that is being compiled share its result;
compiled and recently refused grammars are answered from a cache.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from minisgl_backend.errors import CapacityError, InvalidRequestError, MinisglError
from minisgl_backend.grammar.cache import GrammarCache
from minisgl_backend.grammar.compiler_process import CompilerProcess, HelperProcess, TokenizerProcess
from minisgl_backend.grammar.compiler_reply import CompilerReply, compile_translated
from minisgl_backend.grammar.forced_text import GreedyTokenizer
from minisgl_backend.grammar.jobs import Job, Limits, Outcome
from minisgl_backend.grammar.light_import import import_xgrammar
from minisgl_backend.grammar.tokenizer_info import TokenizerSource
from minisgl_backend.grammar.worker import Worker
from minisgl_backend.request import Grammar

log = logging.getLogger(__name__)

CACHE_BYTES = 128 << 20  # of compiled grammars


@dataclass
class _InFlight:
    """A grammar that is queued or being compiled, with all jobs that wait for it."""

    leader: Job
    followers: list[Job] = field(default_factory=list)

    def is_awaited(self) -> bool:
        return any(job.is_awaited() for job in (self.leader, *self.followers))


@dataclass(frozen=True)
class _Tokenizer:
    """The model's tokenizer in xgrammar's classes."""

    xgrammar: Any  # the module
    info: Any  # TokenizerInfo
    compiler: Any  # GrammarCompiler, for grammars that are known to compile quickly


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
        while the first grammar is compiled. `jump_forward`: makes `forced_text_tokenizer` with the first grammar."""
        self.cache = GrammarCache(CACHE_BYTES)
        self.limits = limits
        self.forced_text_tokenizer: GreedyTokenizer | None = None
        self._jump_forward = jump_forward
        self._source = source
        self._stubbed = stubbed
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._tokenizer_lock = threading.Lock()  # loading takes seconds
        self._description: str | None = None  # xgrammar's JSON of a TokenizerInfo
        self._tokenizer: _Tokenizer | None = None
        # For the attributes below. Reentrant: garbage collection may close an engine on any thread.
        self._lock = threading.RLock()
        self._threads: list[threading.Thread] = []
        self._processes: set[HelperProcess] = set()
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
            for process in self._processes:
                process.kill()
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

    def start_process(self) -> CompilerProcess:
        """Starts a compiler and waits until it is ready. Raises CapacityError if none can be started now,
        InvalidRequestError if xgrammar cannot use the model's tokenizer."""
        process: CompilerProcess | None = None
        try:
            process = CompilerProcess()
            self._note_process(process)
            description = self._describe_tokenizer()  # while the process imports
            process.wait_ready(description)
        except MinisglError:
            self.end_process(process)
            raise
        except EOFError as error:
            self.end_process(process)
            reason = str(error) or "it ended"
            raise CapacityError(f"a grammar compiler did not start: {reason}; try again later") from error
        except OSError as error:
            self.end_process(process)
            raise CapacityError(f"a grammar compiler cannot be started: {error}; try again later") from error
        return process

    def _note_process(self, process: HelperProcess) -> None:
        """Registers the process, so that `close` ends it."""
        with self._lock:
            self._processes.add(process)
            if self._closed:
                process.kill()

    def end_process(self, process: HelperProcess | None) -> None:
        if process is not None:
            with self._lock:
                self._processes.discard(process)
            process.end()

    def _describe_tokenizer(self) -> str:
        """The tokenizer as xgrammar's JSON, made by a helper process. Raises InvalidRequestError if xgrammar cannot use
        it, EOFError or OSError if the process fails."""
        with self._tokenizer_lock:
            if self._description is None:
                process = TokenizerProcess(self._source)
                self._note_process(process)
                try:
                    description = process.description()
                finally:
                    self.end_process(process)
                if description.error:
                    raise InvalidRequestError(f"guided_decoding_guide cannot be compiled: {description.error}")
                self._description = description.info
            return self._description

    def load_tokenizer(self) -> _Tokenizer:
        """The tokenizer, for deserializing and compiling grammars. Raises what `_describe_tokenizer` raises. Loaded
        with the first grammar, not by `warm_up`: importing xgrammar and reading the vocabulary hold the GIL for most of
        a second, which would delay the engine's start or its steps."""
        description = self._describe_tokenizer()
        with self._tokenizer_lock:
            if self._tokenizer is None:
                xgrammar = import_xgrammar(self._stubbed)
                info = xgrammar.TokenizerInfo.deserialize_json(description)
                # Without xgrammar's cache, which would keep everything twice, and texts without a limit.
                compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
                self._tokenizer = _Tokenizer(xgrammar, info, compiler)
                self.forced_text_tokenizer = GreedyTokenizer(info) if self._jump_forward else None
            return self._tokenizer

    def load(self, grammar: Grammar, reply: CompilerReply) -> Any:
        """Deserializes the compiled grammar, or compiles the translated one, which is quick, and caches it. It is not
        translated again: that is pure Python, which would hold up the engine's step loop."""
        tokenizer = self.load_tokenizer()
        if reply.compiled:
            compiled = tokenizer.xgrammar.CompiledGrammar.deserialize_json(reply.compiled, tokenizer.info)
        else:
            assert reply.translated is not None, "what is not sent compiled is sent translated"
            compiled = compile_translated(tokenizer.compiler, reply.translated)
        self.cache.note_compiled(grammar, compiled, compiled.memory_size_bytes)
        return compiled
