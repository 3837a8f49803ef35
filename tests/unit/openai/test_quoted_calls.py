"""Calls that quote calls and stop texts, as chats, messages and responses: whole and streamed, by every tool_choice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from minisgl_backend.host.options.endpoint import EndpointSettings
from minisgl_backend.openai.answers import Header
from minisgl_backend.openai.anthropic import MessagesAnswer
from minisgl_backend.openai.chat import ChatAnswer
from minisgl_backend.openai.endpoint import Endpoint
from minisgl_backend.openai.message import Fields, MessageParser
from minisgl_backend.openai.model import ServedModel
from minisgl_backend.openai.requests.chat import ChatRequest
from minisgl_backend.openai.requests.responses import ResponsesRequest
from minisgl_backend.openai.responses import ResponseAnswer
from minisgl_backend.openai.triton import Delta, RequestContext
from tests.unit.openai.test_messages_answer import Said
from tests.unit.openai.test_model import Rendering
from tests.unit.parsers.formats import WRITERS, Call
from tests.unit.parsers.quoted import STOP_WORD, is_json, offered, outer_calls, quoted

NAMED = {"type": "function", "function": {"name": "write"}}
CHOICES = {"auto": "auto", "required": "required", "named": NAMED}
MARKS = {"mistral, names": "[ARGS]", "mistral, ids": "[ARGS]"}  # of the template, which the forced form depends on
PAIRS = [
    pytest.param(outer, inner, choice, strict, marks=[] if is_common else [pytest.mark.full])
    for outer in sorted(WRITERS)
    for inner in sorted(WRITERS)
    for choice in CHOICES
    for strict in (False, True)
    if (is_common := outer == inner and choice == "auto" and not strict) or not strict or outer == inner
]


def chat(written: str, choice: str, *, strict: bool = False, **fields: Any) -> tuple[MessageParser, str]:
    """A new parser of a chat's answer, and what a grammar makes of it: a kind of guided decoding, or nothing."""

    async def start() -> tuple[MessageParser, str]:
        settings = EndpointSettings(port=0, tool_call_parser=WRITERS[written][0], reasoning_parser="none")
        endpoint, server = Endpoint(settings), Rendering(MARKS.get(written, ""), "")
        endpoint.triton, endpoint.model = server, ServedModel(server, settings)  # type: ignore[assignment, arg-type]
        tools = offered()
        for tool in tools:
            tool["function"]["strict"] = strict
        given: Any = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": CHOICES[choice]}
        body = ChatRequest(**given, **fields)
        _, parsers = await endpoint.start_chat(body, RequestContext("1"), body.names(), figures=False)
        assert parsers is not None
        return parsers[0], next(iter(server.started[-1][1].get("guided_decoding", ())), "")

    return asyncio.run(start())


def answer_of(written: str, choice: str, guided: str, calls: Sequence[Call]) -> str:
    """What the model writes."""
    if guided != "json":
        return WRITERS[written][1](calls)
    if choice == "named":
        return json.dumps(calls[0][1])
    return json.dumps([{"name": name, "parameters": arguments} for name, arguments in calls])


def message_of(parser: MessageParser, pieces: Sequence[str], reason: str, *, is_whole: bool) -> dict[str, Any]:
    if is_whole:
        parser.tell_at_end()
    fields = Fields()
    for number, piece in enumerate(pieces):
        fields.add(parser.feed(Delta(0, piece, 1, reason if number == len(pieces) - 1 else None, ())))
    return fields.message()


def calls_of(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]


@pytest.mark.parametrize(("outer", "inner", "choice", "strict"), PAIRS)
def test_what_an_argument_quotes_is_text(
    outer: str, inner: str, choice: str, strict: bool, pytestconfig: pytest.Config
) -> None:
    every = 7 if pytestconfig.getoption("--full", default=False) and outer == inner else 31
    parser, guided = chat(outer, choice, strict=strict)
    for what, text in quoted(outer, inner):
        calls = next(iter(outer_calls(text)))
        answer = answer_of(outer, choice, guided, calls)

        def read(pieces: Sequence[str], reason: str = "stop", *, is_whole: bool = True) -> dict[str, Any]:
            return message_of(chat(outer, choice, strict=strict)[0], pieces, reason, is_whole=is_whole)

        whole = read([answer])
        found = [(name, json.loads(arguments)) for name, arguments in calls_of(whole)]
        assert found in (calls, []), (what, found)
        assert found or whole["content"].split() == answer.split()
        streamed = read(list(answer), is_whole=False)
        if calls_of(streamed) != calls_of(whole):  # the beginning of a call that turned out to be none
            assert not is_json(calls_of(streamed)[-1][1]), what
        else:
            assert streamed["content"] == whole["content"], what
        for place in range(1, len(answer), every):
            cut = read([answer[:place]], "length")
            found = [(name, json.loads(arguments)) for name, arguments in calls_of(cut)]
            assert found in (calls, []), (what, answer[:place])
            streamed = read(list(answer[:place]), "length", is_whole=False)
            assert all(arguments == "" or not is_json(arguments) for _, arguments in calls_of(streamed)) or found
    assert parser.has_calls is False


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("written", sorted(WRITERS))
def test_a_stop_text_within_a_call_ends_the_answer_without_one(written: str, choice: str) -> None:
    """In all three APIs, whole and streamed; behind a call it only ends the answer."""
    text = f"I see.\n{STOP_WORD} it is."
    _, guided = chat(written, choice, stop=[STOP_WORD])
    answer = answer_of(written, choice, guided, [("write", {"path": "x", "content": text})])
    begun = answer[: answer.index(STOP_WORD)]
    call = ("write", {"path": "rm -rf /"})
    whole = answer_of(written, choice, guided, [call])
    for pieces in ([begun], list(begun)):
        for told in answers(written, choice, pieces):
            assert told == ("stop", [], begun.split()), told
    for told in answers(written, choice, [*whole[:-9], whole[-9:]]):
        assert told == ("stop" if choice == "named" else "tool_calls", [call], []), told


