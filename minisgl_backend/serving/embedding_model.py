"""The Triton model `embedding`: texts in, vectors or scores out, one response per request.

The engine is decoupled, and so is every ensemble with it; HTTP's `infer` does not serve decoupled models. This model is
not decoupled: it calls tokenizer and engine itself, on threads, so that the engine batches the requests of many
clients.
"""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from minisgl_backend.environment import Environment
from minisgl_backend.errors import ConfigError, InvalidRequestError, MinisglError
from minisgl_backend.ipc.wire import Codec, EngineRequest, OutputOptions
from minisgl_backend.process.spawn import log_to_stderr
from minisgl_backend.remote_errors import from_message
from minisgl_backend.request import NO_SAMPLING
from minisgl_backend.serving.fields import coerce
from minisgl_backend.serving.responses import error_response

MAX_CONCURRENT_REQUESTS = 32  # requests; the Python backend has that many threads that wait for calls between models
POLL_EVERY_S = 0.1  # for clients that have left

_LOGGER = logging.getLogger(__name__)
_CODES = {"INVALID_ARGUMENT": "INVALID_ARG", "DEADLINE_EXCEEDED": "CANCELLED"}
# This model's inputs -> fields of its pooling_request, with their kinds.
_FIELDS = {
    "instruction": ("instruction", "str"),
    "dimensions": ("dimensions", "int"),
    "normalize": ("normalize", "bool"),
    "priority": ("priority", "int"),
}


class _LeftError(MinisglError):
    """The client has left."""


class _Failed(MinisglError):
    """Another model's error, which ends the request unchanged. Its code is not passed on, so it is read from the
    text."""

    def __init__(self, error: Any) -> None:
        super().__init__(error.message())
        status = from_message(error.message()).status or "INTERNAL"
        code = _CODES.get(status, status)
        self.code = code if hasattr(pb_utils.TritonError, code) else "INTERNAL"


class _Call:
    """One request. Once answered, its sender is never asked for cancellation: tritonserver 2.51 would crash."""

    def __init__(self, request: Any) -> None:
        self.inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        self.parameters = json.loads(request.parameters() or "{}")
        self.timeout = request.timeout()
        # An id of its own: a stop by this id must not hit another request.
        self.request_id = f"{request.request_id() or 'embedding'}#{uuid.uuid4().hex[:12]}"
        self._sender = request.get_response_sender()
        self._lock = threading.Lock()
        self._ended = False
        self.is_asked = False  # whether the request was sent to the engine, or is being sent

    def answer(self, response: Any) -> None:
        with self._lock:
            self._ended = True
            self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def has_left(self) -> bool:
        with self._lock:
            return not self._ended and bool(self._sender.is_cancelled())

    def check(self) -> None:
        """Raises _LeftError if the client has left, so that no further step begins for it."""
        if self.has_left():
            raise _LeftError


