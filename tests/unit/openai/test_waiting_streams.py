"""A stream says something at least every ten seconds, whatever it waits for; by a clock that jumps."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from minisgl_backend.host.options.endpoint import EndpointSettings
from minisgl_backend.openai.answers import Answer, Header
from minisgl_backend.openai.anthropic import MessagesAnswer
from minisgl_backend.openai.app import create_app
from minisgl_backend.openai.chat import ChatAnswer
from minisgl_backend.openai.completions import CompletionAnswer
from minisgl_backend.openai.encoding import encode
from minisgl_backend.openai.endpoint import Endpoint
from minisgl_backend.openai.errors import ApiError, ClientLeft
from minisgl_backend.openai.requests.chat import ChatRequest
from minisgl_backend.openai.requests.completions import CompletionRequest
from minisgl_backend.openai.requests.responses import ResponsesRequest
from minisgl_backend.openai.responses import ResponseAnswer
from minisgl_backend.openai.triton import Delta, ModelInfo, RequestContext
from tests.unit.openai.jumping_clock import run

LONGEST = 10.0  # seconds without a byte
MESSAGES = [{"role": "user", "content": "hello"}]
HEADER = Header("id", 0, "m")
Step = tuple[float, str | ApiError]  # seconds that it takes, and what comes then


class Slow:
    """A generation that takes its time."""

    num_prompt_tokens, num_output_tokens, num_cached_tokens, num_image_tokens = 1, 2, None, 0
    has_special_tokens = False

    def __init__(self, *steps: Step) -> None:
        self._steps = list(steps)
        self._left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.was_cancelled = False

    async def next(self) -> Delta | None:
        if not self._steps:
            return None
        seconds, told = self._steps.pop(0)
        await asyncio.wait([self._left], timeout=seconds)
        if self.was_cancelled:
            raise ClientLeft
        if isinstance(told, ApiError):
            raise told
        return Delta(0, told, 1, None if self._steps else "stop", ())

    async def begin(self, seconds: float) -> None:
        pass

    def cancel(self) -> None:
        self.was_cancelled = True
        self._left.set_result(None)

    async def drain(self) -> None:
        pass


def chat(generation: Any) -> Answer:
    return ChatAnswer(ChatRequest.model_validate({"messages": MESSAGES}), generation, HEADER, None)


def completion(generation: Any) -> Answer:
    return CompletionAnswer(CompletionRequest.model_validate({"prompt": "hello"}), [generation], HEADER, None)


def response(generation: Any) -> Answer:
    return ResponseAnswer(ResponsesRequest.model_validate({"input": "hello"}), generation, HEADER, None)


def message(generation: Any) -> Answer:
    return MessagesAnswer(generation, HEADER, None)


ANSWERS = (chat, completion, response, message)
Sent = tuple[float, dict[str, Any]]  # when, and what


async def sent(generation: Slow, answer: Answer, leaves_after: float | None = None) -> Sequence[Sent]:
    """All that the client is sent; raises what is answered with a status instead."""
    loop, found = asyncio.get_running_loop(), []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(1e9 if leaves_after is None else leaves_after)
        return {"type": "http.disconnect"}

    async def send(part: Any) -> None:
        found.append((loop.time(), part))

    request = Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)

    async def start() -> Any:
        return answer, [generation]

    context = RequestContext("id")
    reply = await Endpoint(EndpointSettings()).respond(request, start, answer, stream=True, context=context)
    await reply(request.scope, receive, send)
    return found


def told(steps: Sequence[Step], make: Callable[[Any], Answer]) -> tuple[Sequence[float], str]:
    """(when something was sent, the body)."""

    async def work() -> Sequence[Sent]:
        generation = Slow(*steps)
        return await sent(generation, make(generation))

    found = run(work())
    assert found[0][1]["type"] == "http.response.start"
    return [0.0, *(when for when, _ in found)], body_of(found)


def body_of(found: Sequence[Sent]) -> str:
    return b"".join(part.get("body", b"") for _, part in found).decode()


def events(body: str) -> Sequence[tuple[str, Any]]:
    """(name, data) of those that are no comments."""
    found = []
    for block in body.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":"))
        if fields:
            data = fields["data"]
            found.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return found


@pytest.mark.parametrize("make", ANSWERS)
@pytest.mark.parametrize("steps", [[(60.0, "Hi")], [(0.0, "Hi"), (200.0, " there")], [(9.0, "a")] * 4])
def test_no_silence_is_long(make: Callable[[Any], Answer], steps: Sequence[Step]) -> None:
    times, body = told(steps, make)
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) <= LONGEST
    assert times[-1] == sum(seconds for seconds, _ in steps)
    found, expected = events(body), events(told([(0.0, text) for _, text in steps], make)[1])
    if make is message:
        assert ("ping", {"type": "ping"}) in found
    else:
        assert ": keep-alive\n\n" in body
    if make is response:
        ours = [[event["type"] for _, event in one] for one in (found, expected)]
        assert ours[0] == ours[1]
    else:
        assert [one for one in found if one[0] != "ping"] == expected


@pytest.mark.parametrize("make", ANSWERS)
def test_an_answer_without_pauses_has_no_signs_of_life(make: Callable[[Any], Answer]) -> None:
    body = told([(1.0, "a")] * 30, make)[1]
    assert "keep-alive" not in body
    assert "ping" not in body


@pytest.mark.parametrize("make", ANSWERS)
def test_an_early_error_is_a_status_and_a_late_one_an_event(make: Callable[[Any], Answer]) -> None:
    full = ApiError(429, "full")
    with pytest.raises(ApiError) as raised:
        told([(1.0, full)], make)
    assert raised.value is full
    late: Sequence[Sequence[Step]] = ([(60.0, full)], [(0.0, "Hi"), (60.0, full)])
    for steps in late:
        found = [one for one in events(told(steps, make)[1]) if one[0] != "ping"]
        name, last = found[-1]
        if make is response:
            assert [event["type"] for _, event in found[:2]] == ["response.created", "response.in_progress"]
            assert [event["sequence_number"] for _, event in found] == list(range(len(found)))
            assert (name, last["response"]["error"]["message"]) == ("response.failed", "full")
        else:
            assert last["error"]["message"] == "full"
            assert name == ("error" if make is message else "")


@pytest.mark.parametrize("seconds", [1.0, 33.0])
def test_a_client_that_leaves_while_it_waits_ends_its_generation(seconds: float) -> None:
    async def work() -> tuple[Slow, Sequence[Sent]]:
        generation = Slow((300.0, "Hi"))
        return generation, await sent(generation, chat(generation), leaves_after=seconds)

    generation, found = run(work())
    assert generation.was_cancelled
    assert found[-1][0] <= seconds
    assert not any(b"Hi" in part.get("body", b"") for _, part in found)


class SlowServer:
    """Takes `seconds` for all that comes before a generation: the model's information and the prompt's tokens."""

    def __init__(self, seconds: float, fails: bool) -> None:
        self._seconds, self._fails = seconds, fails
        self.started: list[Slow] = []
        self.given_up = 0

    async def _wait(self) -> None:
        try:
            await asyncio.sleep(self._seconds)
        except asyncio.CancelledError:
            self.given_up += 1
            raise

    async def model_info(self) -> ModelInfo:
        await self._wait()
        return ModelInfo("m", max_model_len=4096, vocab_size=9, chat_template="<think></think>", added_tokens=[])

    async def tokenize(self, *_: Any) -> dict[str, Any]:
        await self._wait()
        if self._fails:
            raise ApiError(400, "too long", param="messages")
        return {"input_ids": [5], "prompt_tail": [b""], "prompt_text": [b"hello"], "token_texts": [b"hello"]}

    def start(self, *_: Any, **__: Any) -> Any:
        self.started.append(Slow((1.0, "Hi")))
        return self.started[-1]

    async def close(self) -> None:
        pass


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": [5], "echo": True},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9, "stop_sequences": ["x"]},
}


def posted(
    server: SlowServer,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    leaves_after: float = 1e9,
    state_folder: str = "",
    **fields: Any,
) -> list[Sent]:
    """All that the application sends to a streaming request."""
    monkeypatch.setattr("minisgl_backend.openai.endpoint.TritonServer", lambda *_, **__: server)
    body = json.dumps({**BODIES[path], "stream": True, "temperature": 0.5, **fields}).encode()
    settings = EndpointSettings(max_files_bytes=0, state_folder=state_folder)

    async def work() -> list[Sent]:
        loop, unread, found = asyncio.get_running_loop(), [body], []

        async def receive() -> dict[str, Any]:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await asyncio.sleep(leaves_after)
            return {"type": "http.disconnect"}

        async def send(part: Any) -> None:
            found.append((loop.time(), part))

        app = create_app(settings)
        head = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": head}
        async with app.router.lifespan_context(app):
            await app(scope, receive, send)
        return found

    return run(work())


@pytest.mark.parametrize("path", BODIES)
def test_no_silence_is_long_before_a_generation_starts(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = (posted(SlowServer(seconds, fails=False), path, monkeypatch) for seconds in (25.0, 1.0))
    times = [0.0, *(when for when, _ in slow)]
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) <= LONGEST
    assert times[-1] >= 50.0
    assert "keep-alive" in body_of(slow) or "ping" in body_of(slow)
    names = [[name for name, _ in events(body_of(found)) if name != "ping"] for found in (slow, fast)]
    assert names[0] == names[1]
    assert "Hi" in body_of(slow)


def test_a_response_in_the_background_streams_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[str, Any] = {"state_folder": str(tmp_path), "background": True}
    found = posted(SlowServer(25.0, fails=False), "/v1/responses", monkeypatch, **kept)
    times = [0.0, *(when for when, _ in found)]
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) <= LONGEST
    assert events(body_of(found))[-1][0] == "response.completed"
    late = posted(SlowServer(25.0, fails=True), "/v1/responses", monkeypatch, **kept)
    ((name, last),) = events(body_of(late))
    assert (name, last["message"]) == ("error", "too long")


@pytest.mark.parametrize("path", BODIES)
def test_an_error_before_a_generation_starts(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    early = posted(SlowServer(1.0, fails=True), path, monkeypatch)
    assert early[0][1]["status"] == 400
    late = posted(SlowServer(25.0, fails=True), path, monkeypatch)
    assert late[0][1]["status"] == 200
    found = [(name, event) for name, event in events(body_of(late)) if name != "ping"]
    names, last = [name for name, _ in found], found[-1][1]
    if path == "/v1/responses":
        assert names == ["response.created", "response.in_progress", "response.failed"]
        last = last["response"]
    else:
        assert names == ["error" if path == "/v1/messages" else ""]
    assert "too long" in last["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("seconds", [1.0, 12.0, 33.0])
def test_a_client_that_leaves_before_a_generation_starts(
    path: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = SlowServer(25.0, fails=False)
    posted(server, path, monkeypatch, leaves_after=seconds)
    assert (server.given_up, server.started) == (1, [])


def test_an_event_is_one_line_for_every_reader() -> None:
    text = "".join(map(chr, range(0x3000)))
    assert len(encode({"text": text}).decode().splitlines()) == 1
    assert json.loads(encode({text[1:]: [text]})) == {text[1:]: [text]}
    assert encode("é–") == '"é–"'.encode()
