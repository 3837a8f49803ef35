"""A stream says something at least every ten seconds, whatever it waits for; by a clock that jumps."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from starlette.requests import Request

from minisgl_backend.host.openai_endpoint import EndpointSettings
from minisgl_backend.openai.answers import Answer, Header
from minisgl_backend.openai.anthropic import MessagesAnswer
from minisgl_backend.openai.app import Endpoint
from minisgl_backend.openai.chat import ChatAnswer
from minisgl_backend.openai.completions import CompletionAnswer
from minisgl_backend.openai.errors import ApiError, ClientLeft
from minisgl_backend.openai.requests.chat import ChatRequest
from minisgl_backend.openai.requests.completions import CompletionRequest
from minisgl_backend.openai.requests.responses import ResponsesRequest
from minisgl_backend.openai.responses import ResponseAnswer
from minisgl_backend.openai.sse import encode
from minisgl_backend.openai.triton import Delta, RequestContext
from tests.unit.openai.jumping_clock import run

LONGEST = 10.0  # seconds without a byte
MESSAGES = [{"role": "user", "content": "hello"}]
HEADER = Header("id", 0, "m")
Step = tuple[float, str | ApiError]  # seconds that it takes, and what comes then


class Slow:
    """A generation that takes its time."""

    num_prompt_tokens, num_output_tokens, num_cached_tokens = 1, 2, None
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
    given: Any = [generation]
    context = RequestContext("id")
    reply = await Endpoint(EndpointSettings()).respond(request, answer, given, stream=True, context=context)
    await reply(request.scope, receive, send)
    return found


def told(steps: Sequence[Step], make: Callable[[Any], Answer]) -> tuple[Sequence[float], str]:
    """(when something was sent, the body)."""

    async def work() -> Sequence[Sent]:
        generation = Slow(*steps)
        return await sent(generation, make(generation))

    found = run(work())
    assert found[0][1]["type"] == "http.response.start"
    return [0.0, *(when for when, _ in found)], b"".join(part.get("body", b"") for _, part in found).decode()


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


def test_an_event_is_one_line_for_every_reader() -> None:
    text = "".join(map(chr, range(0x3000)))
    assert len(encode({"text": text}).decode().splitlines()) == 1
    assert json.loads(encode({text[1:]: [text]})) == {text[1:]: [text]}
    assert encode("é–") == '"é–"'.encode()
