"""/v1/files: the input and output of batches."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.datastructures import UploadFile
from starlette.responses import FileResponse

from minisgl_backend.openai.encoding import json_response
from minisgl_backend.openai.endpoint import Endpoint
from minisgl_backend.openai.errors import ApiError, invalid
from minisgl_backend.openai.paging import page
from minisgl_backend.openai.requests.base import is_unicode
from minisgl_backend.openai.requests.batches import MAX_LIFETIME, MIN_LIFETIME
from minisgl_backend.openai.storage import StorageRoute

PATH = "/v1/files"
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"  # form fields
_RANGE = re.compile(r"bytes=(?:([0-9]{1,18})-([0-9]{0,18})|-[0-9]{1,18})")
_PURPOSES = ("batch", "vision", "user_data")
_MAX_LISTED = 10_000


def add_routes(app: FastAPI, endpoint: Endpoint) -> None:
    files = endpoint.files
    router = APIRouter(route_class=StorageRoute)

    @router.post(PATH)
    async def upload(request: Request) -> Response:
        length = request.headers.get("content-length", "")
        with files.expect(int(length[:18]) if length.isdecimal() else None):
            await asyncio.to_thread(files.check_room)
            file, purpose, lifetime = await _form(request)
        size = file.size or 0
        if not size:
            raise invalid("file", "file is empty; allowed: at least one line")
        name = file.filename or "upload.jsonl"
        if not is_unicode(name):
            raise invalid("file", "file has a name that is no Unicode; allowed: Unicode")
        return json_response(await asyncio.to_thread(files.add, file.file, size, name, purpose, lifetime))

    @router.get(PATH)
    async def listed(request: Request) -> Response:
        purpose = request.query_params.get("purpose")
        found = await asyncio.to_thread(files.all)
        found = [file for file in found if purpose in (None, file["purpose"])]
        return json_response(page(found, request, max_limit=_MAX_LISTED, default=_MAX_LISTED))

    @router.get(PATH + "/{file_id}")
    async def find(file_id: str) -> Response:
        return json_response(files.get(file_id))

    @router.get(PATH + "/{file_id}/content")
    async def content(request: Request, file_id: str) -> Response:
        _settle_range(request, files.get(file_id)["bytes"])
        return FileResponse(files.data(file_id), media_type="application/octet-stream")

    @router.delete(PATH + "/{file_id}")
    async def delete(file_id: str) -> Response:
        files.get(file_id)
        await asyncio.to_thread(files.delete, file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    app.include_router(router)


async def _form(request: Request) -> tuple[UploadFile, str, int | None]:
    """(file, purpose, seconds until it expires)."""
    try:
        form = await request.form(max_files=1, max_fields=8)
    except AssertionError:  # how Starlette reports the missing package
        raise ApiError(
            501, "uploads need the package python-multipart: pip install 'minisgl-backend[openai]'"
        ) from None
    unknown = set(form) - {"file", "purpose", _ANCHOR, _SECONDS}
    if unknown:
        raise invalid(min(unknown), f"{min(unknown)[:60]} is unknown; allowed: file, purpose, {_ANCHOR}, {_SECONDS}")
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        raise invalid("file", "file is missing; allowed: a file in multipart/form-data")
    if purpose not in _PURPOSES:
        raise invalid("purpose", f"purpose is {str(purpose)[:60]!r}; allowed: {', '.join(_PURPOSES)}")
    return file, str(purpose), _lifetime(form.get(_ANCHOR), form.get(_SECONDS))


def _lifetime(anchor: Any, seconds: Any) -> int | None:
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise invalid(_ANCHOR, f"{_ANCHOR} is {str(anchor)[:60]!r}; allowed: created_at")
    if not isinstance(seconds, str) or not (seconds.isascii() and seconds.isdecimal() and len(seconds) < 10):
        raise invalid(_SECONDS, f"{_SECONDS} is {str(seconds)[:60]!r}; allowed: {MIN_LIFETIME} to {MAX_LIFETIME}")
    if not MIN_LIFETIME <= int(seconds) <= MAX_LIFETIME:
        raise invalid(_SECONDS, f"{_SECONDS} is {seconds}; allowed: {MIN_LIFETIME} to {MAX_LIFETIME}")
    return int(seconds)


def _settle_range(request: Request, size: int) -> None:
    """Raises ApiError for a range that begins after the end of a file of `size` bytes. An invalid range, or several of
    them, is ignored, so that the whole file is returned (RFC 9110, section 14.2)."""
    text = request.headers.get("range")
    if text is None:
        return
    found = _RANGE.fullmatch(text)
    begin, end = (0, size) if found is None else (int(found[1] or 0), int(found[2] or size))
    if begin >= size:
        raise ApiError(416, f"Range is {text[:60]!r}; allowed: within the {size} bytes of the file", param="Range")
    if found is None or (found[1] and end < begin):
        request.scope["headers"] = [one for one in request.scope["headers"] if one[0] != b"range"]
