"""What the models of this project say to Triton: errors, and the responses of a request that has a sender."""

from __future__ import annotations

import threading
from typing import Any

import triton_python_backend_utils as pb_utils


def error_response(status: str, message: str) -> Any:
    """`status`: one of Triton's codes, by its name in TritonError."""
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, getattr(pb_utils.TritonError, status)))


class ResponseSender:
    """The responses of one request, sent by one thread; any thread may call `is_cancelled`.

    tritonserver 2.51 crashes (SIGSEGV in TRITONBACKEND_ResponseFactoryIsCancelled) when asked about a request that has
    had its last response, so the two calls never overlap.
    """

    __slots__ = ("_ended", "_lock", "_sender")

    def __init__(self, response_sender: Any) -> None:
        self._sender = response_sender
        self._lock = threading.Lock()
        self._ended = False

    def end(self, response: Any = None) -> None:
        """Ends the request, with its last response or without any."""
        with self._lock:
            self._ended = True
            self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def fail(self, status: str, message: str) -> None:
        self.end(error_response(status, message))

    def is_cancelled(self) -> bool:
        with self._lock:
            return not self._ended and bool(self._sender.is_cancelled())
