"""Errors in the formats of the APIs, OpenAI's, and Anthropic's below /v1/messages; the conversion of the server's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from minisgl_backend.openai.image_errors import image_code
from minisgl_backend.remote_errors import Cancelled, ClientError, InvalidRequest, TimedOut, Unavailable
from minisgl_backend.remote_errors import from_message as client_error_of

_FIELD = re.compile(r"^(?:request parameter |input |sampling_parameters )?'?([A-Za-z_]\w*)")
_FULL = re.compile(r"\b(?:requests are waiting|wait for their grammars|wait for their turn)\b")
_TOO_LONG = re.compile(r"takes prompts of at most|cannot take so long a prompt")
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "invalid_request_error"}
_RETRY_SECONDS = 1
_ANTHROPIC = "/v1/messages"  # and below it
# Status -> Anthropic's error type; others are invalid_request_error below 500 and api_error above.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An error response. `param` names the request's field, `code` is OpenAI's error code if there is one."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, kind: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        # A quoted part of a request may not be valid Unicode.
        self.message = message.encode("utf-8", "backslashreplace").decode()
        self.param = None if param is None else param.encode("utf-8", "backslashreplace").decode()
        self.code = code
        self.kind = kind or _TYPES.get(status) or ("rate_limit_error" if status == 429 else "server_error")
        if 400 <= status < 500 and status not in (401, 429):
            self.kind = kind or "invalid_request_error"

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """The same error for a client that uses other field names."""
        if self.param is None or self.param not in names:
            return self
        name, message = names[self.param], self.message
        if message.startswith(self.param):
            message = name + message[len(self.param) :]
        return ApiError(self.status, message, param=name, code=self.code, kind=self.kind)

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 429:
            return {"retry-after": str(_RETRY_SECONDS)}
        return {"www-authenticate": "Bearer"} if self.status == 401 else {}


class ClientLeft(Exception):
    """The client has closed its connection, so there is no response."""


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A request that can never be served."""
    return ApiError(400, message, param=param, code=code)


def anthropic_error(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """The error in Anthropic's format."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}


def shaped(error: ApiError, path: str, request_id: str | None = None) -> dict[str, Any]:
    """The body of an error in the format of the API that the path belongs to."""
    is_anthropic = path == _ANTHROPIC or path.startswith(f"{_ANTHROPIC}/")
    return anthropic_error(error, request_id) if is_anthropic else error.body


def from_message(message: str, names: Mapping[str, str]) -> ApiError:
    """The error for an error message inside a stream. `names`: the server's name of a field -> the client's."""
    return from_client_error(client_error_of(message), names)


def from_client_error(error: ClientError, names: Mapping[str, str]) -> ApiError:
    """The error for an exception of this project's client library."""
    if isinstance(error, InvalidRequest):
        message, param = _in_the_clients_words(error.message, names)
        code = "context_length_exceeded" if _TOO_LONG.search(message) else image_code(message)
        return invalid(param, message, code)
    if isinstance(error, Unavailable):
        if _FULL.search(error.message):
            return ApiError(429, error.message, code="queue_full")
        return ApiError(503, error.message, code="unavailable", kind="server_error")
    if isinstance(error, TimedOut):
        return ApiError(408, error.message, code="timeout", kind="timeout_error")
    if isinstance(error, Cancelled):
        return ApiError(503, error.message, code="cancelled", kind="server_error")
    return ApiError(500, error.message, kind="server_error")


def _in_the_clients_words(message: str, names: Mapping[str, str]) -> tuple[str, str | None]:
    found = _FIELD.match(message)
    if found is None:
        return message, None
    name = found[1]
    if name not in names:
        behind = message[found.end() : found.end() + 4]
        return message, name if "_" in name or behind in (" is ", " has") or behind[:1] == "[" else None
    return message[: found.start(1)] + names[name] + message[found.end(1) :], names[name]
