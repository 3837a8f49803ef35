"""Compiles grammars in processes of their own, so that one that takes long harms nobody but its sender.

There is one process as long as all grammars are compiled quickly. One that is not goes on beside, and another process
takes the next: a few at most, and none for ever. What finds no room beside waits in a line of its own, and what was
slow before goes there at once. Whoever asks for what is being compiled waits for that; what is known, or was refused
not long ago, waits for nothing.
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
from minisgl_backend.grammar.answer import Answer, compile_translated
from minisgl_backend.grammar.compiler_process import CompilerProcess, HelperProcess, TokenizerProcess
from minisgl_backend.grammar.forced_text import TokenCutter
from minisgl_backend.grammar.jobs import Job, Limits, Outcome
from minisgl_backend.grammar.light_import import import_xgrammar
from minisgl_backend.grammar.memory import GrammarMemory
from minisgl_backend.grammar.tokenizer_info import TokenizerSource
from minisgl_backend.grammar.worker import Worker
from minisgl_backend.request import Grammar

log = logging.getLogger(__name__)

CACHE_BYTES = 128 << 20  # of compiled grammars


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

    xgrammar: Any  # the module
    info: Any  # TokenizerInfo
    compiler: Any  # GrammarCompiler, for what is known to be quick


class GrammarCompilers:
    """All compilers of one engine; nothing is started before `warm` or the first grammar."""

    def __init__(
        self,
        source: TokenizerSource,
        *,
        without: Sequence[str] = (),
        limits: Limits = Limits(),
        cuts_text: bool = False,
    ) -> None:
        """`without`: packages that xgrammar imports and this process has no use for. No other thread may import them
        while the first grammar is compiled. `cuts_text`: with the first grammar there is a `cutter`."""
        self.memory = GrammarMemory(CACHE_BYTES)
        self.limits = limits
        self.cutter: TokenCutter | None = None  # of text that grammars force
        self._cuts_text = cuts_text
        self._source = source
        self._without = without
        self._todo: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._tokenizer_lock = threading.Lock()  # loading takes seconds
        self._description: str | None = None  # xgrammar's JSON of a TokenizerInfo
        self._tokenizer: _Tokenizer | None = None
        self._lock = threading.RLock()  # of what follows; an engine may be collected, and closed, on any thread
        self._threads: list[threading.Thread] = []
        self._processes: set[HelperProcess] = set()
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

    def warm(self) -> None:
        """Starts what the first grammar would wait for. Other processes do nearly all of it; whatever is wrong, the
        first grammar's sender hears of."""
        if not self._threads:
            self._add_thread()

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
            if self._closed or len(self._threads) >= self.limits.max_quick + self.limits.max_slow:
                return
            thread = threading.Thread(target=Worker(self).run, name="grammar-compiler", daemon=True)
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
                job = self._todo.get(timeout=self.limits.idle_s)
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
            if self._num_slow >= self.limits.max_slow:
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
            if len(self._slow_todo) >= self.limits.max_slow_waiting:
                left = [one for one in self._slow_todo if not self._flights[one.grammar].is_wanted()]
                for one in left:
                    self._slow_todo.remove(one)
                    self.land(one, None)
            if len(self._slow_todo) >= self.limits.max_slow_waiting:
                raise CapacityError(
                    f"guided_decoding_guide takes longer than {self.limits.quick_s:g} s to compile, and "
                    f"{self.limits.max_slow_waiting} others that do wait for their turn; try again later"
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
                num_quick = len(self._threads) - self._num_slow
                if num_quick < self.limits.max_quick and self._todo.qsize() >= self.limits.many * num_quick:
                    self._add_thread()
            else:
                # Without those that have left: else whoever asks and leaves again and again makes it long.
                flight.followers = [*(one for one in flight.followers if one.is_wanted()), job]

    def start_process(self) -> CompilerProcess:
        """One that is ready. Raises CapacityError where there can be none now, InvalidRequestError where the model's
        tokenizer cannot be used."""
        process: CompilerProcess | None = None
        try:
            process = CompilerProcess()
            self._note_process(process)
            description = self._describe()  # while the process imports
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
        """It ends when the compilers are closed."""
        with self._lock:
            self._processes.add(process)
            if self._closed:
                process.kill()

    def end_process(self, process: HelperProcess | None) -> None:
        if process is not None:
            with self._lock:
                self._processes.discard(process)
            process.end()

    def _describe(self) -> str:
        """The tokenizer as a helper process describes it. Raises InvalidRequestError where xgrammar cannot use it,
        EOFError or OSError where no process tells."""
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

    def take_tokenizer(self) -> _Tokenizer:
        """What compiled grammars are read with. Raises what `_describe` raises. Made with the first grammar, not by
        `warm`: importing xgrammar and reading the vocabulary hold Python's lock for most of a second, in which the
        engine would start or make tokens."""
        description = self._describe()
        with self._tokenizer_lock:
            if self._tokenizer is None:
                xgrammar = import_xgrammar(self._without)
                info = xgrammar.TokenizerInfo.deserialize_json(description)
                # Its own cache would keep all once more, and their texts without a bound.
                compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
                self._tokenizer = _Tokenizer(xgrammar, info, compiler)
                self.cutter = TokenCutter(info) if self._cuts_text else None
            return self._tokenizer

    def load(self, grammar: Grammar, answer: Answer) -> Any:
        """The compiled grammar from xgrammar's JSON of it, or from the translated one, which is quick; it is kept
        for whoever asks for the same. What a process has translated is not translated again: that is Python's work,
        which would hold up the engine's step loop."""
        tokenizer = self.take_tokenizer()
        if answer.compiled:
            compiled = tokenizer.xgrammar.CompiledGrammar.deserialize_json(answer.compiled, tokenizer.info)
        else:
            assert answer.plain is not None, "what is not sent compiled is sent translated"
            compiled = compile_translated(tokenizer.compiler, answer.plain)
        self.memory.note_compiled(grammar, compiled, compiled.memory_size_bytes)
        return compiled