def answers(written: str, choice: str, pieces: Sequence[str]) -> list[tuple[str, list[tuple[str, Any]], list[str]]]:
    """(reason by a chat's names, calls, the words of the content) by each API, whole and streamed."""
    request: Any = {"messages": [{"role": "user", "content": "x"}], "tools": offered(), "tool_choice": CHOICES[choice]}
    header = Header("r", 0, "m")

    def parts() -> tuple[Any, MessageParser]:
        said: Any = Said(*pieces, reason="stop")
        said.stop_with(STOP_WORD)
        return said, chat(written, choice, stop=[STOP_WORD])[0]

    async def events(answer: Any) -> list[dict[str, Any]]:
        lines = b"".join([line async for line in answer.events()]).decode().splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    found = []
    body = ChatRequest(**request, stop=[STOP_WORD])
    said, parser = parts()
    choice_of = json.loads(asyncio.run(ChatAnswer(body, said, header, [parser]).whole()))["choices"][0]
    found.append((choice_of["finish_reason"], calls_of(choice_of["message"]), choice_of["message"]["content"]))
    said, parser = parts()
    deltas = [one["choices"][0] for one in asyncio.run(events(ChatAnswer(body, said, header, [parser])))]
    text = ""
    calls: dict[int, tuple[str, str]] = {}
    for delta in deltas:
        text += delta["delta"].get("content") or ""
        for call in delta["delta"].get("tool_calls", ()):
            name, arguments = calls.get(call["index"], ("", ""))
            function = call["function"]
            calls[call["index"]] = (name + function.get("name", ""), arguments + function.get("arguments", ""))
    found.append((deltas[-1]["finish_reason"], list(calls.values()), text))

    said, parser = parts()
    reasons = {"tool_use": "tool_calls", "stop_sequence": "stop"}
    message = json.loads(asyncio.run(MessagesAnswer(said, header, parser, [STOP_WORD]).whole()))
    used = [(one["name"], json.dumps(one["input"])) for one in message["content"] if one["type"] == "tool_use"]
    assert message["stop_sequence"] == STOP_WORD
    words = "".join(one.get("text", "") for one in message["content"])
    found.append((_of_messages(message["stop_reason"], reasons, choice), used, words))
    said, parser = parts()
    told = asyncio.run(events(MessagesAnswer(said, header, parser, [STOP_WORD])))
    assert [one["content_block"]["type"] for one in told if one["type"] == "content_block_start"] == [
        one["type"] for one in message["content"]
    ]
    assert next(one["delta"] for one in told if one["type"] == "message_delta")["stop_reason"] == message["stop_reason"]

    asked = ResponsesRequest.model_validate({"input": "x"})
    said, parser = parts()
    response = json.loads(asyncio.run(ResponseAnswer(asked, said, header, parser).whole()))
    assert response["status"] == "completed"
    used = [(one["name"], one["arguments"]) for one in response["output"] if one["type"] == "function_call"]
    words = "".join(one["content"][0]["text"] for one in response["output"] if one["type"] == "message")
    found.append((found[0][0], used, words))
    said, parser = parts()
    last = asyncio.run(events(ResponseAnswer(asked, said, header, parser)))[-1]["response"]
    assert [one["type"] for one in last["output"]] == [one["type"] for one in response["output"]]
    return [
        (reason, [(name, json.loads(one)) for name, one in calls], (text or "").split())
        for reason, calls, text in found
    ]


def _of_messages(reason: str, reasons: dict[str, str], choice: str) -> str:
    """Where a function's name was asked for, a chat says `stop` of its call."""
    return "stop" if choice == "named" else reasons[reason]
