"""Anthropic's batches. They are kept, and computed, as those of /v1/batches."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import Any

from starlette.responses import FileResponse, Response

from minisgl_backend.openai.batches.batches import ENDED, Batch, BatchStore, is_of_messages
from minisgl_backend.openai.batches.files import FileStore
from minisgl_backend.openai.batches.message_results import no_counts, unseen_files
from minisgl_backend.openai.errors import ApiError, invalid
from minisgl_backend.openai.requests.batches import MESSAGES, BatchRequest, message_lines

PATH = f"{MESSAGES}/batches"
_PREFIX = "msg"  # before the id that the batch is kept by
_MAX_LISTED = 1000


class MessageBatches:
    """The batches of messages among all batches. Methods access the disk and belong on another thread."""

    def __init__(self, batches: BatchStore, files: FileStore, max_line_bytes: int) -> None:
        self._batches = batches
        self._files = files
        self._max_line_bytes = max_line_bytes

    def create(self, body: bytes) -> Batch:
        try:
            lines = message_lines(body, self._max_line_bytes)
        except ValueError as error:
            raise invalid("requests", str(error)) from None
        request = BatchRequest.model_construct(
            input_file_id=self._files.add_unseen(lines), endpoint=MESSAGES, completion_window="24h"
        )
        return self._batches.add(
            request,
            status="in_progress",
            in_progress_at=int(time.time()),
            request_counts={"total": len(lines), "completed": 0, "failed": 0},
            _results=FileStore.new_id(),
        )

    def get(self, batch_id: str) -> Batch:
        """Raises ApiError if there is none."""
        prefix, kept_id = batch_id[: len(_PREFIX)], batch_id[len(_PREFIX) :]
        found = self._batches.find(kept_id) if prefix == _PREFIX else None
        if found is None or not is_of_messages(found):
            raise ApiError(404, f"message_batch_id is {batch_id[:100]!r}, which is no batch of messages here")
        return found

    def page(self, limit: int, after: str | None, before: str | None) -> dict[str, Any]:
        """Anthropic's list: newest first; behind `after`, or just before `before`."""
        if not 1 <= limit <= _MAX_LISTED:
            raise invalid("limit", f"limit is {limit}; allowed: 1 to {_MAX_LISTED}")
        if after and before:
            raise invalid("before_id", "before_id is given together with after_id; allowed: one of them")
        found = [batch for batch in self._batches.all() if is_of_messages(batch)][::-1]
        ids = [_PREFIX + batch["id"] for batch in found]
        for name, given in (("after_id", after), ("before_id", before)):
            if given and given not in ids:
                raise invalid(name, f"{name} is {given[:100]!r}, which is not in the list")
        begin, end = (ids.index(after) + 1 if after else 0), (ids.index(before) if before else len(ids))
        shown = found[max(begin, end - limit) : end] if before else found[begin : begin + limit]
        ends = (_PREFIX + shown[0]["id"], _PREFIX + shown[-1]["id"]) if shown else (None, None)
        return {"data": shown, "has_more": len(shown) < end - begin, "first_id": ends[0], "last_id": ends[1]}

    def cancel(self, batch_id: str) -> Batch:
        batch = self.get(batch_id)
        if batch["status"] in ENDED:
            raise invalid("batch_id", f"the batch {batch_id!r} has ended; allowed: one that is in progress")
        self._batches.cancel(batch)
        return batch

    def delete(self, batch_id: str) -> None:
        batch = self._ended(batch_id)
        self._batches.delete(batch)
        for file_id in unseen_files(batch):
            self._files.delete(file_id)

    def results(self, batch_id: str) -> Response:
        return FileResponse(self._files.data(self._ended(batch_id)["_results"]), media_type="application/x-jsonl")

    def _ended(self, batch_id: str) -> Batch:
        batch = self.get(batch_id)
        if batch["status"] not in ENDED:
            raise invalid("batch_id", f"the batch {batch_id!r} is in progress; allowed: one that has ended")
        return batch

    def shown(self, batch: Batch, base_url: str) -> dict[str, Any]:
        """The batch as clients see it. `base_url`: of this server, as the client knows it."""
        batch_id, status = _PREFIX + batch["id"], batch["status"]
        cancelled_at, has_ended = self._batches.cancelled_at(batch["id"]), status in ENDED
        total = batch["request_counts"]["total"]  # until the end, all of them count as processing
        counts = batch["_counts"] if has_ended else no_counts()
        going_on = "in_progress" if cancelled_at is None else "canceling"
        return {
            "id": batch_id,
            "type": "message_batch",
            "processing_status": "ended" if has_ended else going_on,
            "request_counts": {"processing": 0 if has_ended else total, **counts},
            "created_at": _time(batch["created_at"]),
            "expires_at": _time(batch["expires_at"]),
            "ended_at": _time(batch[f"{status}_at"]) if has_ended else None,
            "cancel_initiated_at": None if cancelled_at is None else _time(cancelled_at),
            "archived_at": None,
            "results_url": f"{base_url.rstrip('/')}{PATH}/{batch_id}/results" if has_ended else None,
        }


def _time(seconds: int) -> str:
    """RFC 3339."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat()
