"""Requests over gRPC.

Every request has a stream of its own (they share one connection): so each has its own deadline and can be cancelled
alone, which requests in a shared stream cannot.

Errors come as texts inside the stream. With the metadata `triton_grpc_error` they would include their status, but
tritonserver 2.51 crashes then: a failed request alongside other streams ends it with a segmentation fault in one of
some hundred cases.

A call is never cancelled right after such an error but read to its end: if a call is cancelled while it ends,
tritonserver 2.51 keeps its handler, and with it the model, for ever. The end comes at once, since a stream carries only
one request and its sending side has been closed.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio

from . import kserve
from .errors import ClientError, ServerError, cancelled_here, from_message, from_status, timed_out
from .request import InferenceRequest, Tensor
from .results import Reply
from .running import RunningCalls

_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),  # a proxy for web pages breaks calls to a nearby server
    # Its own waits between attempts grow to 120 s: a server that comes up late would be found that late. The minimum
    # time for an attempt (min_reconnect_backoff_ms) stays, for distant servers and busy machines.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
_END_SECONDS = 1.0  # how long the end of a call may be delayed after an error
_CONTENTS_FIELD = {
    "BYTES": "bytes_contents",
    "BOOL": "bool_contents",
    "INT32": "int_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
}
_STRUCT_FORMAT = {
    "BOOL": "?",
    "INT8": "b",
    "UINT8": "B",
    "INT16": "h",
    "UINT16": "H",
    "INT32": "i",
    "UINT32": "I",
    "INT64": "q",
    "UINT64": "Q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}


class GrpcCall:
    """One request in flight."""

    def __init__(self, call: Any, request: InferenceRequest) -> None:
        self._call = call
        self._request_id = request.request_id
        self._progress = _Progress(request)
        self._cancelled = False

    async def receive(self) -> Reply | None:
        """The next response, None after the last. Raises ClientError once the call has ended."""
        try:
            response = await self._call.read()
        except asyncio.CancelledError:
            if self._cancelled:  # this request was cancelled; otherwise the task that waits for it was
                raise cancelled_here(self._request_id) from None
            raise
        except grpc.RpcError as error:
            raise self._progress.error(error) from None
        try:
            return self._progress.accept(None if response is grpc.aio.EOF else response)
        except ClientError:
            await self._read_on()
            raise

    def cancel(self) -> None:
        self._cancelled = True
        self._call.cancel()

    async def _read_on(self) -> None:
        """Reads until the call has ended; cancels one that does not end in time."""
        bound = asyncio.get_running_loop().call_later(_END_SECONDS, self.cancel)
        try:
            while await self._call.read() is not grpc.aio.EOF:
                pass
        except grpc.RpcError:
            pass  # the first error is the one to report
        except asyncio.CancelledError:
            if not self._cancelled:  # not the call, but the task that waits for it
                raise
        finally:
            bound.cancel()


class GrpcTransport:
    """A connection to a server."""

    def __init__(self, address: str, secure: bool) -> None:
        if secure:
            self._channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(), options=_CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._stub = kserve.Stub(self._channel)
        self._running = RunningCalls()

    def start(self, request: InferenceRequest) -> GrpcCall:
        call = self._stub.ModelStreamInfer(iter((encode_request(request),)), timeout=request.timeout)
        return self._running.add(GrpcCall(call, request))

    async def is_live(self, timeout: float) -> bool:
        return await self._ask(self._stub.ServerLive, kserve.ServerLiveRequest(), timeout, "live")

    async def is_ready(self, model: str, version: str, timeout: float) -> bool:
        """Whether server and model are ready."""
        model_request = kserve.ModelReadyRequest(name=model, version=version)
        return await self._ask(
            self._stub.ServerReady, kserve.ServerReadyRequest(), timeout, "ready"
        ) and await self._ask(self._stub.ModelReady, model_request, timeout, "ready")

    async def close(self) -> None:
        self._running.cancel()  # closing the channel would end them as if their tasks had been cancelled
        await self._channel.close()

    async def _ask(self, method: Any, request: Any, timeout: float, field: str) -> bool:
        try:
            return bool(getattr(await method(request, timeout=timeout), field))
        except grpc.RpcError:
            return False


def encode_request(request: InferenceRequest) -> Any:
    """The ModelInferRequest; tensors are [1, values] if the model has a batch dimension, as the ensemble has."""
    message = kserve.ModelInferRequest(
        model_name=request.model, model_version=request.model_version, id=request.request_id
    )
    for name, tensor in request.tensors.items():
        shape = [1, len(tensor.values)] if request.batched else [len(tensor.values)]
        _add_tensor(message, name, tensor, shape)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    if request.timeout is not None:
        message.parameters["timeout"].int64_param = int(request.timeout * 1e6)  # microseconds
    return message


def decode_response(response: Any) -> Reply:
    """A ModelInferResponse as flat lists; texts as str, with U+FFFD for invalid UTF-8."""
    outputs = {
        output.name: list(_decode_tensor(output.datatype, raw))
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=False)
    }
    return Reply(outputs, final=response.parameters["triton_final_response"].bool_param)


class _Progress:
    """Whether the answer of one request is complete."""

    def __init__(self, request: InferenceRequest) -> None:
        self._request_id = request.request_id
        self._timeout = request.timeout
        self._final = False

    def accept(self, response: Any | None) -> Reply | None:
        """Takes a message of the stream; None is its end, which is an error before the final response."""
        if response is None:
            if not self._final:
                raise ServerError("the stream ended before the final response", request_id=self._request_id)
            return None
        if response.error_message:
            raise from_message(response.error_message, self._request_id)
        reply = decode_response(response.infer_response)
        self._final = self._final or bool(reply.final)
        return reply

    def error(self, error: Any) -> ClientError:
        """The error for the status that ended the stream."""
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return timed_out(self._timeout, self._request_id)
        return from_status(error.code().name, error.details() or error.code().name, self._request_id)


def _add_tensor(message: Any, name: str, tensor: Tensor, shape: list[int]) -> None:
    values = tensor.values
    infer_input = message.inputs.add(name=name, datatype=tensor.datatype, shape=shape)
    if tensor.datatype == "BYTES":
        values = tuple(str(value).encode() for value in values)  # type: ignore[misc]
    getattr(infer_input.contents, _CONTENTS_FIELD[tensor.datatype]).extend(values)


def _decode_tensor(datatype: str, raw: bytes) -> Iterator[Any]:
    if datatype == "BYTES":
        position = 0
        while position < len(raw):
            (length,) = struct.unpack_from("<I", raw, position)
            position += 4
            yield raw[position : position + length].decode("utf-8", "replace")
            position += length
        return
    for (value,) in struct.iter_unpack(f"<{_STRUCT_FORMAT[datatype]}", raw):
        yield value
