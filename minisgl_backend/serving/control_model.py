"""The Triton model `control`: commands of whoever has the admin key. A server has it only if it has such a key.

The key is compared by the engine's front, which commands reach only through it, whoever calls the engine.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from minisgl_backend.environment import Environment, admin_key
from minisgl_backend.errors import CapacityError, ConfigError, InvalidRequestError, MinisglError, status_of
from minisgl_backend.ipc.wire import Codec, EngineRequest, OutputOptions
from minisgl_backend.process.spawn import log_to_stderr
from minisgl_backend.request import NO_SAMPLING
from minisgl_backend.serving.fields import coerce
from minisgl_backend.serving.responses import error_response

MOST_BYTES = 65536  # of a command, or a key
MOST_CALLS = 32  # at a time


class TritonPythonModel:
    """One instance."""

    def initialize(self, args: dict[str, str]) -> None:
        """Raises unless there is an admin key."""
        try:
            log_to_stderr("control", Environment.read().log_level)
        except ConfigError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        if not admin_key():
            raise pb_utils.TritonModelException("the model control needs MINISGL_ADMIN_KEY, which is unset or empty")
        self._threads = ThreadPoolExecutor(MOST_CALLS, thread_name_prefix="control")
        self._room = threading.BoundedSemaphore(MOST_CALLS)

    def execute(self, requests: list[Any]) -> None:
        """The responses are sent by the threads."""
        for request in requests:
            sender = request.get_response_sender()
            if self._room.acquire(blocking=False):
                self._threads.submit(self._answer, sender, request)
            else:
                _send(sender, _error(CapacityError("too many commands wait; try again later")))

    def finalize(self) -> None:
        """Waits for running commands."""
        self._threads.shutdown(wait=True)

    def _answer(self, sender: Any, request: Any) -> None:
        try:
            response = _call(_text(request, "command"), _text(request, "key"))
        except MinisglError as error:
            response = _error(error)
        except Exception as error:  # it ends this command alone
            response = error_response("INTERNAL", f"the command failed ({type(error).__name__})")
        self._room.release()
        _send(sender, response)


def _call(command: str, key: str) -> Any:
    asked = EngineRequest(params=NO_SAMPLING, options=OutputOptions(), command=command, key=key)
    spec = Codec().pack(asked).reshape(1, -1).astype(np.uint8, copy=False)
    found: Any = None
    for response in pb_utils.InferenceRequest(
        model_name="engine",
        requested_output_names=["chunk"],
        inputs=[pb_utils.Tensor("input_ids", np.zeros((1, 1), dtype=np.int32)), pb_utils.Tensor("spec", spec)],
    ).exec(decoupled=True):  # to the end, so that nothing of the call is left
        if response.has_error():
            found = error_response("UNAVAILABLE", response.error().message())
        elif (chunk := pb_utils.get_output_tensor_by_name(response, "chunk")) is not None:
            result = np.array([chunk.as_numpy().tobytes()], dtype=object)
            found = pb_utils.InferenceResponse([pb_utils.Tensor("result", result)])
    return found or error_response("UNAVAILABLE", "the engine gave no answer")


def _text(request: Any, name: str) -> str:
    """Raises InvalidRequestError."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    values = [] if tensor is None else tensor.as_numpy().reshape(-1).tolist()
    if len(values) != 1:
        raise InvalidRequestError(f"{name} has {len(values)} values; allowed: one text")
    text = str(coerce(name, "str", values[0]))
    if len(text) > MOST_BYTES:
        raise InvalidRequestError(f"{name} has {len(text)} characters; allowed: up to {MOST_BYTES}")
    return text


def _error(error: MinisglError) -> Any:
    return error_response(status_of(error), str(error))


def _send(sender: Any, response: Any) -> None:
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
