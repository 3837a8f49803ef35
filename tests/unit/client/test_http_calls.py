"""What a call over HTTP in an event loop leaves behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from client.http_transport import HttpCall, Post


class Session:
    """Answers when it is let."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.closed = False

    async def post(self, url: str, **request: Any) -> Session:
        await self.may_answer.wait()
        return self

    def close(self) -> None:
        self.closed = True


def test_a_response_that_came_while_its_task_was_cancelled_is_closed() -> None:
    """Nobody has it yet, and the server would go on for nobody."""

    async def run() -> bool:
        session: Any = Session()
        post = Post(path="/", body=b"", stream=True, request_id="", timeout=None)
        body_format: Any = None  # for what never comes
        call = HttpCall(session, "http://host", post, body_format)
        task = asyncio.ensure_future(call.receive())
        await asyncio.sleep(0.01)
        session.may_answer.set()
        asyncio.get_running_loop().call_soon(task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        call.cancel()
        return bool(session.closed)

    assert asyncio.run(run())
