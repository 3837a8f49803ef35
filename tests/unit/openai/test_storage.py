"""A disk that is full or cannot be written: batches wait, and clients are told which of the two it is."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import sqlite3
from collections import Counter
from pathlib import Path
from typing import IO, Any, Final

import pytest

from minisgl_backend.openai.batches.batch_runner import BatchRunner
from minisgl_backend.openai.batches.batches import ENDED, BatchStore
from minisgl_backend.openai.batches.files import FileStore
from minisgl_backend.openai.errors import ApiError
from minisgl_backend.openai.requests.batches import BatchRequest
from minisgl_backend.openai.storage import storage_error
from tests.unit.openai.scripted_app import ScriptedApp, scripted_app

CHAT: Final = "/v1/chat/completions"
LINES = 20


class Disk:
    """Takes `room` more bytes: what is written beyond them fails, and leaves its beginning, as on a file system."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = 1 << 30
        self.failure = errno.ENOSPC
        opened = Path.open

        def opening(path: Path, mode: str = "r", *arguments: Any, **named: Any) -> Any:
            if mode in ("ab", "wb"):
                return Limited(opened(path, mode, buffering=0), self)
            return opened(path, mode, *arguments, **named)

        monkeypatch.setattr(Path, "open", opening)


class Limited:
    """A file on that disk."""

    def __init__(self, file: IO[bytes], disk: Disk) -> None:
        self._file, self._disk = file, disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Limited:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: Any) -> int:
        fits = self._file.write(data[: self._disk.room])
        self._disk.room -= fits
        if fits < len(data):
            raise OSError(self._disk.failure, os.strerror(self._disk.failure))
        return fits


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr("minisgl_backend.openai.storage.PAUSES_SECONDS", (0.005,))
    return Disk(monkeypatch)


@pytest.mark.parametrize("failure", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("room", [0, 800, 2500], ids=["none", "for no answer", "for some answers"])
def test_a_batch_waits_for_a_full_disk(
    room: int, failure: int, tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    store, kept = FileStore(tmp_path / "files", 1 << 20), BatchStore(tmp_path / "batches")
    asked: Counter[str] = Counter()

    async def answer(path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        asked[json.loads(body)["user"]] += 1
        return 200, b"{}"

    async def run() -> None:
        lines = [{"custom_id": f"{n}", "method": "POST", "url": CHAT, "body": {"user": f"{n}"}} for n in range(LINES)]
        data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        file = store.add(io.BytesIO(data), len(data), "x.jsonl", "batch")
        batch = kept.add(BatchRequest(input_file_id=file["id"], endpoint=CHAT, completion_window="24h"))
        disk.room, disk.failure = room, failure
        task = asyncio.get_running_loop().create_task(BatchRunner(kept, store, answer, 4, 1000).run())
        try:
            while not any("wait" in message for message in caplog.messages):
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.1)  # many pauses
            waits = kept.get(batch["id"])
            assert waits["status"] == ("in_progress" if room else "validating")
            begun = sum(asked.values())
            await asyncio.sleep(0.1)
            assert sum(asked.values()) == begun < LINES, "a full disk costs no computing"
            assert len(caplog.messages) == 1, caplog.messages
            disk.room = 1 << 30
            while (ended := kept.get(batch["id"]))["status"] not in ENDED:
                await asyncio.sleep(0.005)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert (ended["status"], ended["request_counts"]["completed"]) == ("completed", LINES)
        records = [json.loads(text) for text in store.data(ended["output_file_id"]).read_bytes().splitlines()]
        assert sorted(int(record["custom_id"]) for record in records) == list(range(LINES))
        assert set(asked.values()) == {1}, "what was computed is kept"
        assert len(caplog.messages) == 2

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/secret"), 507, "storage_full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 507, "storage_full"),
        (OSError(errno.ENOENT, "No such file or directory", "/secret"), 500, "storage_unavailable"),
        (OSError(errno.EROFS, "Read-only file system"), 500, "storage_unavailable"),
        (OSError(errno.EACCES, "Permission denied"), 500, "storage_unavailable"),
        (OSError(errno.EIO, "Input/output error"), 500, "storage_unavailable"),
        (sqlite3.OperationalError("database or disk is full"), 507, "storage_full"),
        (sqlite3.OperationalError("attempt to write a readonly database"), 500, "storage_unavailable"),
        (sqlite3.OperationalError("unable to open database file"), 500, "storage_unavailable"),
    ],
)
def test_only_a_lack_of_space_is_a_full_storage(error: OSError | sqlite3.Error, status: int, code: str) -> None:
    found = storage_error("the file cannot be kept", error)
    assert (found.status, found.code, found.kind) == (status, code, "server_error")
    assert found.message.startswith("the file cannot be kept: ")
    assert "/secret" not in found.message


def test_a_file_that_cannot_be_kept_leaves_nothing(tmp_path: Path, disk: Disk) -> None:
    store = FileStore(tmp_path / "files", 1 << 20)
    for room in (0, 60, 110):
        disk.room = room
        with pytest.raises(ApiError) as full:
            store.add(io.BytesIO(b"x" * 100), 100, "x", "batch")
        assert (full.value.status, full.value.code) == (507, "storage_full")
        assert os.listdir(tmp_path / "files") == []


def refusal(app: ScriptedApp, method: str, path: str, body: Any = None) -> tuple[int, str]:
    """(status, code)."""
    status, answer = app.ask(method, path, body)
    assert "/tmp" not in answer["error"]["message"], "the server's folders are nobody's business"
    return status, answer["error"]["code"]


def test_each_route_says_what_is_wrong_with_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("files", "batches"):
        (tmp_path / folder).write_text("no folder")
    file, batch = f"file-{'0' * 32}", f"batch_{'0' * 32}"
    with scripted_app(tmp_path, monkeypatch, files_folder=str(tmp_path)) as app:
        for method, path in (
            ("GET", "/v1/files"),
            ("GET", "/v1/batches"),
            ("GET", f"/v1/files/{file}"),
            ("GET", f"/v1/files/{file}/content"),
            ("DELETE", f"/v1/files/{file}"),
            ("GET", f"/v1/batches/{batch}"),
            ("POST", f"/v1/batches/{batch}/cancel"),
        ):
            assert refusal(app, method, path) == (500, "storage_unavailable"), path
        status, answer = app.ask("GET", f"/v1/messages/batches/msg{batch}")  # an API whose errors have no codes
        assert (status, answer["error"]["message"]) == (500, "files and batches cannot be used: Not a directory")
        given = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        assert refusal(app, "POST", "/v1/batches", given) == (500, "storage_unavailable")
        part = b'--x\r\nContent-Disposition: form-data; name="'
        data = part + b'purpose"\r\n\r\nbatch\r\n' + part + b'file"; filename="x.jsonl"\r\n\r\n{}\n\r\n--x--\r\n'
        answer = app.ask("POST", "/v1/files", data, **{"Content-Type": "multipart/form-data; boundary=x"})
        assert (answer[0], answer[1]["error"]["code"]) == (500, "storage_unavailable")


def test_kept_responses_have_the_same_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_app(tmp_path / "gone", monkeypatch) as app:
        for method, path, body in (
            ("POST", "/v1/responses", {"input": "hi", "background": True}),
            ("POST", "/v1/responses", {"input": "hi", "previous_response_id": "resp_1"}),
            ("GET", "/v1/responses/resp_1", None),
            ("POST", "/v1/responses/resp_1/cancel", None),
            ("DELETE", "/v1/responses/resp_1", None),
        ):
            assert refusal(app, method, path, body) == (500, "storage_unavailable"), path
