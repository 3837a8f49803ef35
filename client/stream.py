"""An answer in pieces, and how to stop it."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Protocol

from .errors import cancelled_here
from .loop_thread import Portal
from .results import Chunk, Collector, Reply, Result, chunks_of

if TYPE_CHECKING:
    from typing_extensions import Self


class Call(Protocol):
    """One request in flight, the interface of transports."""

    async def receive(self) -> Reply | None:
        """The next response, None after the last. Raises ClientError once the call has ended."""

    def cancel(self) -> None:
        """Ends the request now; any number of times."""


class AsyncTextStream(AsyncIterator[Chunk]):
    """The chunks of one answer, as they come. Closing, dropping or leaving it (`async with`) cancels the request."""

    def __init__(self, call: Call, request_id: str) -> None:
        self.request_id = request_id
        self._call = call
        self._chunks: deque[Chunk] = deque()
        self._collector = Collector()
        self._ended = False  # there is nothing more to read
        self._cancelled = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        while not self._chunks and not self._ended:
            try:
                reply = await self._call.receive()
            except BaseException:
                self._end()
                raise
            self._ended = self._ended or reply is None
            self._chunks.extend(chunks_of(reply) if reply is not None else ())
        if self._cancelled:
            raise cancelled_here(self.request_id)
        if not self._chunks:
            raise StopAsyncIteration
        chunk = self._chunks.popleft()
        self._collector.add(chunk)
        return chunk

    async def result(self) -> Result:
        """Reads the rest; all chunks together."""
        async for _ in self:
            pass
        return self._collector.result(self.request_id)

    def cancel(self) -> None:
        """Cancels the request unless it is complete. Reading on then raises Cancelled."""
        self._cancelled = self._cancelled or not self._ended
        self._end()

    async def aclose(self) -> None:
        self.cancel()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()


class TextStream(Iterator[Chunk]):
    """The chunks of one answer, as they come. Closing, dropping or leaving it (`with`) cancels the request."""

    def __init__(self, answer: AsyncTextStream, portal: Portal) -> None:
        self.request_id = answer.request_id
        self._answer = answer
        self._portal = portal

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        try:
            return self._portal.run(self._answer.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def result(self) -> Result:
        """Reads the rest; all chunks together."""
        return self._portal.run(self._answer.result())

    def close(self) -> None:
        """Cancels the request unless it is complete; from any thread. Reading on then raises Cancelled."""
        self._portal.post(self._answer.cancel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
