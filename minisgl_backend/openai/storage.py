"""What goes wrong with the disk below files, batches and kept responses: what clients are told, and how work waits."""

from __future__ import annotations

import asyncio
import errno
import logging
import sqlite3
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute

from minisgl_backend.openai.errors import ApiError

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

PAUSES_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0)  # before each further try; the last one for all that follow
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_LASTING = (errno.ENOENT, errno.ENOTDIR, errno.EFBIG)  # time does not mend these


def pause_seconds(tries: int) -> float:
    """Before the next try, after `tries` in vain."""
    return PAUSES_SECONDS[min(tries, len(PAUSES_SECONDS)) - 1]


def storage_error(what: str, error: OSError | sqlite3.Error) -> ApiError:
    """`what` cannot be done: 507 `storage_full` if space is missing, 500 `storage_unavailable` for a folder that is
    gone, read-only or another user's, and for a faulty disk. Without the server's paths."""
    if isinstance(error, OSError):
        is_full, reason = error.errno in _NO_SPACE, error.strerror or type(error).__name__
    else:
        is_full, reason = "disk is full" in str(error), str(error)
    if is_full:
        return ApiError(507, f"{what}: {reason}", code="storage_full")
    return ApiError(500, f"{what}: {reason}", code="storage_unavailable")


class StorageRoute(APIRoute):
    """A route on which each OSError is the storage's."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except OSError as error:
                log.error("%s %s: %s", request.method, request.url.path, error)
                raise storage_error("files and batches cannot be used", error) from None

        return handled


async def until_written(what: str, write: Callable[..., _Result], *arguments: Any) -> _Result:
    """Runs `write` on another thread, again after growing pauses while the disk is full or cannot be written; the log
    has one line for that, and one when `what` goes on. `write` leaves nothing that disturbs its next try."""
    tries = 0
    while True:
        try:
            result = await off_loop(write, *arguments)
        except OSError as error:
            if error.errno in _LASTING:
                raise
            if not tries:
                log.error("%s waits until its files can be written: %s", what, error)
            tries += 1
            await asyncio.sleep(pause_seconds(tries))
        else:
            if tries:
                log.warning("%s goes on: its files can be written again", what)
            return result


async def off_loop(work: Callable[..., _Result], *arguments: Any) -> _Result:
    """Runs on another thread. A cancelled caller still waits for its end: only the holder of the lock may write."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
