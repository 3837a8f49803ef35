"""The server behind the endpoint, over gRPC: generations as streams, and the tokenizer's information.

Every generation is a separate call, so that each can be cancelled alone, and a stream even if the client wants a single
response: only streams tell the server that their client has left. Messages are passed on as bytes and parsed once.

A call is never cancelled right after its end or an error but read to its end (client/grpc_transport.py explains why).
"""

from __future__ import annotations

import asyncio
import json
import logging
import struct
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import msgspec
from tritonclient.grpc import service_pb2

from minisgl_backend.images.parts import Source
from minisgl_backend.openai.errors import ApiError, ClientLeft, from_client_error, invalid
from minisgl_backend.openai.requests.base import is_unicode
from minisgl_backend.openai.tracing import RequestTrace
from minisgl_backend.remote_errors import ClientError, from_message, from_status

_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
_UNARY = "/inference.GRPCInferenceService/ModelInfer"
_READY = "/inference.GRPCInferenceService/ModelReady"
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_ASK_SECONDS = 30.0  # for all calls but generations and commands
_CONTROL_SECONDS = 900.0  # in which all engine cores have read an adapter
_END_SECONDS = 1.0  # how long the end of a call may be delayed after its last response
_ENSEMBLE = "ensemble"

_LOGGER = logging.getLogger(__name__)
_parse = service_pb2.ModelStreamInferResponse.FromString


class TokenLogprob(msgspec.Struct, frozen=True):
    """One token's log-probability in the server's format."""

    logprob: float
    rank: int
    decoded_token: str
    bytes: list[int] | None = None  # if decoded_token is not whole characters


Position = dict[str, TokenLogprob]  # by token id: the position's own token first, then the most likely ones
_positions = msgspec.json.Decoder(list[Position] | None)


class ModelInfo(msgspec.Struct, frozen=True):
    """The tokenizer's information about the model."""

    model: str
    max_model_len: int
    vocab_size: int
    chat_template: str
    added_tokens: list[str]
    tokenizer: dict[str, Any] = {}  # with the keys of tokenizer_config.json
    adapters: dict[str, str] = {}  # folders by name
    adapter_states: dict[str, str] = {}  # "slot" or "host" by name; others are on the disk alone
    max_images: int | None = None  # of a request; 0: the model has no eyes


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, chat messages or token ids; exactly one of them."""

    text: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    token_ids: Sequence[int] | None = None
    template_kwargs: Mapping[str, Any] | None = None
    images: Sequence[Source] = ()  # of the messages


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The request's id, and the client's trace headers as gRPC metadata."""

    request_id: str
    metadata: tuple[tuple[str, str], ...] = ()
    tenant: str = ""  # the request's tenant, if shares are fair
    trace: RequestTrace | None = None  # if its spans are recorded


@dataclass(slots=True)
class Delta:
    """The news of one sequence."""

    index: int  # of the sequence among those of its prompt
    text: str
    num_tokens: int
    reason: str | None  # "stop", "length"; None: the sequence goes on
    logprobs: Sequence[Position]
    stop_text: str | None = None  # of the request's, if one ended the sequence


class ServerCall:
    """A call of the server in progress. Used by one task; `cancel` by any task of the same event loop."""

    def __init__(self, call: Any, names: Mapping[str, str]) -> None:
        """`names`: the client's names of fields that the server knows by another name."""
        self._call = call
        self._names = names
        self._left = False

    def cancel(self) -> None:
        """The client has left."""
        self._left = True
        self._call.cancel()

    async def _answer(self, awaited: Awaitable[Any]) -> Any:
        """What the call answers. Raises ApiError, ClientLeft."""
        try:
            return await awaited
        except (asyncio.CancelledError, grpc.RpcError) as error:
            if self._left:
                raise ClientLeft from None
            if isinstance(error, asyncio.CancelledError):
                raise
            raise from_client_error(rpc_error(error), self._names) from None


