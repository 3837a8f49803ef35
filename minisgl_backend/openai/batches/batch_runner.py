"""Runs batches one after the other, below interactive requests: with low priority and few requests at a time.

One of the workers that share the folder, the holder of its lock, does all of it. The result of each line is appended to
the batch's files as it comes; after a crash, lines whose `custom_id` is there already are not computed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import math
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from typing import IO, Any

import msgspec

from minisgl_backend.openai.batches.batch_lines import custom_ids_in, lines_left, validate_lines
from minisgl_backend.openai.batches.batches import ENDED, Batch, BatchStore, is_of_messages
from minisgl_backend.openai.batches.files import FileStore
from minisgl_backend.openai.batches.message_results import (
    LineAnswer,
    message_result,
    remove_parts,
    unseen_files,
    write_results,
)
from minisgl_backend.openai.encoding import encode
from minisgl_backend.openai.errors import ApiError
from minisgl_backend.openai.requests.batches import Line
from minisgl_backend.openai.storage import off_loop, pause_seconds, until_written
from minisgl_backend.request import MAX_PRIORITY

log = logging.getLogger(__name__)

Post = Callable[[str, bytes, str], Awaitable[tuple[int, bytes]]]  # path, body, request id -> status, body

POLL_INTERVAL = 0.5  # seconds between checks for a batch, or for the lock
_PAUSE_SECONDS = 5.0  # after an unforeseen error
_TIDY_SECONDS = 3600.0  # between checks for files that nothing will finish
PROGRESS_INTERVAL = 1.0  # seconds between updates of the counts that clients see
RETRY_STATUS = (408, 429, 503)  # the server is full, or will come back
_RETRY_PAUSES = (0.5, 1.0, 2.0, 5.0)  # seconds
_EXPIRED = {"code": "batch_expired", "message": "the batch's completion window has passed"}


class BatchRunner:
    """For one event loop; `run` goes on until it is cancelled."""

    def __init__(
        self, batches: BatchStore, files: FileStore, post: Post, max_at_once: int, max_line_bytes: int
    ) -> None:
        self._batches = batches
        self._files = files
        self._post = post
        self._max_at_once = max_at_once
        self._max_line_bytes = max_line_bytes
        self._ended: set[str] = set()  # names of files that need no further check
        self._tidied_at = -math.inf

    async def run(self) -> None:
        failures, told = 0, ""
        while True:
            began = time.monotonic()
            try:
                if self._batches.folder.is_dir():  # a batch has been created
                    await self._run_locked()
                failures, told = 0, ""
            except OSError as error:
                failures = 1 if time.monotonic() - began > _PAUSE_SECONDS else failures + 1
                if str(error) != told:
                    told = str(error)
                    log.error("batches in %s wait: %s", self._batches.folder, error)
                await asyncio.sleep(pause_seconds(failures))
            except Exception:
                log.exception("batches in %s cannot go on", self._batches.folder)
                await asyncio.sleep(_PAUSE_SECONDS)
            await asyncio.sleep(POLL_INTERVAL)

    async def _run_locked(self) -> None:
        """Returns at once if another worker has the lock."""
        with (self._batches.folder / "lock").open("w") as lock:
            if not _is_locked(lock):
                return
            while True:
                batch = await off_loop(self._next)
                if batch is not None:
                    await self._compute_or_fail(batch)
                    continue
                if time.monotonic() - self._tidied_at > _TIDY_SECONDS:
                    self._tidied_at = time.monotonic()
                    await off_loop(self._tidy)
                await asyncio.sleep(POLL_INTERVAL)

    async def _compute_or_fail(self, batch: Batch) -> None:
        try:
            await self._compute(batch)
        except Exception as error:
            if not isinstance(error, ApiError):
                log.exception("batch %s failed", batch["id"])
            told = error.strerror if isinstance(error, OSError) else error  # without the server's paths
            message = f"{type(error).__name__}: {told}"
            await self._fail(batch, [{"code": "server_error", "message": message, "line": None, "param": None}])

    def _next(self) -> Batch | None:
        paths = [path for path in self._batches.paths() if path.stem not in self._ended]
        for path in sorted(paths, key=_modified):
            batch = self._batches.read(path)
            if batch is not None and batch["status"] not in ENDED:
                return batch
            self._ended.add(path.stem)
            if batch is None and path.exists():
                log.error("%s is no batch, and is left alone", path)
        return None

    def _tidy(self) -> None:
        """Called when no batch is left to compute, although one may have been added since."""
        batches = self._batches.all()
        going_on = [batch for batch in batches if batch["status"] not in ENDED]
        written = {batch[key] for batch in going_on for key in ("_output", "_errors")}
        self._files.remove_expired()
        self._files.remove_orphans(written.union(*(unseen_files(batch) for batch in batches if is_of_messages(batch))))

    async def _compute(self, batch: Batch) -> None:
        if batch["status"] == "validating":
            source = self._files.data(batch["input_file_id"])
            count, errors = await off_loop(validate_lines, source, batch["endpoint"], self._max_line_bytes)
            if errors:
                await self._fail(batch, errors)
                return
            batch |= {"status": "in_progress", "in_progress_at": int(time.time())}
            batch["request_counts"]["total"] = count
            await until_written(_named(batch), self._batches.write, batch)
        work = BatchWork(batch, self._batches, self._files, self._post, self._max_line_bytes)
        ended = await work.run(self._max_at_once)
        await self._end(batch, ended)

    async def _end(self, batch: Batch, status: str) -> None:
        await until_written(_named(batch), self._finish, batch, status)
        if is_of_messages(batch):  # apart, since results are made of all parts or none
            await until_written(_named(batch), remove_parts, batch, self._files)

    def _finish(self, batch: Batch, status: str) -> None:
        batch |= {"status": "finalizing", "finalizing_at": int(time.time())}
        self._batches.write(batch)
        if is_of_messages(batch):
            batch["_counts"] = write_results(batch, status, self._files)
        else:
            self._publish(batch)
        batch |= {"status": status, f"{status}_at": int(time.time())}
        self._batches.write(batch)

    def _publish(self, batch: Batch) -> None:
        for key, shown, name in (("_output", "output_file_id", "output"), ("_errors", "error_file_id", "error")):
            path = self._files.data(batch[key])
            if path.exists() and path.stat().st_size:
                self._files.publish(batch[key], f"{batch['id']}_{name}.jsonl", "batch_output", batch.get("_lifetime"))
                batch[shown] = batch[key]
            else:
                path.unlink(missing_ok=True)

    async def _fail(self, batch: Batch, errors: list[dict[str, Any]]) -> None:
        batch["errors"] = {"object": "list", "data": errors}
        await self._end(batch, "failed")


class BatchWork:
    """The lines of one batch."""

    def __init__(self, batch: Batch, batches: BatchStore, files: FileStore, post: Post, max_line_bytes: int) -> None:
        self._batch = batch
        self._batches = batches
        self._files = files
        self._post = post
        self._max_line_bytes = max_line_bytes
        self._told_at = -math.inf
        self._writing = asyncio.Lock()  # so that one waits for a full disk, and all others for that one

    async def run(self, max_at_once: int) -> str:
        """Returns the batch's final status."""
        output, errors = (self._files.data(self._batch[key]) for key in ("_output", "_errors"))
        done = [await off_loop(custom_ids_in, path) for path in (output, errors)]
        self._counts.update(completed=len(done[0]), failed=len(done[1]))
        source = self._files.data(self._batch["input_file_id"])
        lines = _Lines(lines_left(source, self._batch["endpoint"], done[0] | done[1], self._max_line_bytes))
        with contextlib.ExitStack() as opened:
            opened.callback(lines.close)
            self._output = opened.enter_context(await until_written(_named(self._batch), _Records, output))
            self._errors = opened.enter_context(await until_written(_named(self._batch), _Records, errors))
            async with _TaskGroup() as group:
                for _ in range(max_at_once):
                    group.create_task(self._take(lines))
            while self._end() == "expired" and (line := await off_loop(lines.next)) is not None:
                await self._keep(self._errors, line, None)
        return self._end() or "completed"

    @property
    def _counts(self) -> dict[str, int]:
        counts: dict[str, int] = self._batch["request_counts"]
        return counts

    def _end(self) -> str | None:
        """The reason to stop computing lines; None: go on."""
        if self._batches.is_cancelled(self._batch["id"]):
            return "cancelled"
        return "expired" if time.time() > self._batch["expires_at"] else None

    async def _take(self, lines: _Lines) -> None:
        while self._end() is None and (line := await off_loop(lines.next)) is not None:
            answer = await self._answer(line)
            if answer is None:
                if self._end() == "expired":
                    await self._keep(self._errors, line, None)
                return
            await self._keep(self._output if answer.status < 400 else self._errors, line, answer)
            await self._tell()

    async def _answer(self, line: Line) -> LineAnswer | None:
        """None if the batch ends before the server takes the line."""
        body, tries = await off_loop(encode, {**line.body, "priority": MAX_PRIORITY}), 0
        while True:
            request_id = uuid.uuid4().hex
            answer = await self._posted(line.url, body, request_id)
            if answer is None:
                return None
            status, text = answer
            if status not in RETRY_STATUS:
                json.loads(text)
                return LineAnswer(status, request_id, text)
            if self._end() is not None:
                return None
            await asyncio.sleep(_RETRY_PAUSES[min(tries, len(_RETRY_PAUSES) - 1)])
            tries += 1

    async def _posted(self, url: str, body: bytes, request_id: str) -> tuple[int, bytes] | None:
        """None if the batch was cancelled meanwhile, which also ends the line's request."""
        task = asyncio.ensure_future(self._post(url, body, request_id))
        try:
            while not task.done():
                await asyncio.wait([task], timeout=POLL_INTERVAL)
                if not task.done() and self._end() == "cancelled":
                    return None
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])

    async def _keep(self, records: _Records, line: Line, answer: LineAnswer | None) -> None:
        """An answer is computed once: it waits here for a full disk, and no further line begins meanwhile. `answer`:
        None if the batch has expired."""
        record = message_result(line.custom_id, answer) if is_of_messages(self._batch) else _record(line, answer)
        text = await off_loop(encode, record)
        async with self._writing:
            await until_written(_named(self._batch), records.append, text + b"\n")
            self._counts["completed" if records is self._output else "failed"] += 1

    async def _tell(self) -> None:
        async with self._writing:
            if time.monotonic() - self._told_at > PROGRESS_INTERVAL:
                await until_written(_named(self._batch), self._write)
                self._told_at = time.monotonic()

    def _write(self) -> None:
        self._files.check_room()
        self._batches.write(self._batch)


