"""The input and output of batches, in a folder that outlives the server and is shared by all workers.

Each file is stored as two: ID.data with its bytes, and ID.json with its metadata, written last. For clients, a file
without metadata does not exist yet.
"""

from __future__ import annotations

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

from minisgl_backend.openai.encoding import encode
from minisgl_backend.openai.errors import ApiError
from minisgl_backend.openai.storage import storage_error

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 200 << 20  # per upload, OpenAI's own limit
_ID = re.compile(r"file-[0-9a-f]{32}")
_TOLD = frozenset(("id", "bytes", "created_at", "filename", "purpose"))
_COPY_BYTES = 1 << 20
_ORPHAN_SECONDS = 3600.0  # since the last write to a file that clients do not see


class FileStore:
    """Stores up to `max_bytes` of files. Methods that access the disk may take long and belong on another thread."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """`folder`: created with the first file."""
        self._folder = folder
        self._max_bytes = max_bytes
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
        if used + size > self._max_bytes and (gone := self.remove_expired()):
            used -= gone
        if used + size > self._max_bytes:
            allowed = f"{self._max_bytes} in all (--max-files-bytes); delete files that are not needed"
            raise ApiError(
                413, f"files of {used} bytes are kept, and {size} more; allowed: {allowed}", code="storage_full"
            )

    @contextlib.contextmanager
    def expect(self, size: int | None) -> Iterator[None]:
        """Inside, an upload of `size` bytes (None: unknown) is received into its own temporary file."""
        size = min(MAX_FILE_BYTES, self._max_bytes // 4) if size is None else size
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
