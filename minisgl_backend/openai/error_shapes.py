"""The error formats of the APIs: OpenAI's, and Anthropic's below /v1/messages."""

from __future__ import annotations

from typing import Any

from minisgl_backend.openai.errors import ApiError

_ANTHROPIC = "/v1/messages"  # and below it
# Status -> Anthropic's error type; others are invalid_request_error below 500 and api_error above.
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """The error in Anthropic's format."""
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}


def shaped(error: ApiError, path: str, request_id: str | None = None) -> dict[str, Any]:
    """The body of an error in the format of the API that the path belongs to."""
    is_anthropic = path == _ANTHROPIC or path.startswith(f"{_ANTHROPIC}/")
    return anthropic_error(error, request_id) if is_anthropic else error.body
