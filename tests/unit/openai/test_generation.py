"""What cancels the call behind a generation, and what does not."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from minisgl_backend.openai.errors import ApiError
from minisgl_backend.openai.triton import Generation


class Call:
    """A call that brings these messages."""

    def __init__(self, *messages: Any) -> None:
        self._left = [message.SerializeToString() for message in messages]
        self.cancelled = False

    async def read(self) -> Any:
        return self._left.pop(0) if self._left else grpc.aio.EOF

    def cancel(self) -> None:
        self.cancelled = True


def last_response() -> Any:
    response = service_pb2.ModelStreamInferResponse()
    response.infer_response.outputs.add(name="finish_reason")
    response.infer_response.raw_output_contents.append(b"\x04\0\0\0stop")
    return response


@pytest.mark.parametrize("count", [1, 2])
def test_a_call_that_ends_by_itself_is_not_cancelled(count: int) -> None:
    """Clients close their connection at [DONE]: the server's end of the call may be on its way still."""
    call = Call(last_response())
    generation = Generation(call, count, {})
    delta = asyncio.run(generation.next())
    assert delta is not None
    assert delta.reason == "stop"
    generation.cancel()
    assert call.cancelled == (count > 1), "a sibling goes on"


def test_a_call_that_failed_is_not_cancelled_behind_its_error() -> None:
    call = Call(service_pb2.ModelStreamInferResponse(error_message="top_p is 7; allowed: above 0"))
    generation = Generation(call, 1, {})
    with pytest.raises(ApiError):
        asyncio.run(generation.next())
    generation.cancel()
    assert not call.cancelled
