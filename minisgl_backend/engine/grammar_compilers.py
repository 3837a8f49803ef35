"""Compiles grammars in processes of their own, so that one that takes long harms nobody but its sender.

There is one process as long as all grammars are compiled quickly. One that is not goes on beside, and another process
takes the next: a few at most, and none for ever. What finds no room beside waits in a line of its own.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from minisgl_backend.engine.grammar_process import CACHE_BYTES, Answer, compile_grammar
from minisgl_backend.errors import CapacityError, InvalidRequestError, MinisglError
from minisgl_backend.host.spawn import start_child
from minisgl_backend.request import Grammar

log = logging.getLogger(__name__)

QUICK_S = 1.0  # what takes longer is slow
DEADLINE_S = 30.0  # from when a process has it
LOOK_S = 0.2  # between looks whether somebody still waits for a slow one
MAX_SLOW = 2  # at a time, each of which takes a processor
MAX_SLOW_WAITING = 16
IDLE_S = 60.0  # after which all workers but one end
START_S = 120.0  # for a process to be ready: it imports for seconds, from a slow disk for longer


@dataclass(frozen=True)
class Job:
    """A grammar to be compiled. Both functions are called on a compiler's thread."""

    grammar: Grammar
    is_wanted: Callable[[], bool]  # False: somebody has cancelled it
    done: Callable[[Any, MinisglError | None], None]  # (xgrammar's CompiledGrammar, None) or (None, why not)


@dataclass(frozen=True)
class _Tokenizer:
    """As xgrammar knows it."""

    info: Any  # TokenizerInfo
    json: str  # the same
    compiler: Any  # GrammarCompiler, for what is known to be quick


class CompilerProcess:
    """One process, which compiles one grammar after the other. Used by the thread that started it, but for `kill`."""

    def __init__(self) -> None:
        """Starts it; it ends with the thread that does. Raises OSError where that cannot be done."""
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        try:
            with theirs:
                arguments, fds = ["--fd", str(theirs.fileno())], (theirs.fileno(),)
                self._popen = start_child("minisgl_backend.engine.grammar_process", arguments, fds=fds, tied=True)
        except OSError:
            self._connection.close()
            raise

    def wait_ready(self, tokenizer_info: str) -> None:
        """Hands over the tokenizer, as xgrammar's JSON. Raises EOFError or OSError where the process is not ready."""
        for message in (tokenizer_info.encode(), None):
            if not self._connection.poll(START_S):
                raise EOFError(f"it was not ready after {START_S:g} s")
            self._connection.recv_bytes()
            if message is not None:
                self._connection.send_bytes(message)

    def begin(self, grammar: Grammar) -> None:
        """Raises OSError where the process has died."""
        self._connection.send_bytes(msgspec.msgpack.encode(grammar))

    def answers_within(self, seconds: float) -> bool:
        """True as well where it has died."""
        return self._connection.poll(seconds)

    def answer(self) -> Answer:
        """Raises EOFError or OSError where the process has died."""
        return msgspec.msgpack.decode(self._connection.recv_bytes(), type=Answer)

    def kill(self) -> None:
        """Any thread may; whoever waits for an answer hears that it has died."""
        self._popen.kill()

    def end(self) -> None:
        self._popen.kill()
        self._popen.wait()
        if self._popen.stdin is not None:
            self._popen.stdin.close()
        self._connection.close()


