"""Streams of responses in the background, from the events that are kept: they begin, break off and go on anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from minisgl_backend.openai.errors import ApiError
from minisgl_backend.openai.response_store import ResponseStore
from minisgl_backend.openai.sse import KEEP_ALIVE, named_event

_LOOK_SECONDS = 0.05  # between looks for further events, which any worker may write
_IDLE_LOOKS = 20  # after which the process that computes the response is asked for
_LAST = tuple(f"event: response.{kind}\n".encode() for kind in ("completed", "incomplete", "failed", "cancelled"))


class KeptEvents:
    """A stream of the events of one response behind one of them."""

    keep_alive = KEEP_ALIVE

    def __init__(self, store: ResponseStore, response_id: str, after: int = -1) -> None:
        """`after`: the number of the last event that the client has; -1: none."""
        self._store = store
        self._id = response_id
        self._number = after + 1  # of the next event
        self._left = False

    async def events(self) -> AsyncIterator[bytes]:
        """The events of a stream, until the last one. Raises ApiError."""
        idle, goes_on = 0, True
        while goes_on and not self._left:
            events, goes_on = await self._store.events(self._id, self._number)
            if events:
                self._number, idle = self._number + len(events), 0
                yield b"".join(events)
                continue
            idle += 1
            if idle % _IDLE_LOOKS == 0 and goes_on:
                found = await self._store.find(self._id)
                goes_on = found is not None and found.response["status"] != "failed"
            await asyncio.sleep(_LOOK_SECONDS)
        if not self._left and (last := await self._unkept_end()):
            yield last

    async def _unkept_end(self) -> bytes:
        """The last event, where the process that computed the response did not keep it; empty where it did."""
        kept, _ = await self._store.events(self._id, max(self._number - 1, 0))
        if kept and kept[-1].startswith(_LAST):
            return b""
        found = await self._store.find(self._id)
        if found is None:
            raise ApiError(404, f"the response {self._id[:100]!r} is not kept any more", param="response_id")
        kind = f"response.{found.response['status']}"
        return named_event(kind, {"type": kind, "response": found.response, "sequence_number": self._number})

    async def whole(self) -> bytes:
        """All events at once. Raises ApiError."""
        return b"".join([data async for data in self.events()])

    def error_event(self, error: ApiError) -> bytes:
        told = {"code": error.code, "message": error.message, "param": error.param}
        return named_event("error", {"type": "error", **told, "sequence_number": self._number})

    def cancel(self) -> None:
        """The client has left; the response goes on."""
        self._left = True
