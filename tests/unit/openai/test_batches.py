"""Batches without a server: lines, results, what a crash leaves behind, cancelling, and bounds."""

from __future__ import annotations

import asyncio
import codecs
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.openai.batches.batch_runner import BatchRunner, BatchWork, Post
from minisgl_backend.openai.batches.batches import ENDED, Batch, BatchStore
from minisgl_backend.openai.batches.files import FileStore
from minisgl_backend.openai.errors import ApiError
from minisgl_backend.openai.in_process import post
from minisgl_backend.openai.requests.batches import BatchRequest
from minisgl_backend.request import MAX_PRIORITY

CHAT = "/v1/chat/completions"
MOST_LINE_BYTES = 1000


class Folder:
    """What a server keeps, and a runner over it."""

    def __init__(self, path: Path, max_bytes: int = 1 << 20) -> None:
        self.files = FileStore(path / "files", max_bytes)
        self.batches = BatchStore(path / "batches")

    def add(self, *lines: Any) -> Batch:
        data = b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
        file = self.files.add(io.BytesIO(data), len(data), "x.jsonl", "batch")
        return self.batches.add(
            BatchRequest(input_file_id=file["id"], endpoint="/v1/chat/completions", completion_window="24h")
        )

    async def run(self, batch: Batch, post: Post, max_at_once: int = 2) -> Batch:
        """Until the batch has ended."""
        task = asyncio.get_running_loop().create_task(runner(self, post, max_at_once).run())
        try:
            while (found := self.batches.get(batch["id"]))["status"] not in ENDED and not task.done():
                await asyncio.sleep(0.005)
            return found
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def records(self, file_id: str | None) -> dict[str, Any]:
        if file_id is None:
            return {}
        lines = [json.loads(line) for line in self.files.data(file_id).read_bytes().splitlines()]
        assert len({line["custom_id"] for line in lines}) == len(lines)
        return {line["custom_id"]: line for line in lines}


def runner(folder: Folder, post: Post, max_at_once: int = 2) -> BatchRunner:
    return BatchRunner(folder.batches, folder.files, post, max_at_once, MOST_LINE_BYTES)


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"messages": [], **body}}


async def echo(path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
    given = json.loads(body)
    return given.get("seed", 200), json.dumps({"path": path, "priority": given["priority"]}).encode()


def test_results_and_errors_stand_in_files_of_their_own(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    batch = folder.add(line("a"), line("b", seed=400), b"\n", line("c"))
    found = asyncio.run(folder.run(batch, echo))
    assert (found["status"], found["request_counts"]) == ("completed", {"total": 3, "completed": 2, "failed": 1})
    results, errors = folder.records(found["output_file_id"]), folder.records(found["error_file_id"])
    assert (set(results), set(errors)) == ({"a", "c"}, {"b"})
    assert results["a"]["response"]["body"] == {"path": CHAT, "priority": MAX_PRIORITY}
    assert errors["b"]["response"]["status_code"] == 400
    assert {file["purpose"] for file in folder.files.all()} == {"batch", "batch_output"}
    assert not any(key.startswith("_") for key in folder.batches.shown(found))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (b"{\n", "line 2: "),
        (line("a"), "line 2: custom_id is 'a', as that of another line"),
        ({**line("b"), "url": "/v1/completions"}, "line 2: url is '/v1/completions'; allowed: /v1/chat/completions"),
        ({**line("b"), "method": "GET"}, "line 2: method is 'GET'; allowed: POST"),
        (line("b", stream=True), "line 2: body.stream is given"),
        (line("b", priority=1), "line 2: body.priority is given"),
        ({"custom_id": "b"}, "line 2: "),
        (b"\xff\n", "line 2: "),
        (line("b", user="x" * 2500), f"line 2: it is longer than {MOST_LINE_BYTES} bytes"),
    ],
)
def test_a_wrong_line_fails_the_batch_before_it_begins(tmp_path: Path, wrong: Any, message: str) -> None:
    folder = Folder(tmp_path)
    found = asyncio.run(folder.run(folder.add(line("a"), wrong), echo))
    assert (found["status"], found["output_file_id"]) == ("failed", None)
    assert found["errors"]["data"][0]["message"].startswith(message)


