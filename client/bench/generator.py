"""Sends a load's requests, one task for each, all in one event loop, and records the responses' times."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from array import array
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import ClientError
from .targets import StreamClient, Target
from .workload import Load, Question

_Ask = Callable[[Question, float], Coroutine[Any, Any, None]]


@dataclass
class Record:
    """One request. Times are seconds of time.perf_counter."""

    planned: float  # when it should have been sent; with a fixed concurrency, when it was sent
    sent: float
    ended: float = 0.0
    deliveries: array[float] = field(default_factory=lambda: array("d"))  # times of the answer's pieces
    input_tokens: int | None = None  # by the server's count, like the next one
    output_tokens: int | None = None
    first_tokens: int | None = None  # of the first piece, including earlier tokens without text
    error: str = ""
    finished: bool = False  # the whole answer arrived

    @property
    def unfinished(self) -> bool:
        """It was neither answered nor refused before the run was stopped."""
        return not self.finished and not self.error

    @property
    def num_output_tokens(self) -> int:
        """The server's count, or the number of pieces if it reports none."""
        return len(self.deliveries) if self.output_tokens is None else self.output_tokens


@dataclass(frozen=True)
class Run:
    """The result of a load."""

    load: Load
    records: Sequence[Record]
    interrupted: bool  # it was stopped before its end


def allow_many_connections() -> None:
    """Raises this process's soft limit of open files to the hard one: over HTTP each stream is a connection."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def run_load(target: Target, client: StreamClient, load: Load, on_end: Callable[[], None]) -> Run:
    """Returns when all requests have ended, or soon after Ctrl-C; `on_end` is called after each request."""
    records: list[Record] = []
    stopped = asyncio.Event()

    async def ask(question: Question, planned: float) -> None:
        record = Record(planned, time.perf_counter())
        records.append(record)
        await _ask(target, client, question, record)
        on_end()

    sender = _send_closed if load.concurrency is not None else _send_as_they_arrive
    sending = asyncio.ensure_future(sender(load, ask))
    with _on_ctrl_c(stopped.set):
        waiting = asyncio.ensure_future(stopped.wait())
        try:
            await asyncio.wait((sending, waiting), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (waiting, sending):
                task.cancel()
            # Cancelled tasks cancel their requests on the server.
            await asyncio.gather(waiting, sending, return_exceptions=True)
    if not stopped.is_set():
        sending.result()  # raises this program's own errors, not the server's
    return Run(load, records, stopped.is_set())


async def _ask(target: Target, client: StreamClient, question: Question, record: Record) -> None:
    deliveries = record.deliveries
    try:
        async with target.ask(client, question.prompt, question.output_tokens, question.images) as stream:
            async for chunk in stream:
                if chunk.num_output_tokens is not None:
                    record.output_tokens = (record.output_tokens or 0) + chunk.num_output_tokens
                if chunk.text or "reasoning_content" in chunk.extra:
                    deliveries.append(time.perf_counter())
                    if len(deliveries) == 1:
                        record.first_tokens = record.output_tokens
                if chunk.num_input_tokens is not None:
                    record.input_tokens = chunk.num_input_tokens
        record.finished = True
    except ClientError as error:
        record.error = f"{type(error).__name__}: {error}"
    finally:
        record.ended = time.perf_counter()


async def _send_closed(load: Load, ask: _Ask) -> None:
    """`concurrency` workers, each of which sends its next request when its last one has ended."""
    questions = iter(load.questions)

    async def work() -> None:
        for question in questions:
            await ask(question, time.perf_counter())

    await _all([asyncio.ensure_future(work()) for _ in range(load.concurrency or 1)])


async def _send_as_they_arrive(load: Load, ask: _Ask) -> None:
    """Sends each request at its time, whatever the others are doing."""
    started = time.perf_counter()
    tasks: list[asyncio.Future[None]] = []
    try:
        for question in load.questions:
            planned = started + (question.at or 0.0)
            if (wait := planned - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.ensure_future(ask(question, planned)))
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        raise
    finally:
        await _all(tasks)


async def _all(tasks: Sequence[asyncio.Future[None]]) -> None:
    """Waits for all. If this is cancelled or one of them fails, cancels the others and waits for their end."""
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def _on_ctrl_c(call: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C calls `call`; a second one ends the program as usual."""
    loop = asyncio.get_running_loop()

    def once() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        call()

    try:
        loop.add_signal_handler(signal.SIGINT, once)
    except (NotImplementedError, RuntimeError, ValueError):  # not the main thread, or a system without them
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
