"""A worker thread of the grammar compilers, which compiles one grammar after the other in its own process."""

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
    """A thread with a compiler process, which is replaced after it died or was killed."""

    def __init__(self, compilers: GrammarCompilers) -> None:
        self._compilers = compilers
        self._cache = compilers.cache
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
            self._process = self._compilers.start_process()
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
            self._compilers.load_tokenizer()
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
        self._process = self._compilers.start_process()
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
        return self._compilers.load(job.grammar, reply)

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._ended = True
            with contextlib.suppress(OSError):
                self._compilers.end_process(process)


class PostponedError(Exception):
    """The job was moved to the slow queue, and has no outcome yet."""


class AbandonedError(Exception):
    """All requests for the grammar were cancelled; the message is for the first one."""