def test_after_a_crash_each_line_stands_once(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    batch = folder.add(*(line(str(number)) for number in range(6)))
    asked: list[str] = []

    async def dies_at_the_third(path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        asked.append(request_id)
        if len(asked) > 3:
            await asyncio.sleep(60)
        return 200, b"{}"

    async def crash() -> None:
        task = asyncio.get_running_loop().create_task(runner(folder, dies_at_the_third).run())
        while len(asked) < 5:
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(crash())
    output = folder.files.data(batch["_output"])
    with output.open("ab") as file:
        file.write(b'{"custom_id": "5", "resp')  # as a process that is killed leaves it
    assert folder.files.find(batch["_output"]) is None
    found = asyncio.run(folder.run(batch, echo))
    assert (found["status"], found["request_counts"]["completed"]) == ("completed", 6)
    assert set(folder.records(found["output_file_id"])) == set("012345")


def test_a_full_server_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl_backend.openai.batches.batch_runner._RETRY_PAUSES", (0.0,))
    answers = iter([429, 503, 200])

    async def full_at_first(path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        return next(answers), b"{}"

    folder = Folder(tmp_path)
    found = asyncio.run(folder.run(folder.add(line("a")), full_at_first))
    assert found["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


def test_a_batch_that_is_cancelled_keeps_what_it_has(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    batch = folder.add(*(line(str(number)) for number in range(20)))

    async def cancels(path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        folder.batches.cancel(batch)
        return 200, b"{}"

    found = asyncio.run(folder.run(batch, cancels))
    assert found["status"] == "cancelled"
    assert 1 <= len(folder.records(found["output_file_id"])) <= 2
    with pytest.raises(ApiError, match="a batch that is cancelled"):
        folder.batches.cancel(found)


def test_lines_on_their_way_end_with_a_batch_that_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl_backend.openai.batches.batch_runner.POLL_INTERVAL", 0.01)
    folder, left = Folder(tmp_path), []
    batch = folder.add(line("a"), line("b"))

    async def endless(path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        folder.batches.cancel(batch)
        try:
            await asyncio.sleep(3600)
        finally:
            left.append(request_id)
        raise AssertionError

    found = asyncio.run(folder.run(batch, endless))
    assert (found["status"], found["output_file_id"], len(left)) == ("cancelled", None, 2)


def test_who_is_cancelled_leaves_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what it asked for ends, too."""
    seen: list[str] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] != "http.disconnect":
            seen.append(message["type"])
        seen.append("left")

    async def leave() -> None:
        task = asyncio.ensure_future(post(application, CHAT, b"{}", "x"))
        while not seen:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    assert seen == ["http.request", "left"]


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    batch = folder.add(codecs.BOM_UTF8 + json.dumps(line("a")).encode() + b"\r\n", line("b"))
    assert asyncio.run(folder.run(batch, echo))["request_counts"]["completed"] == 2


def test_lines_behind_the_window_have_expired(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    batch = folder.add(line("a"), line("b"))
    folder.batches.write({**batch, "expires_at": 0})
    found = asyncio.run(folder.run(batch, echo))
    assert found["status"] == "expired"
    assert {one["error"]["code"] for one in folder.records(found["error_file_id"]).values()} == {"batch_expired"}


def test_lines_that_a_full_server_did_not_take_have_expired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, asked = Folder(tmp_path), []
    batch = folder.add(line("a"), line("b"), line("c"))

    async def full(path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        asked.append(request_id)
        return 503, b"{}"

    monkeypatch.setattr(BatchWork, "_end", lambda _: "expired" if asked else None)
    found = asyncio.run(folder.run(batch, full))
    assert found["status"] == "expired"
    errors = folder.records(found["error_file_id"])
    assert {name: one["error"]["code"] for name, one in errors.items()} == dict.fromkeys("abc", "batch_expired")


def test_files_that_are_no_batches_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = Folder(tmp_path)
    folder.batches.folder.mkdir()
    foreign = {f"batch_{'0' * 32}": b"{", f"batch_{'1' * 32}": b"[]", "batch_mine": b"{}"}
    for name, data in foreign.items():
        (folder.batches.folder / f"{name}.json").write_bytes(data)
    batch = folder.add(line("a"))
    assert asyncio.run(folder.run(batch, echo))["status"] == "completed"
    assert [one["id"] for one in folder.batches.all()] == [batch["id"]]
    assert sum("is no batch" in message for message in caplog.messages) == len(foreign)


def test_a_runner_survives_what_nobody_has_foreseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl_backend.openai.batches.batch_runner._PAUSE_SECONDS", 0.0)
    folder, faults = Folder(tmp_path), iter([ValueError("odd")])
    batch = folder.add(line("a"))

    def paths() -> Iterator[Path]:
        for fault in faults:
            raise fault
        return folder.batches.folder.glob("batch_*.json")

    monkeypatch.setattr(folder.batches, "paths", paths)
    assert asyncio.run(folder.run(batch, echo))["status"] == "completed"


def test_never_more_than_so_many_at_once(tmp_path: Path) -> None:
    now, most = 0, 0

    async def counted(path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001)
        now -= 1
        return 200, b"{}"

    folder = Folder(tmp_path)
    asyncio.run(folder.run(folder.add(*(line(str(number)) for number in range(30))), counted, 3))
    assert most == 3


def test_files_have_a_bound(tmp_path: Path) -> None:
    folder = Folder(tmp_path, max_bytes=1000)
    file = folder.files.add(io.BytesIO(b"x" * 500), 500, "x", "batch")
    with pytest.raises(ApiError) as full:
        folder.files.add(io.BytesIO(b"x" * 500), 500, "x", "batch")
    assert (full.value.status, full.value.code) == (413, "storage_full")
    folder.files.delete(file["id"])
    assert folder.files.all() == []
    assert os.listdir(tmp_path / "files") == []


def test_files_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path, max_bytes=1500)
    kept = folder.files.add(io.BytesIO(b"x"), 1, "x", "batch")
    file = folder.files.add(io.BytesIO(b"x" * 500), 500, "x", "batch", 3600)
    assert folder.files.get(file["id"])["expires_at"] == file["created_at"] + 3600
    now = file["created_at"] + 3601
    monkeypatch.setattr("minisgl_backend.openai.batches.files.time.time", lambda: now)
    assert (folder.files.find(file["id"]), folder.files.all()) == (None, [kept])
    folder.files.check_room(1000)  # which it makes
    assert not folder.files.data(file["id"]).exists()
    assert folder.files.data(kept["id"]).exists()


def test_results_expire_when_the_batch_says_so(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    source = folder.add(line("a"))["input_file_id"]
    asked = {"input_file_id": source, "endpoint": CHAT, "completion_window": "24h"}
    wish = {"anchor": "created_at", "seconds": 7200}
    batch = folder.batches.add(BatchRequest.model_validate({**asked, "output_expires_after": wish}))
    output = folder.files.get(asyncio.run(folder.run(batch, echo))["output_file_id"])
    assert output["expires_at"] - output["created_at"] == 7200


def test_uploads_that_are_being_read_count(tmp_path: Path) -> None:
    """They are on the disk already, wherever that is."""
    folder = Folder(tmp_path, max_bytes=1000)
    with folder.files.expect(600), folder.files.expect(None):  # which counts as a quarter
        folder.files.check_room(150)
        with pytest.raises(ApiError, match="850 bytes are kept"):
            folder.files.check_room(151)
    folder.files.check_room(1000)


def test_a_file_that_is_gone_is_told_without_the_servers_folders(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    batch = folder.add(line("a"))
    folder.batches.write({**batch, "status": "in_progress"})  # as before a restart
    folder.files.delete(batch["input_file_id"])
    found = asyncio.run(folder.run(batch, echo))
    (error,) = found["errors"]["data"]
    assert (found["status"], error["message"]) == ("failed", "FileNotFoundError: No such file or directory")


def test_a_damaged_file_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = Folder(tmp_path)
    first, second, third = (folder.files.add(io.BytesIO(b"x"), 1, "x", "batch") for _ in range(3))
    for file, told in ((first, b"{"), (second, b'["id"]')):
        (tmp_path / "files" / f"{file['id']}.json").write_bytes(told)
    assert folder.files.all() == [third]
    assert folder.files.find(first["id"]) is None
    assert first["id"] in caplog.text
    assert folder.files.publish(first["id"], "x", "batch") == folder.files.find(first["id"]), "written anew"


def test_what_was_never_finished_is_removed(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    kept = folder.files.add(io.BytesIO(b"x"), 1, "x", "batch")["id"]
    young, grows, orphan = (FileStore.new_id() for _ in range(3))
    for file_id in (kept, young, grows, orphan):
        folder.files.data(file_id).write_bytes(b"x")
        if file_id != young:
            os.utime(folder.files.data(file_id), (0, 0))
    folder.files.remove_orphans({grows})
    assert {path.stem for path in (tmp_path / "files").glob("*.data")} == {kept, young, grows}