def _record(line: Line, answer: LineAnswer | None) -> dict[str, Any]:
    """A line of the output or error file."""
    record: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id}
    if answer is None:
        return {**record, "response": None, "error": _EXPIRED}
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": msgspec.Raw(answer.body)}
    return {**record, "response": response, "error": None}


class _Records:
    """A file to which whole lines are appended. For one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._size = path.stat().st_size

    def __enter__(self) -> _Records:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, text: bytes) -> None:
        """Raises OSError; the next call removes what was written of `text`."""
        self._file.truncate(self._size)
        rest = memoryview(text)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._size += len(text)


class _Lines:
    """Thread-safe iterator of lines."""

    def __init__(self, lines: Generator[Line, None, None]) -> None:
        self._lines = lines
        self._lock = threading.Lock()

    def next(self) -> Line | None:
        """None: there are no more."""
        with self._lock:
            return next(self._lines, None)

    def close(self) -> None:
        with self._lock:
            self._lines.close()


class _TaskGroup:
    """Like asyncio's, which Python 3.10 lacks: the first error ends the others."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def create_task(self, work: Any) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    async def __aenter__(self) -> _TaskGroup:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)


def _named(batch: Batch) -> str:
    return f"batch {batch['id']}"


def _modified(path: Path) -> float:
    """0 if it was just deleted."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _is_locked(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
