"""What goes with a request to the server and comes back: its id, and the client's trace headers."""

from __future__ import annotations

import re
import uuid

from fastapi import Request

from minisgl_backend.openai.errors import invalid
from minisgl_backend.openai.requests.base import Sampling
from minisgl_backend.openai.triton import RequestContext

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_TRACE_HEADERS = ("traceparent", "tracestate")


def context_of(request: Request, body: Sampling) -> RequestContext:
    traces = ((name, request.headers.get(name)) for name in _TRACE_HEADERS)
    # gRPC metadata is printable ASCII; anything else would end the call here.
    return RequestContext(
        request_id_of(request, body), tuple((n, v) for n, v in traces if v and v.isascii() and v.isprintable())
    )


def request_id_of(request: Request, body: Sampling | None = None) -> str:
    """The client's own, where it may be one, else one that is made for the request."""
    if not hasattr(request.state, "request_id"):
        named = None if body is None else body.request_id or body.rid
        if named is not None and not _REQUEST_ID.fullmatch(named):
            name = "request_id" if body is not None and body.request_id else "rid"
            raise invalid(name, f"{name} is {named[:60]!r}; allowed: 1 to 128 printable ASCII characters")
        given = named or request.headers.get("x-request-id", "")
        request.state.request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    return str(request.state.request_id)