class Generation(ServerCall):
    """One request to the ensemble."""

    def __init__(
        self,
        call: Any,
        num_sequences: int,
        names: Mapping[str, str],
        *,
        has_special_tokens: bool = False,
        stops: Collection[str] = (),
    ) -> None:
        """`stops`: texts that may end a sequence."""
        super().__init__(call, names)
        self._stops = stops
        self.has_special_tokens = has_special_tokens  # in its text
        self._unfinished = num_sequences
        self._first: asyncio.Task[Delta | None] | None = None  # what `begin` has asked for
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.num_cached_tokens: int | None = None  # of the prompt; set at the end, if metrics were requested
        self.num_image_tokens = 0  # of the prompt, known with these
        self.prompt_logprobs: Sequence[Position] = ()
        self.perf_metrics: dict[str, int] = {}

    async def begin(self, seconds: float) -> None:
        """Waits for the first part, but not longer: a server says at once if it refuses a request. Raises ApiError."""
        self._first = asyncio.ensure_future(self._next())
        await asyncio.wait((self._first,), timeout=seconds)
        if self._first.done():
            self._first.result()

    async def next(self) -> Delta | None:
        """The next part of any sequence, None after the end of the last one. Raises ApiError, ClientLeft."""
        first, self._first = self._first, None
        return await (self._next() if first is None else first)

    async def _next(self) -> Delta | None:
        if not self._unfinished:
            return None
        raw = await self._answer(self._call.read())
        if raw is grpc.aio.EOF:
            raise ApiError(500, "the server's stream ended before the answer was complete")
        response = _parse(raw)
        if response.error_message:
            self._unfinished = 0
            await self.drain()
            raise from_client_error(from_message(response.error_message), self._names)
        infer = response.infer_response
        index, text, tokens, reason, positions, stop_text = 0, "", 0, None, (), None
        for output, value in zip(infer.outputs, infer.raw_output_contents, strict=False):
            name = output.name
            if name == "text_output":
                text = value[4:].decode("utf-8", "replace")
            elif name == "num_output_tokens":
                tokens = int.from_bytes(value, "little")
            elif name == "finish_reason":
                reason = None if value[4:] == b"None" else value[4:].decode()
            elif name == "stop_reason":
                stop_text = value[4:].decode("utf-8", "replace")
            elif name == "num_input_tokens":
                self.num_prompt_tokens = int.from_bytes(value, "little")
            elif name == "num_cached_tokens":
                self.num_cached_tokens, *images = struct.unpack(f"<{len(value) // 4}i", value)
                self.num_image_tokens = sum(images)
            elif name == "sequence_index":
                index = int.from_bytes(value, "little")
            elif name == "logprobs":
                positions = _positions.decode(value[4:]) or ()
            elif name == "prompt_logprobs":
                self.prompt_logprobs = _positions.decode(value[4:]) or ()
            elif name.endswith("_time_ns"):
                self.perf_metrics[name] = int.from_bytes(value, "little")
        self.num_output_tokens += tokens
        if reason is not None:
            self._unfinished -= 1
        return Delta(index, text, tokens, reason, positions, stop_text if stop_text in self._stops else None)

    def cancel(self) -> None:
        """Stops the generation: the client has left, or another of its generations has failed.

        A call whose answer is complete ends by itself: if cancelled at that moment, some versions of Triton never free
        it.
        """
        if self._unfinished:
            super().cancel()

    async def drain(self) -> None:
        """Waits for the end of the call; to be called when all has been read. A call that does not end is cancelled."""
        if self._left:
            return
        bound = asyncio.get_running_loop().call_later(_END_SECONDS, self._call.cancel)
        try:
            while await self._call.read() is not grpc.aio.EOF:
                pass
        except (grpc.RpcError, asyncio.CancelledError):
            pass  # how it ends no longer matters
        finally:
            bound.cancel()


