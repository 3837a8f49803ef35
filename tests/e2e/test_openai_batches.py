"""/v1/files and /v1/batches before the demo model, asked by OpenAI's own client."""

from __future__ import annotations

import json
import os
import random
import signal
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from minisgl_backend.openai.requests.base import is_unicode
from minisgl_backend.openai.requests.batches import BatchRequest
from minisgl_backend.openai.requests.chat import ChatRequest
from tests.e2e.openai_stack import Endpoint, fetch, running_endpoint
from tests.e2e.test_openai_fuzz import MESSAGES, VALUES, check, processes, random_value
from tests.e2e.wire import PATIENCE_SECONDS, Server, assert_same_processes

pytestmark = pytest.mark.e2e

CHAT = "/v1/chat/completions"
FORM = "multipart/form-data; boundary=b"


@pytest.fixture(scope="module")
def endpoint(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with running_endpoint(server, files_folder=str(tmp_path_factory.mktemp("files")), workers=2) as found:
        yield found


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"temperature": 0, "max_tokens": 20, **body}}


def expiring(anchor: bytes, seconds: bytes) -> bytes:
    """An upload of a form."""
    values = {b'file"; filename="x': b"x", b"purpose": b"batch"}
    values |= {b"expires_after[anchor]": anchor, b"expires_after[seconds]": seconds}
    head = b'--b\r\nContent-Disposition: form-data; name="'
    return b"".join(head + name + b'"\r\n\r\n' + value + b"\r\n" for name, value in values.items()) + b"--b--\r\n"


def begin(client: openai.OpenAI, lines: list[dict[str, Any]]) -> Any:
    data = "\n".join(map(json.dumps, lines)).encode()
    expires: Any = {"anchor": "created_at", "seconds": 3600}
    file = client.files.create(file=("lines.jsonl", data), purpose="batch", expires_after=expires)
    assert file.expires_at == file.created_at + 3600
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
        (expiring(b"created_at", b"3599"), FORM, "expires_after[seconds]"),
        (expiring(b"created_at", b"x"), FORM, "expires_after[seconds]"),
        (expiring(b"now", b"3600"), FORM, "expires_after[anchor]"),
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


@pytest.mark.parametrize(
    ("given", "status", "data"),
    [
        ("bytes=2-3", 206, "23"),
        ("bytes=7-", 206, "789"),
        ("bytes=-2", 206, "89"),
        ("bytes=3-2", 200, "0123456789"),
        ("bytes=x", 200, "0123456789"),
        ("lines=1-2", 200, "0123456789"),
        ("bytes=10-", 416, None),
    ],
)
def test_a_part_of_a_file(endpoint: Endpoint, given: str, status: int, data: str | None) -> None:
    file = endpoint.client().files.create(file=("x", b"0123456789"), purpose="batch")
    request = urllib.request.Request(f"{endpoint.url}/v1/files/{file.id}/content", headers={"Range": given})
    found, answer = fetch(request)
    assert found == status
    assert str(answer).zfill(len(data)) == data if data else answer["error"]["param"] == "Range"


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=99999999999", "order=up", "after=file-0"])
@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
def test_lists_are_bounded(endpoint: Endpoint, path: str, query: str) -> None:
    status, answer = endpoint.get(f"{path}?{query}")
    assert (status, answer["error"]["param"]) == (400, query.partition("=")[0])


def test_random_fields_of_a_batch(endpoint: Endpoint) -> None:
    plain = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h"}
    for field in [*BatchRequest.model_fields, "unknown"]:
        for value in random.Random(field).sample(VALUES, 12):
            check(endpoint, "/v1/batches", {**plain, field: value}, field="" if field == "metadata" else field)


def test_random_uploads_paths_and_queries(endpoint: Endpoint) -> None:
    chance, alive = random.Random(3), processes(endpoint)
    names = ["file", "purpose", "odd", "é", ""]
    for _ in range(60):
        parts = []
        for _ in range(chance.randrange(4)):
            head = f'Content-Disposition: form-data; name="{chance.choice(names)}"'
            head += chance.choice(
                ["", '; filename="x"', '; filename="\x00"', "; filename=", f'; filename="{"y" * 5000}"']
            )
            value = chance.choice([b"batch", b"", b"\xff\xfe", b"{}", chance.randbytes(200)])
            parts.append(b"--b\r\n" + head.encode() + chance.choice([b"\r\n\r\n", b"\r\n", b""]) + value + b"\r\n")
        body = b"".join(parts) + chance.choice([b"--b--\r\n", b"--b", b""])
        kind = chance.choice(
            [FORM, FORM, FORM, "multipart/form-data; boundary=", "multipart/form-data; boundary=é", ""]
        )
        assert_shape(*endpoint.post("/v1/files", body, {"Content-Type": kind.encode().decode("latin-1")}))
    for folder in ("files", "batches"):
        for name in ("%00", "..%2f..%2fx", "%ff", "a" * 5000, "file-" + "0" * 32, "batch_" + "0" * 32, "%F0%9F%98%80"):
            for rest in ("", "/content", "/cancel", "/x"):
                assert_shape(*endpoint.get(f"/v1/{folder}/{name}{rest}"))
                assert_shape(*endpoint.post(f"/v1/{folder}/{name}{rest}", b"{}"))
        for query in (
            "limit=%00",
            "limit=1e3",
            "limit=-1",
            "limit=²",
            "after=%ff",
            "order=",
            "purpose=%00",
            "limit=1&limit=x",
        ):
            assert_shape(*endpoint.get(f"/v1/{folder}?{urllib.parse.quote(query, safe='=&%')}"))
    assert_same_processes(alive, lambda: processes(endpoint))


def test_random_lines_fail_a_batch_or_have_their_answers(endpoint: Endpoint) -> None:
    """A batch of what is JSON or not; then one whose lines are well formed and whose bodies are not."""
    chance, client, alive = random.Random(5), endpoint.client(), processes(endpoint)
    wrong = [
        b"\x00",
        b"[]",
        b'"',
        b"{}",
        b'{"custom_id":1}',
        json.dumps(line("a", x="\ud800")).encode(),
        b"\xff",
        b"null",
    ]
    for text in wrong:
        file = client.files.create(file=("x", text), purpose="batch")
        batch = wait(client, client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h"))
        assert batch.status in ("failed", "completed"), (text, batch)
    bodies: list[Any] = [{"messages": random_value(chance, 0)} for _ in range(40)]
    bodies += [{"messages": MESSAGES, name: random_value(chance, 0)} for name in list(ChatRequest.model_fields)[:40]]
    bodies = [body for body in bodies if not body.keys() & {"stream", "priority"} and is_unicode(body)]
    batch = wait(client, begin(client, [line(f"é{n}", **body) for n, body in enumerate(bodies)]))
    assert (batch.status, batch.request_counts.total) == ("completed", len(bodies))
    found = [records(client, one) for one in (batch.output_file_id, batch.error_file_id) if one]
    assert sorted(name for part in found for name in part) == sorted(f"é{n}" for n in range(len(bodies)))
    assert all(one["status_code"] < 500 for part in found for one in part.values())
    assert_same_processes(alive, lambda: processes(endpoint))


def assert_shape(status: int, answer: Any) -> None:
    """Answered, or refused as OpenAI refuses."""
    assert 200 <= status < 500, (status, answer)
    assert status < 400 or set(answer["error"]) == {"message", "type", "param", "code"}, (status, answer)


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
