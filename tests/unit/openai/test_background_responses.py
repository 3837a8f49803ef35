"""Responses in the background: refused at once, streamed from anywhere, cancelled for good."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from minisgl_backend.openai.triton import Prompt
from tests.unit.openai.scripted_app import PATIENCE_SECONDS, Said, ScriptedApp, scripted_app

if TYPE_CHECKING:
    import openai

FULL = "7 requests are waiting, all that max_waiting_requests allows; try again later"
SAID = {
    "hello": Said(["Hi", " there"]),
    "slow": Said(["Hi", 0.3, " there", 0.3, " again"]),
    "long": Said(["Hi", " there"], never_ends=True),
    "full": Said([], error=FULL),
    "wrong": Said([], error="temperature is 101.0; allowed: 0 to 100"),
    "full late": Said([0.5], error=FULL),
    "breaks": Said(["Hi", 0.3], error="something else"),
}


def answer(prompt: Prompt) -> Said:
    assert prompt.messages is not None
    return SAID[prompt.messages[-1]["content"]]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedApp]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minisgl_backend.openai.routes.responses._REFUSAL_SECONDS", 0.2)
        with scripted_app(tmp_path_factory.mktemp("background"), patch, answer) as found:
            yield found


@pytest.fixture(scope="module")
def client(app: ScriptedApp) -> openai.OpenAI:
    import openai

    return openai.OpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_SECONDS)


def until(app: ScriptedApp, response_id: str, is_there: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_there(found := app.ask("GET", f"/v1/responses/{response_id}")[1]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return dict(found)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "status", "code"), [("full", 429, "queue_full"), ("wrong", 400, None)], ids=["full", "wrong"]
)
def test_what_the_server_refuses_is_refused(app: ScriptedApp, said: str, status: int, code: str, stream: bool) -> None:
    found, refused = app.ask("POST", "/v1/responses", {"input": said, "background": True, "stream": stream})
    assert (found, refused["error"]["code"]) == (status, code)


def test_a_refusal_that_comes_late_is_told_by_its_code(app: ScriptedApp) -> None:
    begun = app.ask("POST", "/v1/responses", {"input": "full late", "background": True})[1]
    assert begun["status"] == "in_progress"
    failed = until(app, begun["id"], lambda found: found["status"] != "in_progress")
    assert (failed["status"], failed["error"]["code"]) == ("failed", "rate_limit_exceeded")


def test_a_stream_that_broke_off_goes_on_where_it_was(client: openai.OpenAI) -> None:
    stream = client.responses.create(model="demo", input="slow", background=True, stream=True)
    first = []
    for event in stream:
        first.append(event)
        if event.type == "response.output_text.delta":
            break
    stream.close()
    response_id = first[0].response.id  # type: ignore[union-attr]
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=first[-1].sequence_number))
    events = [*first, *rest]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hi there again"
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == "Hi there again"
    assert [event.type for event in client.responses.retrieve(response_id, stream=True)] == [e.type for e in events]
    assert list(client.responses.retrieve(response_id, stream=True, starting_after=len(events) - 1)) == []
    assert client.responses.retrieve(response_id).status == "completed"


def test_a_stream_ends_with_what_the_response_ended_with(app: ScriptedApp) -> None:
    asked = {"input": "breaks", "background": True, "stream": True}
    *_, last = app.events("POST", "/v1/responses", asked)
    assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "server_error")
    begun = app.ask("POST", "/v1/responses", {"input": "long", "background": True})[1]
    assert app.ask("POST", f"/v1/responses/{begun['id']}/cancel")[1]["status"] == "cancelled"
    for _ in range(20):
        assert app.ask("GET", f"/v1/responses/{begun['id']}")[1]["status"] == "cancelled"
        time.sleep(0.02)
    ended = until(app, begun["id"], lambda found: bool(found["output"]))
    assert (ended["status"], ended["output"][0]["content"][0]["text"]) == ("cancelled", "Hi there")


def test_a_stream_of_one_that_is_cancelled_ends(app: ScriptedApp, client: openai.OpenAI) -> None:
    stream = client.responses.create(model="demo", input="long", background=True, stream=True)
    kinds = []
    for event in stream:
        kinds.append(event.type)
        if event.type == "response.created":
            client.responses.cancel(event.response.id)
    assert kinds[-1] == "response.cancelled"
    begun = app.events("POST", "/v1/responses", {"input": "hello", "background": True, "stream": True})[0]["response"]
    assert app.ask("DELETE", f"/v1/responses/{begun['id']}")[0] == 200
    assert app.ask("GET", f"/v1/responses/{begun['id']}?stream=true")[0] == 404


def test_events_that_are_not_kept_are_refused(app: ScriptedApp) -> None:
    plain = app.ask("POST", "/v1/responses", {"input": "hello"})[1]
    path = f"/v1/responses/{plain['id']}"
    for query, param in (("stream=true", "stream"), ("starting_after=3", "starting_after"), ("stream=x", "stream")):
        status, refused = app.ask("GET", f"{path}?{query}")
        assert (status, refused["error"]["param"]) == (400, param), refused
    assert app.ask("GET", f"{path}?stream=false")[1] == plain
