"""/v1/files and /v1/batches before the demo model, asked by OpenAI's own client."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.openai_stack import Endpoint, running_endpoint
from tests.e2e.wire import PATIENCE_SECONDS, Server

pytestmark = pytest.mark.e2e

CHAT = "/v1/chat/completions"
FORM = "multipart/form-data; boundary=b"


@pytest.fixture(scope="module")
def endpoint(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with running_endpoint(server, files_folder=str(tmp_path_factory.mktemp("files")), workers=2) as found:
        yield found


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"temperature": 0, "max_tokens": 20, **body}}


def begin(client: openai.OpenAI, lines: list[dict[str, Any]]) -> Any:
    data = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("lines.jsonl", data), purpose="batch")
    assert client.files.retrieve(file.id).bytes == len(data)
    assert client.files.content(file.id).content == data
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"})


def wait(client: openai.OpenAI, batch: Any) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while batch.status not in ("completed", "failed", "expired", "cancelled") and time.monotonic() < deadline:
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    return batch


def records(client: openai.OpenAI, file_id: str) -> dict[str, Any]:
    lines = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    assert len({one["custom_id"] for one in lines}) == len(lines)
    return {one["custom_id"]: one["response"] for one in lines}


def test_a_batch_from_upload_to_results(endpoint: Endpoint) -> None:
    client = endpoint.client()
    asked = [line(str(n), messages=[{"role": "user", "content": f"What is {n} + 2?"}]) for n in range(10)]
    batch = wait(client, begin(client, [*asked, line("wrong", messages=[])]))
    assert (batch.status, batch.metadata) == ("completed", {"a": "b"})
    assert (batch.request_counts.completed, batch.request_counts.failed) == (10, 1)
    found = records(client, batch.output_file_id)
    answers = {name: one["body"]["choices"][0]["message"]["content"] for name, one in found.items()}
    alone = client.chat.completions.create(model="demo", **asked[3]["body"]).choices[0].message.content
    assert answers["3"] == alone
    assert records(client, batch.error_file_id)["wrong"]["status_code"] == 400
    assert batch.id in [one.id for one in client.batches.list()]
    assert {file.purpose for file in client.files.list()} == {"batch", "batch_output"}
    assert client.files.delete(batch.output_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(batch.output_file_id)


def test_a_batch_is_cancelled(endpoint: Endpoint) -> None:
    client = endpoint.client()
    endless = [
        line(str(n), messages=[{"role": "user", "content": "x"}], ignore_eos=True, max_tokens=3000) for n in range(200)
    ]
    batch = begin(client, endless)
    assert client.batches.cancel(batch.id).status == "cancelling"
    assert wait(client, batch).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="is cancelled"):
        client.batches.cancel(batch.id)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h"}, "input_file_id"),
        ({"input_file_id": "../x", "endpoint": CHAT, "completion_window": "24h"}, "input_file_id"),
        ({"input_file_id": "x", "endpoint": "/v1/models", "completion_window": "24h"}, "endpoint"),
        ({"input_file_id": "x", "endpoint": CHAT, "completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "x", "endpoint": CHAT, "completion_window": "24h", "metadata": {"a": 1}}, "metadata"),
        ({"input_file_id": "x", "endpoint": CHAT, "completion_window": "24h", "odd": 1}, "odd"),
    ],
)
def test_what_is_refused(endpoint: Endpoint, body: dict[str, Any], param: str) -> None:
    status, answer = endpoint.post("/v1/batches", body)
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("data", "content_type", "param"),
    [
        (b"{}", "application/json", "file"),
        (b"x", FORM, "body"),
        (b"x", "multipart/form-data", "body"),
        (b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx\r\n--b--\r\n', FORM, "file"),
        (b'--b\r\nContent-Disposition: form-data; name="odd"\r\n\r\nx\r\n--b--\r\n', FORM, "odd"),
        (b"", "application/x-www-form-urlencoded", "file"),
    ],
)  # fmt: skip
def test_what_is_no_upload(endpoint: Endpoint, data: bytes, content_type: str, param: str) -> None:
    status, answer = endpoint.post("/v1/files", data, {"Content-Type": content_type})
    assert (status, answer["error"]["param"]) == (400, param), answer


@pytest.mark.parametrize("path", ["/v1/files/x", "/v1/files/..%2fx/content", "/v1/batches/x", "/v1/batches/%00"])
def test_what_is_not_there(endpoint: Endpoint, path: str) -> None:
    status, answer = endpoint.get(path)
    assert (status, set(answer["error"])) == (404, {"message", "type", "param", "code"})


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=99999999999", "order=up", "after=file-0"])
@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
def test_lists_are_bounded(endpoint: Endpoint, path: str, query: str) -> None:
    status, answer = endpoint.get(f"{path}?{query}")
    assert (status, answer["error"]["param"]) == (400, query.partition("=")[0])


def test_a_batch_survives_its_workers_and_the_endpoint(server: Server, tmp_path: Path) -> None:
    """Killed while lines are on their way: each stands once in the end."""
    asked = [line(str(n), messages=[{"role": "user", "content": f"What is {n} + 2?"}]) for n in range(30)]
    settings: dict[str, Any] = {"files_folder": str(tmp_path), "max_batch_requests": 2}
    with running_endpoint(server, **settings) as one:
        batch = begin(one.client(), asked)
        written = tmp_path / "files"
        deadline = time.monotonic() + PATIENCE_SECONDS
        while sum(path.read_bytes().count(b"batch_req_") for path in written.glob("*.data")) < 5:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for process in one.processes.process_ids:
            os.kill(process, signal.SIGKILL)
        one.client().with_options(max_retries=20).batches.retrieve(batch.id)
    with running_endpoint(server, **settings) as two:
        client = two.client()
        batch = wait(client, batch)
        assert (batch.status, batch.request_counts.completed, batch.error_file_id) == ("completed", 30, None)
        assert set(records(client, batch.output_file_id)) == {str(n) for n in range(30)}
