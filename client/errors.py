"""The errors of a request, by type. They are `minisgl_backend.remote_errors`, which the endpoint shares."""

from __future__ import annotations

from minisgl_backend.remote_errors import (
    NO_CHAT_TEMPLATE,
    Cancelled,
    ClientError,
    InvalidRequest,
    ServerError,
    TimedOut,
    Unavailable,
    cancelled_here,
    from_http,
    from_message,
    from_status,
    timed_out,
)

__all__ = [
    "NO_CHAT_TEMPLATE",
    "Cancelled",
    "ClientError",
    "InvalidRequest",
    "ServerError",
    "TimedOut",
    "Unavailable",
    "cancelled_here",
    "from_http",
    "from_message",
    "from_status",
    "timed_out",
]
