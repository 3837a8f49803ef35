"""What a server says of a failed request, as types: for the client and for the OpenAI endpoint, which is one too."""

from __future__ import annotations

import re

_ENSEMBLE_PREFIX = re.compile(r"^(?:in ensemble '[^']*', )+")
_UNAVAILABLE_WORDS = r"""unavailable|unhealthy|not\ healthy|not\ ready|no\ available\ versions|queue\ (?:is\ )?full
    |try\ again|engine\ is\ not\ running|(?:engine|detokenizer)\ died|shutting\ down|was\ restarted|at\ the\ moment"""
# Messages were sent to a model that can only go on with a text.
NO_CHAT_TEMPLATE = "this model has no chat template"
# What this project's servers say of a wrong request.
_INVALID_WORDS = r"""is\ not\ served|is\ not\ valid|is\ longer\ than|takes\ prompts\ of\ at\ most
    |chat\ template|guided_decoding_guide|lone\ surrogate|could\ not\ be\ read|send\ requests\ to"""
# The same where it repeats what the client wrote, which may be any words, those of other errors among them.
_REPEATING_WORDS = r"""allowed:|which\ is\ not\ valid\ JSON|the\ chat\ template\ refuses\ them
    |guided_decoding_guide\ (?:cannot\ be\ compiled|is\ no\ JSON\ schema)"""
# Wording of an error without a status -> the status it most likely had. The first match counts.
_WORDINGS = (
    (re.compile(rf"(?:{_REPEATING_WORDS})", re.VERBOSE), "INVALID_ARGUMENT"),
    (re.compile(r"\btimeout has passed\b"), "DEADLINE_EXCEEDED"),
    (re.compile(r"\bcancell?ed\b", re.IGNORECASE), "CANCELLED"),
    (re.compile(rf"\b(?:{_UNAVAILABLE_WORDS})\b", re.IGNORECASE | re.VERBOSE), "UNAVAILABLE"),
    (re.compile(r"\bunknown model\b", re.IGNORECASE), "NOT_FOUND"),
    (re.compile(rf"(?:{_INVALID_WORDS})", re.VERBOSE), "INVALID_ARGUMENT"),
    # Triton's own checks of a request, made before any model sees it.
    (re.compile(r"\bunexpected (?:inference input|shape|datatype)\b|\bexpected \d+ inputs\b"), "INVALID_ARGUMENT"),
)


class ClientError(Exception):
    """Base of every error that a request to a server may raise.

    `message` is the server's own text without Triton's ensemble prefix; `status` is the name of the gRPC status
    ("INVALID_ARGUMENT", ...), None where it is not known; `request_id` is the id that the request carried.
    """

    def __init__(self, message: str, *, status: str | None = None, request_id: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.request_id = request_id


class InvalidRequest(ClientError):
    """The request holds a value that is not allowed, or names an unknown model. Sending it again fails again."""


class Unavailable(ClientError):
    """The server cannot be reached, is not ready, or has no room now. The same request may succeed later."""


class Cancelled(ClientError):
    """The request was cancelled, here or by the server, before the answer was complete."""


class TimedOut(ClientError):
    """The answer was not complete within the request's `timeout`, or a limit of the server or of a proxy before it."""


class ServerError(ClientError):
    """The server failed in a way that is not the request's fault."""


_BY_STATUS: dict[str, type[ClientError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "NOT_FOUND": InvalidRequest,
    "ALREADY_EXISTS": InvalidRequest,
    "OUT_OF_RANGE": InvalidRequest,
    "UNAUTHENTICATED": InvalidRequest,
    "PERMISSION_DENIED": InvalidRequest,
    "UNAVAILABLE": Unavailable,
    "RESOURCE_EXHAUSTED": Unavailable,
    "CANCELLED": Cancelled,
    "DEADLINE_EXCEEDED": TimedOut,
}
_STATUS_BY_HTTP: dict[int, str] = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    502: "UNAVAILABLE",  # a proxy does not reach the server
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def from_status(status: str, message: str, request_id: str = "") -> ClientError:
    """The error for a gRPC status name; one that is not the client's to mend becomes a ServerError."""
    error_type = _BY_STATUS.get(status, ServerError)
    return error_type(_clean(message), status=status, request_id=request_id)


def from_http(code: int, message: str, request_id: str = "") -> ClientError:
    """The error for an HTTP status code of 400 or above."""
    status = _STATUS_BY_HTTP.get(code, "INVALID_ARGUMENT" if code < 500 else "INTERNAL")
    # Triton says 400 whatever the status of a model's response was, and 404 of a model that is being reloaded.
    if code in (400, 404):
        status = _guess_status(message) or status
    return from_status(status, message, request_id)


def from_message(message: str, request_id: str = "") -> ClientError:
    """The error for text that came inside a stream, where Triton gives no status: its wording decides."""
    status = _guess_status(message)
    if status is None:
        return ServerError(_clean(message), request_id=request_id)
    return from_status(status, message, request_id)


def cancelled_here(request_id: str) -> Cancelled:
    """The error for a request that this side gave up."""
    return Cancelled("cancelled by the client", status="CANCELLED", request_id=request_id)


def timed_out(timeout: float | None, request_id: str) -> TimedOut:
    """The error for a request whose deadline passed; `timeout` in seconds."""
    limit = "its deadline" if timeout is None else f"{timeout:g} s"
    return TimedOut(f"no complete answer within {limit}", status="DEADLINE_EXCEEDED", request_id=request_id)


def _guess_status(message: str) -> str | None:
    for pattern, status in _WORDINGS:
        if pattern.search(message):
            return status
    return None


def _clean(message: str) -> str:
    return _ENSEMBLE_PREFIX.sub("", message.strip())
