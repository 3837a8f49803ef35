"""/v1/messages/batches through the package `anthropic`, before a model that says what the test wants."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from minisgl_backend.openai.batches.batches import BatchStore
from minisgl_backend.openai.batches.files import FileStore
from minisgl_backend.openai.batches.message_results import write_results
from minisgl_backend.openai.requests.batches import message_lines
from minisgl_backend.openai.triton import Prompt
from tests.unit.openai.scripted_app import PATIENCE_SECONDS, Said, ScriptedApp, scripted_app

if TYPE_CHECKING:
    import anthropic

MODEL = {"model": "demo", "max_tokens": 50}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "\\ud800"}}\n</tool_call>'
TOOLS = [{"name": "f", "input_schema": {"type": "object"}}]


def answer(prompt: Prompt) -> Said:
    assert prompt.messages is not None
    text = prompt.messages[-1]["content"]
    if text == "long":
        return Said(["Hi"], never_ends=True)
    return Said([CALL if text == "call" else f"You said {text}"])


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedApp]:
    folder = tmp_path_factory.mktemp("batches")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minisgl_backend.openai.batches.batch_runner.POLL_INTERVAL", 0.05)
        values = {"files_folder": str(folder / "files"), "tool_call_parser": "hermes", "max_body_bytes": 10_000}
        with scripted_app(folder, patch, answer, **values) as found:
            yield found


@pytest.fixture(scope="module")
def client(app: ScriptedApp) -> anthropic.Anthropic:
    import anthropic

    return anthropic.Anthropic(base_url=app.url, api_key="none", max_retries=0, timeout=PATIENCE_SECONDS)


def request(custom_id: str, text: str, **values: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return {"custom_id": custom_id, "params": {**MODEL, "messages": messages, **values}}


def ended(client: anthropic.Anthropic, batch: Any) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while batch.processing_status != "ended":
        assert time.monotonic() < deadline
        time.sleep(0.05)
        batch = client.messages.batches.retrieve(batch.id)
    return batch


def test_a_batch_from_beginning_to_end(app: ScriptedApp, client: anthropic.Anthropic) -> None:
    import anthropic

    batches = client.messages.batches
    asked = [request("a", "one"), request("b", "two", temperature="hot"), request("c", "call", tools=TOOLS)]
    begun = batches.create(requests=asked)
    assert (begun.type, begun.id[:9], begun.results_url, begun.ended_at) == ("message_batch", "msgbatch_", None, None)
    assert begun.request_counts.model_dump()["processing"] == 3
    assert (begun.expires_at - begun.created_at).total_seconds() == 24 * 3600
    batch = ended(client, begun)
    counts = {"processing": 0, "succeeded": 2, "errored": 1, "canceled": 0, "expired": 0}
    assert batch.request_counts.model_dump() == counts
    assert batch.ended_at is not None
    results = {one.custom_id: one.result for one in batches.results(batch.id)}
    assert results["a"].message.content[0].text == "You said one"  # type: ignore[union-attr]
    assert results["a"].message.stop_reason == "end_turn"  # type: ignore[union-attr]
    assert results["c"].message.content[0].input == {"a": "\ud800"}  # type: ignore[union-attr]
    failed: Any = results["b"]
    assert (failed.type, failed.error.error.type) == ("errored", "invalid_request_error")
    assert failed.error.error.message == "temperature is 'hot'; allowed: a number"
    # Neither it nor its files are among those of OpenAI's API.
    assert app.ask("GET", "/v1/batches")[1]["data"] == app.ask("GET", "/v1/files")[1]["data"] == []
    assert app.ask("GET", f"/v1/batches/{batch.id.removeprefix('msg')}")[0] == 404
    deleted = batches.delete(batch.id)
    assert (deleted.id, deleted.type) == (batch.id, "message_batch_deleted")
    with pytest.raises(anthropic.NotFoundError, match="no batch of messages"):
        batches.retrieve(batch.id)


def test_what_a_cancelled_batch_did_not_do_is_canceled(client: anthropic.Anthropic) -> None:
    import anthropic

    batches = client.messages.batches
    begun = batches.create(requests=[request(str(number), "long" if number else "one") for number in range(20)])
    with pytest.raises(anthropic.BadRequestError, match="in progress"):
        batches.delete(begun.id)
    assert begun.results_url is None
    stopped = batches.cancel(begun.id)
    assert stopped.processing_status == "canceling"
    assert stopped.cancel_initiated_at is not None
    batch = ended(client, stopped)
    found = [one.result.type for one in batches.results(batch.id)]
    assert len(found) == 20
    assert found.count("canceled") == batch.request_counts.canceled >= 19
    with pytest.raises(anthropic.BadRequestError, match="has ended"):
        batches.cancel(batch.id)


def test_lists_go_on_in_both_directions(client: anthropic.Anthropic) -> None:
    batches = client.messages.batches
    for batch in list(batches.list(limit=1000)):
        batches.delete(ended(client, batch).id)
    made = [ended(client, batches.create(requests=[request("a", "one")])).id for _ in range(3)]
    # Those of one second are in the order of their ids.
    ids = [batch.id for batch in batches.list(limit=2)]
    assert sorted(ids) == sorted(made)
    page = batches.list(limit=1)
    assert (page.has_more, page.first_id, page.last_id) == (True, ids[0], ids[0])
    assert [batch.id for batch in batches.list(limit=5, after_id=ids[0]).data] == ids[1:]
    before = batches.list(limit=1, before_id=ids[2])
    assert ([batch.id for batch in before.data], before.has_more) == (ids[1:2], True)
    assert [batch.id for batch in batches.list(limit=9, before_id=ids[2]).data] == ids[:2]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"requests": []}, "requests has 0 entries; allowed: 1 to 100000"),
        ({}, "requests: Object missing required field `requests`"),
        ({"requests": [request("a", "x"), request("a", "y")]}, "requests[1].custom_id is 'a', as that of another"),
        ({"requests": [request("a b", "x")]}, "requests[0].custom_id is 'a b'; allowed: 1 to 64 letters"),
        ({"requests": [request("", "x")]}, "requests[0].custom_id is ''"),
        ({"requests": [request("a", "x", stream=True)]}, "requests[0].params.stream is given"),
        ({"requests": [{"custom_id": "a", "params": []}]}, "requests[0].params: "),
        ({"requests": [{"custom_id": "a"}]}, "requests: "),
        ({"requests": [request("a", "x" * 10_000)]}, "requests[0] is longer than 10000 bytes"),
    ],
)
def test_what_is_no_batch_is_refused_at_once(app: ScriptedApp, body: Any, told: str) -> None:
    status, refused = app.ask("POST", "/v1/messages/batches", body)
    assert (status, refused["type"], refused["error"]["type"]) == (400, "error", "invalid_request_error")
    assert refused["error"]["message"].startswith(told)


def test_a_list_that_cannot_be_is_refused(app: ScriptedApp) -> None:
    for query in ("limit=0", "limit=1001", "limit=x", "after_id=msgbatch_1", "after_id=a&before_id=b"):
        status, refused = app.ask("GET", f"/v1/messages/batches?{query}")
        assert (status, refused["error"]["type"]) == (400, "invalid_request_error")
        assert refused["error"]["message"].startswith(query.split("&")[-1].split("=")[0])


def test_a_body_of_several_lines_is_one_line_a_request(tmp_path: Path) -> None:
    """And of a batch that ends otherwise than by itself, each request has a result."""
    body = json.dumps({"requests": [request(name, "x\ny") for name in "abcd"]}, indent=2).encode()
    lines = message_lines(body, 1000)
    assert [json.loads(line)["custom_id"] for line in lines] == list("abcd")
    assert all(line.count(b"\n") == 1 for line in lines)
    files = FileStore(tmp_path, 1 << 20)
    batch: dict[str, Any] = {name: FileStore.new_id() for name in ("_output", "_errors", "_results")}
    batch |= {"input_file_id": files.add_unseen(lines), "errors": {"data": [{"message": "no room"}]}}
    files.data(batch["_output"]).write_text(
        '{"custom_id": "a", "result": {"type": "succeeded"}}\n{"custom_id": "b", "resp'
    )
    files.data(batch["_errors"]).write_text('{"custom_id": "d", "result": {"type": "expired"}}\n')
    for status, kind in (("failed", "errored"), ("cancelled", "canceled"), ("expired", "expired")):
        counts = write_results(batch, status, files)
        told = [json.loads(line) for line in files.data(batch["_results"]).read_text().splitlines()]
        types = {one["custom_id"]: one["result"]["type"] for one in told}
        assert types == {"a": "succeeded", "d": "expired", "b": kind, "c": kind}
        assert sum(counts.values()) == 4
        if status == "failed":
            assert told[-1]["result"]["error"]["error"] == {"type": "api_error", "message": "no room"}
    assert BatchStore(tmp_path / "batches").all() == []