class TritonServer:
    """A connection to a server, for one event loop."""

    def __init__(self, address: str, *, secure: bool = False) -> None:
        """`address`: HOST:PORT of its gRPC endpoint; `secure`: over TLS."""
        if secure:
            credentials = grpc.ssl_channel_credentials()
            self._channel = grpc.aio.secure_channel(address, credentials, options=_CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._infer_stream = self._channel.unary_stream(_INFER)
        self._infer = self._channel.unary_unary(_UNARY)
        self._model_ready = self._channel.unary_unary(_READY)

    def start(
        self,
        prompt: Prompt,
        sampling: Mapping[str, Any],
        context: RequestContext,
        names: Mapping[str, str],
        *,
        figures: bool = False,
    ) -> Generation:
        """Sends a request; the generation's first `next` raises its errors.

        `figures`: its last response has the server's metrics of the request.
        """
        has_figures = figures or context.trace is not None
        returned: dict[str, Any] = {**_RETURNED, "return_final_perf_metrics": True} if has_figures else _RETURNED
        stops = sampling.get("stop") or ()
        stops = (stops,) if isinstance(stops, str) else stops
        if stops:
            returned = {**returned, "return_stop_reason": True}
        if context.tenant:
            returned = {**returned, "tenant": context.tenant}
        message = _message(_ENSEMBLE, prompt, {**returned, **sampling}, context.request_id, names)
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        call = self._infer_stream(message.SerializeToString(), metadata=context.metadata or None)
        has_special_tokens = sampling.get("skip_special_tokens") is False
        return Generation(call, int(sampling.get("n", 1)), names, has_special_tokens=has_special_tokens, stops=stops)

    def infer(self, message: Any, context: RequestContext) -> Any:
        """A request with one response: returns its call, which is awaited for the response's bytes, or cancelled."""
        return self._infer(message.SerializeToString(), metadata=context.metadata or None)

    async def tokenize(
        self,
        prompt: Prompt,
        outputs: Sequence[str],
        names: Mapping[str, str],
        add_special_tokens: bool | None = None,
    ) -> dict[str, Any]:
        """The tokenizer's outputs for a prompt: `input_ids` (ints), `prompt_text`, `token_texts`. Raises ApiError."""
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        message = _message("tokenizer", prompt, special, "", names)
        for name in outputs:
            message.outputs.add(name=name)
        return await self._ask(message, names)

    async def model_info(self) -> ModelInfo:
        """Raises ApiError if the server does not answer."""
        message = _message("tokenizer", Prompt(text=""), {}, "", {})
        message.outputs.add(name="model_info")
        found = await self._ask(message, {})
        return msgspec.json.decode(found["model_info"][0], type=ModelInfo)

    async def control(self, command: Mapping[str, Any], key: str) -> dict[str, Any]:
        """The result of a command of whoever has the admin key: see `delivery.admin_commands`. Raises ApiError."""
        message = service_pb2.ModelInferRequest(model_name="control")
        for name, text in (("command", _json(command)), ("key", key)):
            tensor = message.inputs.add(name=name, datatype="BYTES", shape=[1])
            tensor.contents.bytes_contents.append(text.encode("utf-8", "replace"))
        found = await self._ask(message, {}, _CONTROL_SECONDS)
        return dict(msgspec.json.decode(found["result"][0]))

    async def is_ready(self) -> bool:
        """Whether the server reports the ensemble as ready."""
        request = service_pb2.ModelReadyRequest(name=_ENSEMBLE).SerializeToString()
        try:
            raw = await self._model_ready(request, timeout=5.0)
        except grpc.RpcError:
            return False
        return bool(service_pb2.ModelReadyResponse.FromString(raw).ready)

    async def close(self) -> None:
        await self._channel.close()

    async def _ask(self, message: Any, names: Mapping[str, str], timeout_s: float = _ASK_SECONDS) -> dict[str, Any]:
        try:
            raw = await self._infer(message.SerializeToString(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_client_error(rpc_error(error), names) from None
        response = service_pb2.ModelInferResponse.FromString(raw)
        return {
            output.name: _values(output.datatype, value)
            for output, value in zip(response.outputs, response.raw_output_contents, strict=True)
        }


_RETURNED = {
    "stream": True,
    "return_finish_reason": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
}


def _message(model: str, prompt: Prompt, sampling: Mapping[str, Any], request_id: str, names: Mapping[str, str]) -> Any:
    message = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    texts: dict[str, str] = {}
    if prompt.token_ids is not None:
        _check_ids(prompt.token_ids, names)
        tensor = message.inputs.add(name="prompt_token_ids", datatype="INT32", shape=[1, len(prompt.token_ids)])
        tensor.contents.int_contents.extend(prompt.token_ids)
    elif prompt.messages is not None:
        texts["messages"] = _json(prompt.messages)
    else:
        texts["text_input"] = prompt.text or ""
        sampling = {"apply_chat_template": False, **sampling}
    if prompt.template_kwargs:
        texts["chat_template_kwargs"] = _json(prompt.template_kwargs)
    texts["sampling_parameters"] = _json(sampling)
    if prompt.images:
        tensor = message.inputs.add(name="image_data", datatype="BYTES", shape=[1, len(prompt.images)])
        tensor.contents.bytes_contents.extend(image.data for image in prompt.images)
    try:
        for name, text in texts.items():
            tensor = message.inputs.add(name=name, datatype="BYTES", shape=[1, 1])
            tensor.contents.bytes_contents.append(text.encode())
    except UnicodeEncodeError:
        values = {**sampling, **(prompt.template_kwargs or {}), "messages": prompt.messages, "text_input": prompt.text}
        wrong = next((name for name, value in values.items() if not is_unicode(value)), name)
        name = names.get(wrong, wrong)
        raise invalid(name, f"{name} holds a lone surrogate; allowed: Unicode") from None
    return message


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _check_ids(token_ids: Sequence[int], names: Mapping[str, str]) -> None:
    for token in token_ids:
        if not -(2**31) <= token < 2**31:
            name = names.get("prompt_token_ids", "prompt")
            raise invalid(name, f"{name} has token id {token}; allowed: the model's token ids")


def _values(datatype: str, raw: bytes) -> list[Any]:
    if datatype != "BYTES":
        return list(struct.unpack(f"<{len(raw) // 4}i", raw))
    values, position = [], 0
    while position < len(raw):
        (length,) = struct.unpack_from("<I", raw, position)
        values.append(raw[position + 4 : position + 4 + length])
        position += 4 + length
    return values


def rpc_error(error: Any) -> ClientError:
    """The error for the status that ended a call; Triton reports its models' errors outside streams as statuses."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.CANCELLED:
        return from_status("UNAVAILABLE", "the server ended the call; try again later")
    if code is grpc.StatusCode.INTERNAL:
        return from_message(details)
    return from_status(code.name, details or code.name)
