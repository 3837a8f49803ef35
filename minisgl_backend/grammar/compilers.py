"""Compiles grammars in processes of their own, so that one that takes long harms nobody but its sender.

There is one process as long as all grammars are compiled quickly. One that is not goes on beside, and another process
takes the next: a few at most, and none for ever. What finds no room beside waits in a line of its own, and what was
slow before goes there at once. Whoever asks for what is being compiled waits for that; what is known, or was refused
not long ago, waits for nothing.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from minisgl_backend.errors import CapacityError, InvalidRequestError, MinisglError
from minisgl_backend.grammar.compiler import compile_grammar
from minisgl_backend.grammar.compiler_process import CompilerProcess
from minisgl_backend.grammar.memory import GrammarMemory
from minisgl_backend.request import Grammar

log = logging.getLogger(__name__)

QUICK_S = 1.0  # what takes longer is slow
DEADLINE_S = 30.0  # for one that is slow, beyond the QUICK_S after which it is
LOOK_S = 0.2  # between looks whether somebody still waits for a slow one
CACHE_BYTES = 128 << 20  # of compiled grammars
MAX_SLOW = 2  # at a time, each of which takes a processor
MAX_SLOW_WAITING = 16
IDLE_S = 60.0  # after which all workers but one end


# (xgrammar's CompiledGrammar, None) or (None, why not).
Outcome = tuple[Any, MinisglError | None]


@dataclass(frozen=True)
class Job:
    """A grammar to be compiled. Both functions are called on a compiler's thread, or on that of `submit`."""

    grammar: Grammar
    is_wanted: Callable[[], bool]  # False: somebody has cancelled it
    done: Callable[[Any, MinisglError | None], None]  # of an Outcome


@dataclass
class _Flight:
    """A grammar that waits or is at work, and all who wait for it."""

    leader: Job
    followers: list[Job] = field(default_factory=list)

    def is_wanted(self) -> bool:
        return any(job.is_wanted() for job in (self.leader, *self.followers))


@dataclass(frozen=True)
class _Tokenizer:
    """As xgrammar knows it."""

    info: Any  # TokenizerInfo
    json: str  # the same
    compiler: Any  # GrammarCompiler, for what is known to be quick


