"""Runs a client of an event loop for threads: each call of theirs is a coroutine in a loop that has its own thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from .errors import ClientError

T = TypeVar("T")
ClientT = TypeVar("ClientT", bound=AbstractAsyncContextManager[Any])


class Portal(Protocol):
    """How a thread uses what belongs to an event loop."""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its result, or its error. An exception in the waiting thread, as at Ctrl-C, cancels it."""

    def post(self, function: Callable[[], object]) -> None:
        """Calls it soon, without waiting; nothing, if the loop has ended."""


class LoopThread(Generic[ClientT]):
    """The thread and the client in it, which both end when nothing refers to this object any more."""

    def __init__(self, make: Callable[[], ClientT], *, survives_forks: bool = True) -> None:
        """Raises what `make` raises, which is called in the loop. survives_forks: a forked process, which does not have
        the thread, begins another one with a client of its own; else it gets an error."""
        self._make, self._survives_forks = make, survives_forks
        self._begin()

    def _begin(self) -> None:
        self._process, begun = os.getpid(), SimpleQueue[Any]()
        thread = threading.Thread(target=_serve, args=(self._make, begun), name="minisgl-client", daemon=True)
        thread.start()
        found = begun.get()
        if isinstance(found, BaseException):
            raise found
        self._client: ClientT
        self._loop, self._client, stop = found
        weakref.finalize(self, self._loop.call_soon_threadsafe, stop).atexit = False  # it ends with the program

    @property
    def client(self) -> ClientT:
        """To be used by `run` alone."""
        if self._process != os.getpid() and self._survives_forks:
            self._begin()
        return self._client

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """See Portal."""
        # The queue's C code waits, not a lock in Python that Ctrl-C could leave taken.
        done: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        tasks: list[asyncio.Task[None]] = []
        try:
            if self._process != os.getpid():
                raise ClientError(
                    "a forked process cannot go on with a stream, nor with a client over gRPC; make one in each process"
                )
            self._loop.call_soon_threadsafe(lambda: tasks.append(self._loop.create_task(_settle(coroutine, done))))
            result, error = done.get()
        except BaseException:
            self.post(lambda: tasks[0].cancel() if tasks else coroutine.close())
            raise
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def post(self, function: Callable[[], object]) -> None:
        """See Portal."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)


async def in_loop(function: Callable[[], T]) -> T:
    """Calls it where a Portal runs coroutines."""
    return function()


async def _settle(coroutine: Coroutine[Any, Any, Any], done: SimpleQueue[Any]) -> None:
    try:
        done.put((await coroutine, None))
    except BaseException as error:
        done.put((None, error))


def _serve(make: Callable[[], ClientT], begun: SimpleQueue[Any]) -> None:
    async def live() -> None:
        stop = asyncio.Event()
        async with make() as client:
            begun.put((asyncio.get_running_loop(), client, stop.set))
            await stop.wait()

    try:
        asyncio.run(live())
    except BaseException as error:
        begun.put(error)
