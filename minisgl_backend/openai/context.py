"""The context of a request: its id, its tenant, and the client's trace headers."""

from __future__ import annotations

import hashlib
import re
import uuid

from fastapi import Request

from minisgl_backend.openai.errors import invalid
from minisgl_backend.openai.requests.base import Named
from minisgl_backend.openai.tracing import RequestTrace
from minisgl_backend.openai.triton import RequestContext
from minisgl_backend.request import MAX_TENANT_NAME

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_TRACE_HEADERS = ("traceparent", "tracestate")


def context_of(request: Request, body: Named) -> RequestContext:
    trace: RequestTrace | None = getattr(request.state, "trace", None)
    if trace is not None:
        request_id = request_id_of(request, body)
        trace.note_model(request_id, body.model)
        return RequestContext(request_id, trace.headers, tenant_of(request, body), trace if trace.is_recorded else None)
    traces = ((name, request.headers.get(name)) for name in _TRACE_HEADERS)
    # gRPC metadata is printable ASCII; any other value would make the call fail here.
    return RequestContext(
        request_id_of(request, body),
        tuple((n, v) for n, v in traces if v and v.isascii() and v.isprintable()),
        tenant_of(request, body),
    )


def tenant_of(request: Request, body: Named) -> str:
    """The request's tenant by the option --tenants; "": unknown.

    A user name that the engine would not accept is replaced by its hash.
    """
    if request.app.state.tenants == "key":
        return str(getattr(request.state, "tenant", ""))
    if request.app.state.tenants != "user":
        return ""
    user = body.safety_identifier or body.user or (body.metadata or {}).get("user_id") or ""
    name = str(user)
    if len(name) <= MAX_TENANT_NAME and name.isascii() and name.isprintable():
        return name
    return "user-" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def request_id_of(request: Request, body: Named | None = None) -> str:
    """The client's own id if it is valid, otherwise a new one."""
    if not hasattr(request.state, "request_id"):
        named = None if body is None else body.request_id or body.rid
        if named is not None and not _REQUEST_ID.fullmatch(named):
            name = "request_id" if body is not None and body.request_id else "rid"
            raise invalid(name, f"{name} is {named[:60]!r}; allowed: 1 to 128 printable ASCII characters")
        given = named or request.headers.get("x-request-id", "")
        request.state.request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    return str(request.state.request_id)
