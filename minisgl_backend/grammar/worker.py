"""A thread that compiles one grammar after the other in a process of its own."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from minisgl_backend.errors import InvalidRequestError, MinisglError
from minisgl_backend.grammar.compiler_process import CompilerProcess
from minisgl_backend.grammar.jobs import Job, Outcome

if TYPE_CHECKING:
    from minisgl_backend.grammar.compilers import GrammarCompilers

log = logging.getLogger(__name__)


class Worker:
    """A thread with a process, which is replaced when it had to be ended."""

    def __init__(self, compilers: GrammarCompilers) -> None:
        self._compilers = compilers
        self._memory = compilers.memory
        self._process: CompilerProcess | None = None
        self._ended = False  # it had a process

    def run(self) -> None:
        """Until the compilers are closed. The process starts before there is a grammar."""
        self._start_process()
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
            self._start_process()

    def _start_process(self) -> None:
        try:
            self._process = self._compilers.start_process()
        except Exception as error:  # the next grammar's sender hears of it
            if not self._compilers.closed:
                log.warning("%s", error)

    def _work(self, job: Job, compile_: Callable[[Job], Any]) -> None:
        """Tells what came of it, unless it was put off."""
        outcome: Outcome | None = None
        is_put_off = False
        try:
            if self._compilers.is_wanted(job.grammar):
                outcome = self._outcome(job, compile_)
                job.done(*outcome)
        except PutOffError:
            is_put_off = True
        except UnwantedError as error:  # whoever came since may want it
            job.done(None, InvalidRequestError(str(error)))
        finally:
            if not is_put_off:
                self._compilers.land(job, outcome)

    def _outcome(self, job: Job, compile_: Callable[[Job], Any]) -> Outcome:
        """Raises PutOffError and UnwantedError."""
        try:
            compiled = self._memory.recall(job.grammar)
            return (compile_(job) if compiled is None else compiled), None
        except (PutOffError, UnwantedError):
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
        """Raises PutOffError where it takes long and as many as may do so."""
        process = None
        if not self._memory.is_slow(job.grammar):
            process = self._begin(job)
            if process.answers_within(self._compilers.limits.quick_s):
                return self._take(process, job)
            self._memory.note_slow(job.grammar, True)
        if not self._compilers.begin_slow_job():
            if process is not None:
                self._end_process()
            self._compilers.put_off(job)
            raise PutOffError
        try:
            return self._compile_slowly(job, process)
        finally:
            self._compilers.slow_job_ended()

    def _compile_slowly(self, job: Job, process: CompilerProcess | None = None) -> Any:
        """`process`: what is at it already."""
        if process is None:
            process = self._begin(job)
            self._memory.note_slow(job.grammar, not process.answers_within(self._compilers.limits.quick_s))
        self._wait_slowly(process, job)
        return self._take(process, job)

    def _begin(self, job: Job) -> CompilerProcess:
        process = self._send(job)
        try:
            # While the process compiles: the first time, this takes most of a second.
            self._compilers.take_tokenizer()
        except Exception:
            self._end_process()  # else its answer would be taken for that of the next grammar
            raise
        return process

    def _send(self, job: Job) -> CompilerProcess:
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
        """Until the process answers. Raises InvalidRequestError where that takes too long, UnwantedError where nobody
        waits for it."""
        limits = self._compilers.limits
        deadline = time.monotonic() + limits.deadline_s
        reason = f"guided_decoding_guide takes longer than {limits.deadline_s:g} s to compile; allowed: a simpler one"
        while not process.answers_within(limits.look_s):
            if time.monotonic() > deadline:
                self._end_process()
                self._memory.note_refused(job.grammar, reason)
                raise InvalidRequestError(reason)
            if not self._compilers.is_wanted(job.grammar):
                self._end_process()
                raise UnwantedError(reason)

    def _take(self, process: CompilerProcess, job: Job) -> Any:
        answer = process.answer()
        if answer.error:
            self._memory.note_refused(job.grammar, answer.error)
            raise InvalidRequestError(answer.error)
        return self._compilers.load(job.grammar, answer)

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._ended = True
            with contextlib.suppress(OSError):
                self._compilers.end_process(process)


class PutOffError(Exception):
    """The job waits in another line; nothing is told."""


class UnwantedError(Exception):
    """Nobody waits for the grammar any more; the message is for whoever asked first."""
