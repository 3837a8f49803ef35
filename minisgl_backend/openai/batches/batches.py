"""The state of each batch. `batch_runner` computes them.

Only the runner writes BATCH.json once it exists; a request to cancel is a separate file next to it, so that any worker
can accept it.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from minisgl_backend.openai.batches.files import FileStore, paths_in, read_json, write_json
from minisgl_backend.openai.errors import ApiError, invalid
from minisgl_backend.openai.requests.batches import MESSAGES, BatchRequest

WINDOW_SECONDS = 24 * 3600
ENDED = ("completed", "failed", "expired", "cancelled")
_ID = re.compile(r"batch_[0-9a-f]{32}")
_MAX_BATCHES = 10_000  # kept at most; the oldest ones that have ended make room
_KEYS = {"status", "endpoint", "input_file_id", "created_at", "expires_at", "request_counts", "_output", "_errors"}
_TIMES = ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at")

Batch = dict[str, Any]  # OpenAI's object; keys that begin with an underscore are internal


class BatchStore:
    """The batches in a folder that all workers share."""

    def __init__(self, folder: Path) -> None:
        """`folder`: created with the first batch."""
        self.folder = folder

    def add(self, request: BatchRequest, **more: Any) -> Batch:
        """`more`: other values than those of a new batch."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._make_room()
        now = int(time.time())
        batch: Batch = {
            "id": f"batch_{uuid.uuid4().hex}",
            "object": "batch",
            "endpoint": request.endpoint,
            "errors": None,
            "input_file_id": request.input_file_id,
            "completion_window": request.completion_window,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "expires_at": now + WINDOW_SECONDS,
            **dict.fromkeys(_TIMES),
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": request.metadata,
            "_lifetime": None if request.output_expires_after is None else request.output_expires_after.seconds,
            "_output": FileStore.new_id(),
            "_errors": FileStore.new_id(),
            **more,
        }
        self.write(batch)
        return batch

    def write(self, batch: Batch) -> None:
        write_json(self._path(batch["id"]), batch)

    def find(self, batch_id: str) -> Batch | None:
        """Of any API."""
        return self.read(self._path(batch_id)) if _ID.fullmatch(batch_id) else None

    def get(self, batch_id: str) -> Batch:
        """Raises ApiError if there is none of OpenAI's API."""
        found = self.find(batch_id)
        if found is None or is_of_messages(found):
            raise ApiError(404, f"batch_id is {batch_id[:100]!r}, which is no batch here", param="batch_id")
        return found

    @staticmethod
    def read(path: Path) -> Batch | None:
        """None if the file does not exist or is not a batch."""
        try:
            found = read_json(path) if _ID.fullmatch(path.stem) else None
        except ValueError:
            return None
        return found if isinstance(found, dict) and found.get("id") == path.stem and found.keys() >= _KEYS else None

    def paths(self) -> Iterable[Path]:
        """The paths that may be batches."""
        return paths_in(self.folder, "batch_*.json")

    def all(self) -> list[Batch]:
        found = map(self.read, self.paths())
        return sorted(filter(None, found), key=lambda batch: (batch["created_at"], batch["id"]))

    def delete(self, batch: Batch) -> None:
        self._path(batch["id"]).unlink(missing_ok=True)
        self._wish(batch["id"]).unlink(missing_ok=True)

    def cancel(self, batch: Batch) -> None:
        if batch["status"] in ENDED:
            raise invalid("batch_id", f"batch_id is a batch that is {batch['status']}; allowed: one that goes on")
        self._wish(batch["id"]).touch()

    def is_cancelled(self, batch_id: str) -> bool:
        return self._wish(batch_id).exists()

    def shown(self, batch: Batch) -> dict[str, Any]:
        """The batch as clients of OpenAI's API see it."""
        told = {name: value for name, value in batch.items() if not name.startswith("_")}
        if batch["status"] not in ENDED and (at := self.cancelled_at(batch["id"])) is not None:
            told |= {"status": "cancelling", "cancelling_at": at}
        return told

    def cancelled_at(self, batch_id: str) -> int | None:
        """When its end was asked for, in seconds since the epoch; None: it was not."""
        try:
            return int(self._wish(batch_id).stat().st_mtime)
        except FileNotFoundError:
            return None

    def _make_room(self) -> None:
        batches = self.all()
        if len(batches) < _MAX_BATCHES:
            return
        ended = next((batch for batch in batches if batch["status"] in ENDED), None)
        if ended is None:
            raise ApiError(429, f"{len(batches)} batches wait, all that this server takes", code="queue_full")
        self.delete(ended)

    def _path(self, batch_id: str) -> Path:
        return self.folder / f"{batch_id}.json"

    def _wish(self, batch_id: str) -> Path:
        return self.folder / f"{batch_id}.cancel"


def is_of_messages(batch: Batch) -> bool:
    """Whether it belongs to Anthropic's API."""
    return bool(batch["endpoint"] == MESSAGES)
