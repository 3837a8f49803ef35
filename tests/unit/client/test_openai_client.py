"""Streams of OpenAI's API, from servers that differ in what they tell and how they fail."""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import islice
from typing import Any

import pytest
from fake_openai import PIECES, TOKENS_PER_PIECE, Script

from client.errors import Cancelled, ClientError, InvalidRequest, ServerError, Unavailable
from client.openai_client import AsyncOpenAIClient, OpenAIClient, OpenAIServer
from client.results import Result

QUESTION = [{"role": "user", "content": "Hallo"}]
WAIT = 20.0


def ask(url: str, way: str, **given: Any) -> Result:
    """The whole answer, from the client for threads or that for an event loop."""
    if way == "sync":
        with OpenAIClient(url) as client, client.stream(**given) as stream:
            return stream.result()

    async def run() -> Result:
        async with AsyncOpenAIClient(OpenAIServer.parse(url), "first") as client, client.stream(**given) as stream:
            return await stream.result()

    return asyncio.run(run())


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("usage", ["last", "each"])
@pytest.mark.parametrize("given", [{"prompt": "Hallo"}, {"messages": QUESTION}], ids=["text", "chat"])
def test_text_and_the_servers_counts(openai_url: str, script: Script, way: str, usage: str, given: Any) -> None:
    script.usage = usage
    result = ask(openai_url, way, **given, max_tokens=7, stop=["x"])
    assert (result.text, result.finish_reason) == ("".join(PIECES), "stop")
    assert (result.num_input_tokens, result.num_output_tokens) == (7, TOKENS_PER_PIECE * len(PIECES))
    assert result.extra["num_cached_tokens"] == [3]
    sent = script.requests[0]
    assert (sent["model"], sent["max_tokens"], sent["stop"], sent["stream"]) == ("first", 7, ["x"], True)
    assert sent["stream_options"] == {"include_usage": True}
    assert sent["path"] == ("/v1/chat/completions" if "messages" in given else "/v1/completions")


def test_a_server_that_counts_nothing(openai_url: str, script: Script) -> None:
    script.usage = "none"
    result = ask(openai_url, "sync", messages=QUESTION)
    assert (result.text, result.num_input_tokens, result.num_output_tokens) == ("".join(PIECES), None, None)


@pytest.mark.parametrize("parts", [False, True])
def test_thoughts_are_no_text(openai_url: str, script: Script, parts: bool) -> None:
    script.reasoning, script.parts = "Hm.", parts
    with OpenAIClient(openai_url) as client:
        chunks = list(client.stream(messages=QUESTION))
    assert [chunk.extra.get("reasoning_content") for chunk in chunks][:2] == [["Hm."], None]
    assert "".join(chunk.text for chunk in chunks) == "".join(PIECES)


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize(
    ("failure", "kind", "words"),
    [
        ("in the stream", Unavailable, "the engine died"),
        ("cut", ServerError, "ended before the answer was complete"),
        ("html", Unavailable, "Bad Gateway"),
    ],
)
def test_failures(openai_url: str, script: Script, way: str, failure: str, kind: type[ClientError], words: str) -> None:
    script.failure = failure
    with pytest.raises(kind, match=words):
        ask(openai_url, way, messages=QUESTION)


def test_keys_and_models(openai_url: str, script: Script) -> None:
    client = OpenAIClient(openai_url.removesuffix("/v1"), "second", api_key="secret")
    list(client.stream("Hallo"))
    assert (script.requests[0]["model"], script.keys) == ("second", ["Bearer secret"])
    assert "secret" not in repr(client.server)
    assert client.server.models() == ["first", "second"]


@pytest.mark.parametrize("models", [None, [], 1])
def test_a_server_that_names_no_model(openai_url: str, script: Script, models: Any) -> None:
    script.models = models
    with pytest.raises(ServerError, match="names no model; name one"):
        OpenAIClient(openai_url)


def test_white_space_around_a_key_is_left_out() -> None:
    assert OpenAIServer.parse("host", " secret\r\n").headers == {"Authorization": "Bearer secret"}
    assert OpenAIServer.parse("host", " \n").headers == {}


@pytest.mark.parametrize("key", ["sec\nret", "sec\x1bret", "secrét"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ValueError, match="allowed: printable ASCII") as caught:
        OpenAIServer.parse("host", key)
    assert "sec" not in str(caught.value)


def test_leaving_a_stream_closes_its_connection(openai_url: str, script: Script) -> None:
    script.endless = True
    with OpenAIClient(openai_url) as client:
        for chunk in client.stream(messages=QUESTION):
            if chunk.text == "2 ":
                break
    assert script.left.wait(WAIT)


def test_closing_a_client_ends_its_streams(openai_url: str, script: Script) -> None:
    async def use() -> None:
        client = AsyncOpenAIClient(OpenAIServer.parse(openai_url), "first")
        stream = client.stream(messages=QUESTION)
        await stream.__anext__()
        reader = asyncio.ensure_future(stream.result())
        await asyncio.sleep(0.05)
        await client.close()
        with pytest.raises(Cancelled):
            await asyncio.wait_for(reader, WAIT)

    script.endless = True
    asyncio.run(use())
    with OpenAIClient(openai_url) as client:
        next(stream := client.stream(messages=QUESTION))
    with pytest.raises(Cancelled):
        deque(islice(stream, 1000))


@pytest.mark.parametrize(
    ("url", "base", "path"),
    [
        ("127.0.0.1:9000", "http://127.0.0.1:9000", "/v1"),
        ("https://host", "https://host:443", "/v1"),
        ("http://host:1/openai/v1/", "http://host:1", "/openai/v1"),
        ("[::1]:80", "http://[::1]:80", "/v1"),
    ],
)
def test_urls(url: str, base: str, path: str) -> None:
    server = OpenAIServer.parse(url)
    assert (server.base_url, server.path) == (base, path)


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://host:port", "http://host/v1?x=1", "a:b@host"])
def test_wrong_urls(url: str) -> None:
    with pytest.raises(ValueError, match="allowed: http://HOST:PORT"):
        OpenAIServer.parse(url)


def test_nobody_answers() -> None:
    with pytest.raises(Unavailable, match=r"cannot connect to 127\.0\.0\.1:1"):
        OpenAIClient("127.0.0.1:1")
    with pytest.raises((Unavailable, InvalidRequest)):
        list(OpenAIClient("127.0.0.1:1", "named").stream("Hallo"))


def test_a_time_that_nobody_can_wait(openai_url: str) -> None:
    with OpenAIClient(openai_url, timeout=1e12) as client, pytest.raises(InvalidRequest, match="timeout"):
        client.stream("Hallo")
