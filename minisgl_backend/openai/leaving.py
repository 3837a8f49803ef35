"""Detects that a client has closed its connection, so that its generations end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Receive


class ClientWatch:
    """Calls `on_left` once when the client of a request, whose body has been read, leaves; until `close`."""

    def __init__(self, receive: Receive, on_left: Callable[[], None]) -> None:
        self._receive = receive
        self._on_left = on_left
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._on_left()

    def close(self) -> None:
        self._task.cancel()
