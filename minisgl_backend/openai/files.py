"""/v1/files: the input and output of batches, in a folder that outlives the server and is shared by all workers.

Each file is stored as two: ID.data with its bytes, and ID.json with its metadata, written last. For clients, a file
without metadata does not exist yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import json
import logging
import math
import os
import re
import shutil
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.datastructures import UploadFile
from starlette.responses import FileResponse

from minisgl_backend.openai.errors import ApiError, invalid
from minisgl_backend.openai.requests.base import is_unicode
from minisgl_backend.openai.requests.batches import MAX_LIFETIME, MIN_LIFETIME
from minisgl_backend.openai.sse import encode
from minisgl_backend.openai.storage import StorageRoute, storage_error

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 200 << 20  # per upload, OpenAI's own limit
PATH = "/v1/files"
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"  # form fields
_ID = re.compile(r"file-[0-9a-f]{32}")
_RANGE = re.compile(r"bytes=(?:([0-9]{1,18})-([0-9]{0,18})|-[0-9]{1,18})")
_PURPOSES = ("batch",)
_TOLD = frozenset(("id", "bytes", "created_at", "filename", "purpose"))
_MOST_LISTED = 10_000
_COPY_BYTES = 1 << 20
_ORPHAN_SECONDS = 3600.0  # since the last write to a file that clients do not see


class FileStore:
    """Stores up to `most_bytes` of files. Methods that access the disk may take long and belong on another thread."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        """`folder`: created with the first file."""
        self._folder = folder
        self._most_bytes = most_bytes
        self._expected = 0  # bytes of uploads in progress

    def add(self, source: IO[bytes], size: int, name: str, purpose: str, lifetime: int | None = None) -> dict[str, Any]:
        """`lifetime`: seconds until the file is removed; None: it stays. Raises ApiError if there is no room."""
        self.check_room(size)
        with self._new("the file") as file_id:
            with self.data(file_id).open("wb") as target:
                shutil.copyfileobj(source, target, _COPY_BYTES)
            return self.publish(file_id, name, purpose, lifetime)

    def add_unseen(self, lines: Sequence[bytes]) -> str:
        """A file that clients do not see. Returns its id. Raises ApiError if there is no room."""
        self.check_room(sum(map(len, lines)))
        with self._new("the requests") as file_id, self.data(file_id).open("wb") as target:
            target.writelines(lines)
        return file_id

    @contextlib.contextmanager
    def _new(self, what: str) -> Iterator[str]:
        """The id of a file to be written, of which nothing stays if that fails: then raises ApiError."""
        file_id = self.new_id()
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            yield file_id
        except OSError as error:
            with contextlib.suppress(OSError):
                self.delete(file_id)
            log.error("%s cannot be kept: %s", what, error)
            raise storage_error(f"{what} cannot be kept", error) from None

    def check_room(self, size: int = 0) -> None:
        """Raises ApiError if `size` more bytes would exceed the limit."""
        used = sum(map(_size, paths_in(self._folder, "file-*"))) + self._expected
        if used + size > self._most_bytes and (gone := self.remove_expired()):
            used -= gone
        if used + size > self._most_bytes:
            allowed = f"{self._most_bytes} in all (--max-files-bytes); delete files that are not needed"
            raise ApiError(
                413, f"files of {used} bytes are kept, and {size} more; allowed: {allowed}", code="storage_full"
            )

    @contextlib.contextmanager
    def expect(self, size: int | None) -> Iterator[None]:
        """Inside, an upload of `size` bytes (None: unknown) is received into its own temporary file."""
        size = min(MAX_FILE_BYTES, self._most_bytes // 4) if size is None else size
        self._expected += size
        try:
            yield
        finally:
            self._expected -= size

    def remove_orphans(self, written: Collection[str]) -> None:
        """Removes remains of interrupted uploads and batches. `written`: ids of files still being written."""
        for path in paths_in(self._folder, "file-*.data"):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                is_old = time.time() - path.stat().st_mtime > _ORPHAN_SECONDS
                if is_old and path.stem not in written and not path.with_suffix(".json").exists():
                    path.unlink()
                    log.warning("%s was never finished, and is removed", path)

    def remove_expired(self) -> int:
        """Returns the number of bytes removed."""
        gone = 0
        for path in paths_in(self._folder, "file-*.json"):
            if (told := self._read(path)) and _has_expired(told):
                gone += _size(self.data(told["id"])) + _size(path)
                self.delete(told["id"])
        return gone

    def publish(self, file_id: str, name: str, purpose: str, lifetime: int | None = None) -> dict[str, Any]:
        """Makes a completely written file visible to clients; doing it again changes nothing."""
        if (known := self.find(file_id)) is not None:
            return known
        now = int(time.time())
        told = {
            "id": file_id,
            "object": "file",
            "bytes": self.data(file_id).stat().st_size,
            "created_at": now,
            "expires_at": None if lifetime is None else now + lifetime,
            "filename": name,
            "purpose": purpose,
            "status": "processed",
            "status_details": None,
        }
        write_json(self._folder / f"{file_id}.json", told)
        return told

    def find(self, file_id: str) -> dict[str, Any] | None:
        return self._metadata(self._folder / f"{file_id}.json") if _ID.fullmatch(file_id) else None

    def get(self, file_id: str, param: str = "file_id", status: int = 404) -> dict[str, Any]:
        """Raises ApiError if there is none."""
        found = self.find(file_id)
        if found is None:
            raise ApiError(status, f"{param} is {file_id[:100]!r}, which is no file here", param=param)
        return found

    def data(self, file_id: str) -> Path:
        return self._folder / f"{file_id}.data"

    def delete(self, file_id: str) -> None:
        (self._folder / f"{file_id}.json").unlink(missing_ok=True)
        self.data(file_id).unlink(missing_ok=True)

    def all(self) -> list[dict[str, Any]]:
        found = [self._metadata(path) for path in paths_in(self._folder, "file-*.json")]
        return sorted(filter(None, found), key=lambda file: (file["created_at"], file["id"]))

    def _metadata(self, path: Path) -> dict[str, Any] | None:
        """A file's metadata; None if the file does not exist, has expired, or its metadata is damaged."""
        found = self._read(path)
        return None if found is None or _has_expired(found) else found

    @staticmethod
    def _read(path: Path) -> dict[str, Any] | None:
        try:
            found = read_json(path)
        except ValueError:
            found = {}
        if found is None or (isinstance(found, dict) and found.keys() >= _TOLD):
            return found
        log.warning("%s is damaged: the file is left out until it is written anew", path)
        return None

    @staticmethod
    def new_id() -> str:
        return f"file-{uuid.uuid4().hex}"


