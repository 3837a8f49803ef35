"""Requests and replies without a server."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest

from client import AsyncClient, Client, ClientError, InvalidRequest, ServerError, errors
from client.connection import parse_url
from client.http_transport import EventParser, ReplyDecoder, _TritonBodies
from client.request import SamplingOptions, build_tensors
from client.results import Collector, Reply, chunks_of


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("max_tokens", "7", "a whole number"),
        ("max_tokens", True, "a whole number"),
        ("max_tokens", 2**31, "a whole number"),
        ("seed", -1, "a whole number from 0"),
        ("temperature", "hot", "a number"),
        ("ignore_eos", 1, "True or False"),
        ("stop", 3, "a string, or a list of strings"),
        ("stop_token_ids", 3, "a list of whole numbers"),
        ("stop", [3], "a string"),
        ("logit_bias", [1], "a mapping"),
        ("chat_template_kwargs", {"a": object()}, "JSON"),
    ],
)
def test_wrong_types_are_named(name: str, value: Any, allowed: str) -> None:
    options: Any = {name: value}
    with pytest.raises(InvalidRequest, match=name) as caught:
        build_tensors("Hallo", None, False, 0, options)
    assert allowed in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"timeout": "5"}, "timeout is '5'; allowed: a number"),
        ({"timeout": float("nan")}, "timeout is nan; allowed: at most 1e+09 seconds; None: no limit"),
        ({"timeout": float("inf")}, "timeout is inf; allowed: at most 1e+09 seconds; None: no limit"),
        ({"timeout": 1e12}, "timeout is 1000000000000.0; allowed: at most 1e+09 seconds; None: no limit"),
        ({"request_id": 5}, "request_id is 5; allowed: a string"),
        ({"messages": "Hallo"}, "messages is a str; allowed: a list of chat messages"),
        ({"messages": {"role": "user", "content": "Hallo"}}, "messages is a dict; allowed: a list of chat messages"),
    ],
)
def test_wrong_types_beside_the_options_are_named(values: dict[str, Any], message: str) -> None:
    with Client("127.0.0.1:9") as client, pytest.raises(InvalidRequest) as caught:  # nothing is sent
        client.generate(None if "messages" in values else "Hallo", **values)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("prompt", {"prompt": "a\udcff"}),
        ("messages", {"messages": [{"role": "user", "content": "a\udcff"}]}),
        ("stop", {"prompt": "a", "stop": ["b", "\ud800"]}),
        ("chat_template_kwargs", {"prompt": "a", "chat_template_kwargs": {"a": "\ud800"}}),
        ("request_id", {"prompt": "a", "request_id": "\ud800"}),
    ],
)
def test_what_is_no_unicode_is_named(name: str, values: dict[str, Any]) -> None:
    with Client("127.0.0.1:9") as client, pytest.raises(InvalidRequest) as caught:  # nothing is sent
        client.generate(**values)
    assert str(caught.value) == f"{name} holds a lone surrogate; allowed: Unicode text"


@pytest.mark.parametrize("scheme", ["grpc", "http"])
@pytest.mark.parametrize("timeout", [0, -1.5, -math.inf])
def test_a_time_that_is_over_is_not_waited_for(scheme: str, timeout: float) -> None:
    with Client(f"{scheme}://127.0.0.1:9", timeout=timeout) as client, pytest.raises(errors.TimedOut):
        client.generate("Hallo")


def test_unknown_options_are_named() -> None:
    options: Any = {"max_token": 3}
    with pytest.raises(TypeError, match=r"max_token.*max_tokens"):
        build_tensors("Hallo", None, False, 0, options)


def test_the_words_of_a_server_of_openais_api() -> None:
    body = '{"error": {"message": "there is no /v2/x here", "type": "invalid_request_error", "param": null}}'
    with pytest.raises(InvalidRequest) as caught:
        _TritonBodies("r").decode(404, body)
    assert caught.value.message == "there is no /v2/x here"


def read_stream(events: list[dict[str, Any]], num_sequences: int) -> int:
    """How many replies a stream of these events has. Raises what its end does."""
    decoder = ReplyDecoder(True, _TritonBodies("r", num_sequences))
    for event in events:
        decoder.feed(f"data: {json.dumps({'text_output': 'a', **event})}\n\n".encode())
    decoder.feed(b"")
    count = 0
    while decoder.next() is not None:
        count += 1
    return count


GOES_ON, STOPS = {"finish_reason": "None"}, {"finish_reason": "stop"}
INDEX_0, INDEX_1 = {"sequence_index": 0}, {"sequence_index": 1}


@pytest.mark.parametrize(
    ("num_sequences", "events"),
    [
        (1, [GOES_ON, STOPS]),
        (1, [{"num_output_tokens": 1}, STOPS]),
        (2, [{**GOES_ON, **INDEX_0}, {**STOPS, **INDEX_1}, {**STOPS, **INDEX_0}]),
        (1, [{"finish_reason": ["None", "stop"]}, {"finish_reason": ["length", "stop"]}]),
        (1, [{}, {}]),  # another model, which knows no finish reasons
        (2, [{}, {}]),
    ],
)
def test_streams_that_are_complete(num_sequences: int, events: list[dict[str, Any]]) -> None:
    assert read_stream(events, num_sequences) == len(events)


@pytest.mark.parametrize(
    ("num_sequences", "events"),
    [
        (1, []),
        (1, [GOES_ON]),
        (1, [{"num_output_tokens": 1}]),
        (2, [{**GOES_ON, **INDEX_0}, {**STOPS, **INDEX_1}]),
        (2, [{**STOPS, **INDEX_1}]),  # of the other sequence nothing has come
        (1, [{"finish_reason": ["None", "stop"]}]),
    ],
)
def test_streams_that_end_early(num_sequences: int, events: list[dict[str, Any]]) -> None:
    with pytest.raises(ServerError, match="ended before the answer was complete") as caught:
        read_stream(events, num_sequences)
    assert caught.value.request_id == "r"


def test_an_error_that_comes_with_some_text_is_behind_it() -> None:
    decoder = ReplyDecoder(True, _TritonBodies("r"))
    events = ({"text_output": "half "}, {"error": "the step failed"})
    decoder.feed(b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in events))
    reply = decoder.next()
    assert reply is not None
    assert reply.outputs["text_output"] == ["half "]
    with pytest.raises(ServerError, match="the step failed"):
        decoder.next()


def test_a_page_instead_of_a_stream() -> None:
    decoder = ReplyDecoder(True, _TritonBodies("r"))
    decoder.feed(b"<html>log in first</html>\n\n")
    decoder.feed(b"")
    with pytest.raises(ServerError, match="ended before the answer was complete"):
        decoder.next()


@pytest.mark.parametrize(("prompt", "messages"), [(None, None), ("a", [{"role": "user", "content": "b"}])])
def test_prompt_or_messages(prompt: str | None, messages: Any) -> None:
    with pytest.raises(InvalidRequest, match="exactly one"):
        build_tensors(prompt, messages, False, 0, SamplingOptions())


def test_every_option_has_a_tensor() -> None:
    samples: dict[str, Any] = {"int": 1, "float": 1.0, "bool": True, "str": "x", "Mapping": {}, "Sequence": []}
    for name, annotation in SamplingOptions.__annotations__.items():
        kind = str(annotation.__forward_arg__ if hasattr(annotation, "__forward_arg__") else annotation)
        value = samples[kind.split("[")[0].split(" |")[0]]
        options: Any = {name: value}
        assert len(build_tensors("x", None, False, 0, options)) == 6, name


@pytest.mark.parametrize(
    ("url", "protocol", "expected"),
    [
        (None, None, ("grpc", "127.0.0.1:8001", False)),
        (None, "http", ("http", "127.0.0.1:8000", False)),
        ("example.org", None, ("grpc", "example.org:8001", False)),
        ("example.org:9", "http", ("http", "example.org:9", False)),
        ("https://example.org/", None, ("http", "example.org:8000", True)),
        ("grpcs://[::1]:443", None, ("grpc", "[::1]:443", True)),
    ],
)
def test_urls(url: str | None, protocol: Any, expected: tuple[str, str, bool]) -> None:
    address = parse_url(url, protocol)
    assert (address.protocol, address.authority, address.secure) == expected


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_events_may_be_split_anywhere(step: int) -> None:
    page = 'data: {"a": "🦜"}\n\n: comment\r\ndata:1\r\ndata: 2\r\n\r\ndata: cut'.encode()
    parser = EventParser()
    events = [event for start in range(0, len(page), step) for event in parser.feed(page[start : start + step])]
    assert events == ['{"a": "🦜"}', "1\n2"]


def test_vllm_style_placeholders_are_nothing() -> None:
    (chunk,) = chunks_of(Reply({"text_output": ["a"], "finish_reason": ["None"], "logprobs": ["null"]}))
    assert chunk.finish_reason is None
    assert chunk.logprobs is None


def test_other_outputs_are_kept() -> None:
    collector = Collector()
    reply = Reply({"text_output": ["a"], "cumulative_logprob": [-1.5], "prompt_logprobs": ["[null, {}]"]})
    for chunk in chunks_of(reply):
        collector.add(chunk)
    result = collector.result("id")
    assert result.extra == {"cumulative_logprob": [-1.5]}
    assert result.prompt_logprobs == [None, {}]
    assert result.num_output_tokens is None


def test_a_bare_final_flag_is_no_chunk() -> None:
    assert chunks_of(Reply({}, final=True)) == []
    assert Collector().result("id").text == ""


@pytest.mark.parametrize(
    ("code", "message", "expected"),
    [
        (400, "in ensemble 'ensemble', max_tokens is 0; allowed: 1 or more", errors.InvalidRequest),
        (400, "in ensemble 'ensemble', request was cancelled", errors.Cancelled),
        (400, "in ensemble 'ensemble', the request was cancelled: its timeout has passed", errors.TimedOut),
        (400, "the engine is not running at the moment; try again in a few seconds", errors.Unavailable),
        (404, "unknown model", errors.InvalidRequest),
        (404, "Request for unknown model: 'ensemble' has no available versions", errors.Unavailable),
        (408, "too slow", errors.TimedOut),
        (418, "teapot", errors.InvalidRequest),
        (500, "oops", errors.ServerError),
        (501, "decoupled", errors.ServerError),
        (502, "<html>Bad Gateway</html>", errors.Unavailable),
        (503, "busy", errors.Unavailable),
        (504, "<html>Gateway Time-out</html>", errors.TimedOut),
    ],
)
def test_http_errors(code: int, message: str, expected: type[errors.ClientError]) -> None:
    error = errors.from_http(code, message)
    assert type(error) is expected
    assert not error.message.startswith("in ensemble")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("unexpected inference input 'x' for model 'ensemble'", errors.InvalidRequest),
        ("[request id: a] expected 3 inputs but got 2 inputs for model 'ensemble'", errors.InvalidRequest),
        ("Request for unknown model: 'x' is not found", errors.InvalidRequest),
        ("Request for unknown model: 'x' has no available versions", errors.Unavailable),
        ("in ensemble 'ensemble', the detokenizer died while it wrote this answer", errors.Unavailable),
        ("request was canceled", errors.Cancelled),
        # What a client wrote is repeated, and may be the words of any error.
        ("logit_bias has 'cancelled': 1.0; allowed: token ids and numbers", errors.InvalidRequest),
        ("request parameter 'queue full' is unknown; allowed: bad_words, max_tokens", errors.InvalidRequest),
        ("messages is 'try again', which is not valid JSON (malformed)", errors.InvalidRequest),
        ("messages: the chat template refuses them: the tool is unavailable", errors.InvalidRequest),
        ('guided_decoding_guide cannot be compiled: Unsupported type "cancelled"', errors.InvalidRequest),
        (
            "guided_decoding_guide takes longer than 1 s to compile, and 8 others that do wait for their turn; try "
            "again later",
            errors.Unavailable,
        ),
        ("something else", errors.ServerError),
    ],
)
def test_errors_without_a_status(message: str, expected: type[errors.ClientError]) -> None:
    assert type(errors.from_message(message)) is expected


def test_nested_ensemble_prefixes_go() -> None:
    error = errors.from_message("in ensemble 'vllm_model', in ensemble 'ensemble', what: in ensemble 'x', y")
    assert error.message == "what: in ensemble 'x', y"


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_closed_client_says_so(protocol: Any) -> None:
    client = Client(protocol=protocol)
    client.close()
    client.close()
    for ask in (client.generate, client.stream, lambda prompt: client.is_live()):
        with pytest.raises(ClientError, match="this client is closed"):
            ask("a prompt")


def test_a_closed_client_of_an_event_loop_says_so() -> None:
    async def use() -> None:
        async with AsyncClient() as client:
            pass
        with pytest.raises(ClientError, match="this client is closed"):
            await client.generate("a prompt")

    asyncio.run(use())