class GrammarCompilers:
    """All compilers of one engine; nothing is started before the first grammar."""

    def __init__(self, load_tokenizer: Callable[[], Any], *, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """`load_tokenizer` returns the model's transformers tokenizer."""
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._todo: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._slow_todo: queue.Queue[Job] = queue.Queue(MAX_SLOW_WAITING)
        self._slow = threading.Semaphore(MAX_SLOW)
        self._lock = threading.Lock()  # of what follows
        self._threads: list[threading.Thread] = []
        self._processes: set[CompilerProcess] = set()
        self._closed = False
        self._tokenizer: _Tokenizer | None = None
        self._known: OrderedDict[Grammar, Any] = OrderedDict()  # compiled, the oldest first
        self._known_bytes = 0

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def num_waiting(self) -> int:
        """Grammars that no process has yet, those included that nobody waits for any more."""
        return self._todo.qsize() + self._slow_todo.qsize()

    def submit(self, job: Job) -> None:
        """Raises CapacityError where the machine has no thread left for the first one."""
        if not self._threads:
            self._add_thread()
        if not self._threads:
            raise CapacityError("grammars cannot be compiled now: the machine has no thread left; try again later")
        self._todo.put(job)

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
                    if len(self._threads) > 1:
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
        # Whoever gives a turn back looks again: one may have been put off just before.
        while not self._slow_todo.empty() and self.begin_slow_job():
            try:
                return self._slow_todo.get_nowait()
            except queue.Empty:
                self.slow_job_ended()
        return None

    def begin_slow_job(self) -> bool:
        """False where as many as may are compiled. Where it is True, another worker takes the next quick ones."""
        if not self._slow.acquire(blocking=False):
            return False
        self._add_thread()
        return True

    def slow_job_ended(self) -> None:
        self._slow.release()

    def put_off(self, job: Job) -> None:
        """Until a slow one has ended. Raises CapacityError where too many wait for that."""
        try:
            self._slow_todo.put_nowait(job)
        except queue.Full:
            raise CapacityError(
                f"guided_decoding_guide takes longer than {QUICK_S:g} s to compile, and {MAX_SLOW_WAITING} others that "
                "do wait for their turn; try again later"
            ) from None

    def start_process(self) -> CompilerProcess:
        """One that is ready. Raises CapacityError where there can be none now, and what the tokenizer raises."""
        try:
            process = CompilerProcess()
        except OSError as error:
            raise CapacityError(f"a grammar compiler cannot be started: {error}; try again later") from error
        with self._lock:
            self._processes.add(process)
            if self._closed:
                process.kill()
        try:
            process.wait_ready(self._take_tokenizer().json)  # which is loaded while the process imports
            return process
        except (EOFError, OSError) as error:
            self.end_process(process)
            raise CapacityError(f"a grammar compiler did not start: {error}; try again later") from error
        except BaseException:
            self.end_process(process)
            raise

    def end_process(self, process: CompilerProcess) -> None:
        with self._lock:
            self._processes.discard(process)
        process.end()

    def _take_tokenizer(self) -> _Tokenizer:
        with self._lock:
            if self._tokenizer is None:
                import xgrammar

                info = xgrammar.TokenizerInfo.from_huggingface(
                    self._load_tokenizer(), vocab_size=self._vocab_size, stop_token_ids=self._eos_token_ids or None
                )
                compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES)
                self._tokenizer = _Tokenizer(info, info.serialize_json(), compiler)
            return self._tokenizer

    def recall(self, grammar: Grammar) -> Any:
        """What was compiled before; None where it was not, or is forgotten."""
        with self._lock:
            compiled = self._known.get(grammar)
            if compiled is not None:
                self._known.move_to_end(grammar)
            return compiled

    def load(self, grammar: Grammar, text: str) -> Any:
        """The compiled grammar from xgrammar's JSON of it, or anew where there is none, since it is quick; it is kept
        for whoever asks for the same."""
        import xgrammar

        tokenizer = self._take_tokenizer()
        if text:
            compiled = xgrammar.CompiledGrammar.deserialize_json(text, tokenizer.info)
        else:
            compiled = compile_grammar(tokenizer.compiler, grammar)
        with self._lock:
            if grammar not in self._known:
                self._known[grammar] = compiled
                self._known_bytes += compiled.memory_size_bytes
            while self._known_bytes > CACHE_BYTES:
                self._known_bytes -= self._known.popitem(last=False)[1].memory_size_bytes
        return compiled


class _Worker:
    """A thread with a process, which is replaced when it had to be ended."""

    def __init__(self, compilers: GrammarCompilers) -> None:
        self._compilers = compilers
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
        if self._ended and not self._compilers.closed:
            self._ended = False
            try:
                self._process = self._compilers.start_process()
            except Exception as error:  # the next grammar's sender hears of it
                log.warning("%s", error)

    def _work(self, job: Job, compile_: Callable[[Job], Any]) -> None:
        """Tells what came of it, unless it was put off."""
        if not job.is_wanted():
            return
        try:
            compiled = self._compilers.recall(job.grammar)
            if compiled is None:
                compiled = compile_(job)
        except _PutOffError:
            return
        except MinisglError as error:
            job.done(None, error)
        except (EOFError, OSError) as error:
            self._end_process()
            if not self._compilers.closed:
                log.error("a grammar compiler died: %s", error or type(error).__name__)
            job.done(None, InvalidRequestError("guided_decoding_guide cannot be compiled: the compiler died of it"))
        except Exception as error:
            log.exception("a grammar could not be compiled")
            job.done(None, InvalidRequestError(f"guided_decoding_guide cannot be compiled: {error}"))
        else:
            job.done(compiled, None)

    def _compile(self, job: Job) -> Any:
        """Raises _PutOffError where it takes long and as many as may do so."""
        process = self._begin(job)
        if not process.answers_within(QUICK_S):
            if not self._compilers.begin_slow_job():
                self._end_process()
                self._compilers.put_off(job)
                raise _PutOffError
            try:
                self._wait_slowly(process, job)
            finally:
                self._compilers.slow_job_ended()
        return self._take(process, job)

    def _compile_slowly(self, job: Job) -> Any:
        process = self._begin(job)
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
        """Until the process answers. Raises InvalidRequestError where that takes too long, or nobody waits for it."""
        deadline = time.monotonic() + DEADLINE_S
        while not process.answers_within(LOOK_S):
            if time.monotonic() > deadline or not job.is_wanted():
                self._end_process()
                raise InvalidRequestError(
                    f"guided_decoding_guide takes longer than {DEADLINE_S:g} s to compile; allowed: a simpler one"
                )

    def _take(self, process: CompilerProcess, job: Job) -> Any:
        answer = process.answer()
        if answer.error:
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