class GrammarCompilers:
    """All compilers of one engine; nothing is started before the first grammar."""

    def __init__(self, load_tokenizer: Callable[[], Any], *, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """`load_tokenizer` returns the model's transformers tokenizer."""
        self.memory = GrammarMemory(CACHE_BYTES)
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._todo: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._tokenizer_lock = threading.Lock()  # loading takes a second
        self._tokenizer: _Tokenizer | None = None
        self._lock = threading.RLock()  # of what follows; an engine may be collected, and closed, on any thread
        self._threads: list[threading.Thread] = []
        self._processes: set[CompilerProcess] = set()
        self._closed = False
        self._num_slow = 0  # at work
        self._slow_todo: deque[Job] = deque()
        self._flights: dict[Grammar, _Flight] = {}

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def num_waiting(self) -> int:
        """Grammars that no process has yet, those included that nobody waits for any more."""
        return self._todo.qsize() + len(self._slow_todo)

    def submit(self, job: Job) -> None:
        """Raises CapacityError where the machine has no thread left for the first one."""
        try:
            compiled = self.memory.recall(job.grammar)
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
        self._board(job)

    def close(self) -> None:
        """Ends threads and processes; what was not compiled yet is dropped."""
        with self._lock:
            self._closed = True
            for process in self._processes:
                process.kill()
        self._todo.put(None)

    def _add_thread(self) -> None:
        with self._lock:
            if self._closed or len(self._threads) > MAX_SLOW:
                return
            thread = threading.Thread(target=_Worker(self).run, name="grammar-compiler", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                log.warning("no thread for another grammar compiler: %s", error)
                return
            self._threads.append(thread)

    # What workers share.

    def next_job(self) -> Job | None:
        """Waits for it. None: closed, or there are enough workers without the one that asks."""
        while True:
            try:
                job = self._todo.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if len(self._threads) > 1 + self._num_slow:
                        self._threads.remove(threading.current_thread())
                        return None
                continue
            if job is None or self._closed:
                self._todo.put(None)  # for the next worker
                return None
            return job

    def next_slow_job(self) -> Job | None:
        """One that was found slow and waits; None: there is none, or too many are compiled now. Each is followed by
        `slow_job_ended`."""
        with self._lock:
            if self._closed or not self._slow_todo or not self.begin_slow_job():
                return None
            return self._slow_todo.popleft()

    def begin_slow_job(self) -> bool:
        """False where as many as may are compiled. Where it is True, another worker takes the next quick ones."""
        with self._lock:
            if self._num_slow >= MAX_SLOW:
                return False
            self._num_slow += 1
            self._add_thread()
            return True

    def slow_job_ended(self) -> None:
        with self._lock:
            self._num_slow -= 1

    def put_off(self, job: Job) -> None:
        """Until a slow one has ended. Raises CapacityError where too many wait for that."""
        with self._lock:
            if len(self._slow_todo) >= MAX_SLOW_WAITING:
                left = [one for one in self._slow_todo if not self._flights[one.grammar].is_wanted()]
                for one in left:
                    self._slow_todo.remove(one)
                    self.land(one, None)
            if len(self._slow_todo) >= MAX_SLOW_WAITING:
                raise CapacityError(
                    f"guided_decoding_guide takes longer than {QUICK_S:g} s to compile, and {MAX_SLOW_WAITING} others "
                    "that do wait for their turn; try again later"
                )
            self._slow_todo.append(job)

    def is_wanted(self, grammar: Grammar) -> bool:
        """Somebody waits for it, whoever asked first."""
        with self._lock:
            return self._flights[grammar].is_wanted()

    def land(self, job: Job, outcome: Outcome | None) -> None:
        """Those who wait for the same hear what came of it. None: nothing did, and it is theirs now."""
        with self._lock:
            followers = self._flights.pop(job.grammar).followers
        for follower in followers:
            if outcome is None:
                self._board(follower)
            else:
                follower.done(*outcome)

    def _board(self, job: Job) -> None:
        """It waits for a worker, or for what comes of the same grammar."""
        with self._lock:
            flight = self._flights.get(job.grammar)
            if flight is None:
                self._flights[job.grammar] = _Flight(job)
                self._todo.put(job)
            else:
                # Without those that have left: else whoever asks and leaves again and again makes it long.
                flight.followers = [*(one for one in flight.followers if one.is_wanted()), job]

    def start_process(self) -> CompilerProcess:
        """One that is ready. Raises CapacityError where there can be none now, InvalidRequestError where the model's
        tokenizer cannot be used."""
        try:
            process = CompilerProcess()
        except OSError as error:
            raise CapacityError(f"a grammar compiler cannot be started: {error}; try again later") from error
        with self._lock:
            self._processes.add(process)
            if self._closed:
                process.kill()
        try:
            tokenizer = self._take_tokenizer()  # while the process imports
        except Exception as error:
            self.end_process(process)
            raise InvalidRequestError(f"guided_decoding_guide cannot be compiled: {error}") from error
        try:
            process.wait_ready(tokenizer.json)
        except (EOFError, OSError) as error:
            self.end_process(process)
            reason = str(error) or "it ended"
            raise CapacityError(f"a grammar compiler did not start: {reason}; try again later") from error
        return process

    def end_process(self, process: CompilerProcess) -> None:
        with self._lock:
            self._processes.discard(process)
        process.end()

    def _take_tokenizer(self) -> _Tokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                import xgrammar

                info = xgrammar.TokenizerInfo.from_huggingface(
                    self._load_tokenizer(), vocab_size=self._vocab_size, stop_token_ids=self._eos_token_ids or None
                )
                # Its own cache would keep all once more, and their texts without a bound.
                compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
                self._tokenizer = _Tokenizer(info, info.serialize_json(), compiler)
            return self._tokenizer

    def load(self, grammar: Grammar, text: str) -> Any:
        """The compiled grammar from xgrammar's JSON of it, or anew where there is none, since it is quick; it is kept
        for whoever asks for the same."""
        import xgrammar

        tokenizer = self._take_tokenizer()
        if text:
            compiled = xgrammar.CompiledGrammar.deserialize_json(text, tokenizer.info)
        else:
            compiled = compile_grammar(tokenizer.compiler, grammar)
        self.memory.note_compiled(grammar, compiled, compiled.memory_size_bytes)
        return compiled


class _Worker:
    """A thread with a process, which is replaced when it had to be ended."""

    def __init__(self, compilers: GrammarCompilers) -> None:
        self._compilers = compilers
        self._memory = compilers.memory
        self._process: CompilerProcess | None = None
        self._ended = False  # it had a process

    def run(self) -> None:
        """Until the compilers are closed."""
        try:
            while (job := self._compilers.next_job()) is not None:
                self._work(job, self._compile)
                self._replace_process()
                while (slow := self._compilers.next_slow_job()) is not None:
                    try:
                        self._work(slow, self._compile_slowly)
                    finally:
                        self._compilers.slow_job_ended()
                    self._replace_process()
        finally:
            self._end_process()

    def _replace_process(self) -> None:
        """Now, and not when the next grammar comes: it takes seconds, and another worker may be ready."""
        if self._ended and self._process is None and not self._compilers.closed:
            self._ended = False
            try:
                self._process = self._compilers.start_process()
            except Exception as error:  # the next grammar's sender hears of it
                log.warning("%s", error)

    def _work(self, job: Job, compile_: Callable[[Job], Any]) -> None:
        """Tells what came of it, unless it was put off."""
        outcome: Outcome | None = None
        is_put_off = False
        try:
            if self._compilers.is_wanted(job.grammar):
                outcome = self._outcome(job, compile_)
                job.done(*outcome)
        except _PutOffError:
            is_put_off = True
        except _UnwantedError as error:  # whoever came since may want it
            job.done(None, InvalidRequestError(str(error)))
        finally:
            if not is_put_off:
                self._compilers.land(job, outcome)

    def _outcome(self, job: Job, compile_: Callable[[Job], Any]) -> Outcome:
        """Raises _PutOffError and _UnwantedError."""
        try:
            compiled = self._memory.recall(job.grammar)
            return (compile_(job) if compiled is None else compiled), None
        except (_PutOffError, _UnwantedError):
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
        """Raises _PutOffError where it takes long and as many as may do so."""
        process = None
        if not self._memory.is_slow(job.grammar):
            process = self._begin(job)
            if process.answers_within(QUICK_S):
                return self._take(process, job)
            self._memory.note_slow(job.grammar, True)
        if not self._compilers.begin_slow_job():
            if process is not None:
                self._end_process()
            self._compilers.put_off(job)
            raise _PutOffError
        try:
            return self._compile_slowly(job, process)
        finally:
            self._compilers.slow_job_ended()

    def _compile_slowly(self, job: Job, process: CompilerProcess | None = None) -> Any:
        """`process`: what is at it already."""
        if process is None:
            process = self._begin(job)
            self._memory.note_slow(job.grammar, not process.answers_within(QUICK_S))
        self._wait_slowly(process, job)
        return self._take(process, job)

    def _begin(self, job: Job) -> CompilerProcess:
        if self._process is not None:
            try:
                self._process.begin(job.grammar)
                return self._process
            except OSError:  # it has died meanwhile, of nothing that this grammar did
                self._end_process()
        self._process = self._compilers.start_process()
        self._process.begin(job.grammar)
        return self._process

    def _wait_slowly(self, process: CompilerProcess, job: Job) -> None:
        """Until the process answers. Raises InvalidRequestError where that takes too long, _UnwantedError where nobody
        waits for it."""
        deadline = time.monotonic() + DEADLINE_S
        reason = f"guided_decoding_guide takes longer than {DEADLINE_S:g} s to compile; allowed: a simpler one"
        while not process.answers_within(LOOK_S):
            if time.monotonic() > deadline:
                self._end_process()
                self._memory.note_refused(job.grammar, reason)
                raise InvalidRequestError(reason)
            if not self._compilers.is_wanted(job.grammar):
                self._end_process()
                raise _UnwantedError(reason)

    def _take(self, process: CompilerProcess, job: Job) -> Any:
        answer = process.answer()
        if answer.error:
            self._memory.note_refused(job.grammar, answer.error)
            raise InvalidRequestError(answer.error)
        return self._compilers.load(job.grammar, answer.compiled)

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._ended = True
            with contextlib.suppress(OSError):
                self._compilers.end_process(process)


class _PutOffError(Exception):
    """The job waits in another line; nothing is told."""


class _UnwantedError(Exception):
    """Nobody waits for the grammar any more; the message is for whoever asked first."""
