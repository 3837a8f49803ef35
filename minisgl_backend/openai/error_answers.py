"""Error responses, in the format of the API that the request belongs to."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Collection
from typing import get_args, get_type_hints

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from minisgl_backend.openai.context import request_id_of
from minisgl_backend.openai.encoding import json_response
from minisgl_backend.openai.errors import ApiError, ClientLeft, invalid, shaped
from minisgl_backend.openai.limits import TOO_LARGE
from minisgl_backend.openai.storage import storage_error
from minisgl_backend.openai.validation import from_validation

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that has left; only logged


def add_error_answers(app: FastAPI) -> None:
    app.add_exception_handler(ApiError, _answer_error)
    app.add_exception_handler(ClientLeft, _answer_client_left)
    app.add_exception_handler(RequestValidationError, _answer_wrong_body)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(RecursionError, _answer_nested_body)
    app.add_exception_handler(sqlite3.Error, _answer_storage_error)
    app.add_exception_handler(Exception, _answer_unforeseen)


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request_id = request_id_of(request)
    headers = {**error.headers, "x-request-id": request_id}
    return json_response(shaped(error, request.url.path, request_id), error.status, headers)


async def _answer_client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _answer_unforeseen(request: Request, error: Exception) -> Response:
    """A bug, which is logged."""
    return await _answer_error(request, ApiError(500, f"the request could not be answered ({type(error).__name__})"))


async def _answer_storage_error(request: Request, error: Exception) -> Response:
    """Of the store of responses, the only one that is read and written by SQLite."""
    assert isinstance(error, sqlite3.Error)
    log.error("%s %s: %s", request.method, request.url.path, error)
    return await _answer_error(request, storage_error("kept responses cannot be used", error))


async def _answer_wrong_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return await _answer_error(request, from_validation(error.errors(), _fields_of(request)))


def _fields_of(request: Request) -> Collection[str] | None:
    """The fields of the path's own requests; None: it has none."""
    body = get_type_hints(request.scope["endpoint"]).get("body")
    kinds = () if body is None else get_args(body) or (body,)  # a path may take bodies of several kinds
    return {name for kind in kinds for name in kind.model_fields} or None


async def _answer_nested_body(request: Request, error: Exception) -> Response:
    """JSON that was read a few levels below the limit cannot be written from deeper in the call stack."""
    log.warning("a body was nested too deeply, or the code calls itself without an end", exc_info=error)
    return await _answer_error(request, invalid("body", "the body is nested too deeply; allowed: fewer levels"))


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 404:
        message = f"there is no {request.url.path} here; /openapi.json lists all paths"
    if error.status_code == 400:
        return await _answer_error(request, invalid("body", message))
    code = TOO_LARGE if error.status_code == 413 else None
    answer = await _answer_error(request, ApiError(error.status_code, message, code=code))
    answer.headers.update(error.headers or {})
    return answer