def _has_expired(told: dict[str, Any]) -> bool:
    return (told.get("expires_at") or math.inf) <= time.time()


def _size(path: Path) -> int:
    """In bytes; 0 if it was just deleted."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def paths_in(folder: Path, pattern: str) -> list[Path]:
    """What is in a folder, which may not be there yet. Raises OSError where pathlib's glob finds nothing in silence."""
    try:
        return [folder / name for name in os.listdir(folder) if fnmatch.fnmatch(name, pattern)]
    except FileNotFoundError:
        return []


def read_json(path: Path) -> dict[str, Any] | None:
    """None if the file does not exist."""
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return found


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Readers see either the old text or the new one, even after a crash."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(encode(value))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):  # what was written of it takes space from those that wait for some
            temporary.unlink()
        raise


def page(items: Sequence[dict[str, Any]], request: Request, *, most: int, default: int) -> dict[str, Any]:
    """OpenAI's list: `limit`, `after` and `order` of the query; newest first. `items`: oldest first."""
    query = request.query_params
    text = query.get("limit", str(default))
    if not text.isdecimal() or not 1 <= int(text[:9]) <= most:
        raise invalid("limit", f"limit is {text[:60]!r}; allowed: 1 to {most}")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order", f"order is {order[:60]!r}; allowed: asc, desc")
    ordered = list(items) if order == "asc" else list(items)[::-1]
    start = 0
    if (after := query.get("after")) is not None:
        places = [number for number, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise invalid("after", f"after is {after[:100]!r}, which is not in the list")
        start = places[0] + 1
    shown = ordered[start : start + int(text)]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return {"object": "list", "data": shown, **ends, "has_more": start + int(text) < len(ordered)}


def add_routes(app: FastAPI, files: FileStore) -> None:
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
        return _json(await asyncio.to_thread(files.add, file.file, size, name, purpose, lifetime))

    @router.get(PATH)
    async def listed(request: Request) -> Response:
        purpose = request.query_params.get("purpose")
        found = await asyncio.to_thread(files.all)
        found = [file for file in found if purpose in (None, file["purpose"])]
        return _json(page(found, request, most=_MOST_LISTED, default=_MOST_LISTED))

    @router.get(PATH + "/{file_id}")
    async def find(file_id: str) -> Response:
        return _json(files.get(file_id))

    @router.get(PATH + "/{file_id}/content")
    async def content(request: Request, file_id: str) -> Response:
        _settle_range(request, files.get(file_id)["bytes"])
        return FileResponse(files.data(file_id), media_type="application/octet-stream")

    @router.delete(PATH + "/{file_id}")
    async def delete(file_id: str) -> Response:
        files.get(file_id)
        await asyncio.to_thread(files.delete, file_id)
        return _json({"id": file_id, "object": "file", "deleted": True})

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


def _json(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")