class TritonPythonModel:
    """Any number of instances; one is enough."""

    def initialize(self, args: dict[str, str]) -> None:
        """Starts its threads."""
        try:
            log_to_stderr("embedding", Environment.read().log_level)
        except ConfigError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self._open: set[_Call] = set()
        self._stopping = threading.Event()
        self._threads = ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS, thread_name_prefix="embedding")
        self._watcher = threading.Thread(target=self._watch, name="watcher", daemon=True)
        self._watcher.start()

    def execute(self, requests: list[Any]) -> None:
        """The responses are sent by the threads."""
        for request in requests:
            call = _Call(request)
            self._open.add(call)
            self._threads.submit(self._serve, call)

    def finalize(self) -> None:
        """Waits for running requests."""
        self._stopping.set()
        self._threads.shutdown(wait=True)
        self._watcher.join(2.0)

    def _serve(self, call: _Call) -> None:
        try:
            response = pb_utils.InferenceResponse(self._tensors(call))
        except _LeftError:
            response = error_response("CANCELLED", "the client has left")
        except _Failed as error:
            response = error_response(error.code, str(error))
        except InvalidRequestError as error:
            response = error_response("INVALID_ARG", str(error))
        except Exception as error:
            _LOGGER.exception("request %r failed", call.request_id)
            response = error_response("INTERNAL", f"the request could not be answered ({type(error).__name__})")
        self._open.discard(call)
        call.answer(response)

    def _tensors(self, call: _Call) -> list[Any]:
        call.check()
        packed = call.inputs.get("pooling_request")
        text = _text("pooling_request", packed) if packed is not None else json.dumps(_pooling_request(call.inputs))
        asked = np.array([[text.encode()]], dtype=object)
        prompts = _run(
            pb_utils.InferenceRequest(
                model_name="tokenizer",
                request_id=call.request_id,
                requested_output_names=["input_ids", "spec"],
                inputs=[pb_utils.Tensor("pooling_request", asked)],
                timeout=call.timeout or call.parameters.get("timeout", 0),
            ).exec()
        )
        call.check()
        call.is_asked = True
        found = self._ask_engine(call.request_id, prompts["input_ids"], prompts["spec"])
        # Clients such as LiteLLM read every output as embeddings: other outputs need a pooling_request.
        names = found if packed is not None else [name for name in ("embedding", "score") if name in found]
        return [pb_utils.Tensor(name, found[name][0]) for name in names]

    def _ask_engine(self, request_id: str, input_ids: Any, spec: Any) -> dict[str, Any]:
        responses: Iterator[Any] = pb_utils.InferenceRequest(
            model_name="engine",
            request_id=request_id,
            requested_output_names=["embedding", "score", "prompt_lengths", "num_cached_tokens"],
            inputs=[pb_utils.Tensor("input_ids", input_ids), pb_utils.Tensor("spec", spec)],
        ).exec(decoupled=True)
        found: dict[str, Any] = {}
        failed: _Failed | None = None
        for response in responses:  # to the end, so that nothing of the call is left
            try:
                found.update(_run(response))
            except _Failed as error:
                failed = error
        if failed is not None:
            raise failed
        return found

    def _watch(self) -> None:
        """Passes cancellations on to the engine, since Triton does not report them to models called by another
        model."""
        while not self._stopping.wait(POLL_EVERY_S):
            for call in [one for one in set(self._open) if one.is_asked]:
                try:
                    if call.has_left():  # repeated until it ends: the engine may not have it yet
                        self._stop(call.request_id)
                except Exception:  # the watcher must go on
                    _LOGGER.exception("request %r cannot be stopped", call.request_id)

    def _stop(self, request_id: str) -> None:
        stop = EngineRequest(params=NO_SAMPLING, options=OutputOptions(), request_id=request_id, stop=True)
        spec = Codec().pack(stop).reshape(1, -1).astype(np.uint8, copy=False)
        for _ in pb_utils.InferenceRequest(
            model_name="engine",
            requested_output_names=["embedding"],
            inputs=[pb_utils.Tensor("input_ids", np.zeros((1, 1), dtype=np.int32)), pb_utils.Tensor("spec", spec)],
        ).exec(decoupled=True):
            pass


def _pooling_request(inputs: dict[str, Any]) -> dict[str, Any]:
    """The separate inputs as a pooling_request. Raises InvalidRequestError."""
    fields = {
        field: coerce(name, kind, inputs[name].reshape(-1).tolist()[0])
        for name, (field, kind) in _FIELDS.items()
        if name in inputs and inputs[name].size
    }
    if "input_ids" in inputs and "input_text" not in inputs:
        return {**fields, "token_ids": [inputs["input_ids"].reshape(-1).tolist()]}
    if "input_text" not in inputs:
        raise InvalidRequestError("input_text is missing; allowed: texts, or input_ids")
    texts = [coerce("input_text", "str", text) for text in inputs["input_text"].reshape(-1).tolist()]
    if "query" not in inputs:
        return {**fields, "texts": texts}
    query = coerce("query", "str", inputs["query"].reshape(-1).tolist()[0])
    return {**fields, "queries": [query], "documents": texts}


def _text(name: str, array: Any) -> str:
    return str(coerce(name, "str", array.reshape(-1).tolist()[0]))


def _run(response: Any) -> dict[str, Any]:
    """The tensors of a response by name, as arrays. Raises _Failed."""
    if response.has_error():
        raise _Failed(response.error())
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
