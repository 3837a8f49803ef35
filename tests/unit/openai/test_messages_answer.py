"""/v1/messages: what ended an answer is no part of its text; calls are complete; whole and streamed are the same."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from minisgl_backend.openai.answers import Header
from minisgl_backend.openai.anthropic import MessagesAnswer
from minisgl_backend.openai.message import MessageParser
from minisgl_backend.openai.triton import Delta
from minisgl_backend.parsers.parts import Part
from minisgl_backend.parsers.tool_calls import CallListParser, HermesParser


class Said:
    """A generation that is known beforehand."""

    num_prompt_tokens, num_output_tokens, num_cached_tokens, num_image_tokens = 1, 2, None, 0

    def __init__(self, *texts: str, reason: str, has_special_tokens: bool = False) -> None:
        self._deltas = [Delta(0, text, 1, None, ()) for text in texts]
        self._deltas[-1].reason = reason
        self.has_special_tokens = has_special_tokens

    def stop_with(self, text: str) -> None:
        """It was a stop text that ended the answer, of which that holds nothing."""
        self._deltas[-1].stop_text = text

    async def next(self) -> Delta | None:
        return self._deltas.pop(0) if self._deltas else None

    async def drain(self) -> None:
        pass


@pytest.mark.parametrize(
    ("last", "reason", "special", "text", "told"),
    [
        (" there<|end|>", "stop", True, "Hi there", "end_turn"),
        ("<|end|>", "stop", True, "Hi", "end_turn"),
        (" END", "stop", True, "Hi ", "stop_sequence"),
        (" there<|end|>", "length", True, "Hi there<|end|>", "max_tokens"),
        (" there<|end|>", "stop", False, "Hi there<|end|>", "end_turn"),  # the server left the token out: it is text
    ],
)
def test_what_ended_it_is_no_text(last: str, reason: str, special: bool, text: str, told: str) -> None:
    said: Any = Said("Hi", last, reason=reason, has_special_tokens=special)
    answer = MessagesAnswer(said, Header("r", 0, "m"), None, ("END",), ("<|end|>", "<|begin|>", "|>"))
    message = json.loads(asyncio.run(answer.whole()))
    assert [block["text"] for block in message["content"]] == [text]
    assert message["stop_reason"] == told


class Parts(MessageParser):
    """Returns parts that are known beforehand, one with each delta."""

    def __init__(self, parts: list[Part]) -> None:
        super().__init__()
        self._parts = parts

    def feed(self, delta: Delta) -> list[Part]:
        return [self._parts.pop(0)]


def answered(parts: list[Part], reason: str) -> tuple[Any, list[dict[str, Any]]]:
    """(the whole message, the events of the stream)."""

    def answer() -> MessagesAnswer:
        said: Any = Said(*([""] * len(parts)), reason=reason)
        return MessagesAnswer(said, Header("r", 0, "m"), Parts(list(parts)))

    async def stream() -> bytes:
        return b"".join([data async for data in answer().events()])

    lines = asyncio.run(stream()).decode().split("\n")
    return json.loads(asyncio.run(answer().whole())), [json.loads(line[6:]) for line in lines if line[:6] == "data: "]


def joined(events: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """(the blocks as Anthropic's packages add them up, the reason to stop)."""
    blocks: list[dict[str, Any]] = []
    texts: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                texts[event["index"]] = texts.get(event["index"], "") + delta["partial_json"]
                blocks[event["index"]]["input"] = json.loads(texts[event["index"]])
            else:
                key = delta["type"].removesuffix("_delta")
                blocks[event["index"]][key] += delta[key]
    return blocks, next(event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta")


F = Part("call", "f", 0, "c1")
G = Part("call", "g", 1, "c2")


@pytest.mark.parametrize(
    ("arguments", "reason", "block"),
    [
        ('{"a": 1}', "stop", {"a": 1}),
        (
            '{\n "a": 1e400,\r\n "b": 123456789012345678901234567890}',
            "stop",
            {"a": 1e400, "b": 123456789012345678901234567890},
        ),
        ('{"a": "\\ud800"}', "stop", {"a": "\ud800"}),
        ('{"a": "\u2028x"}', "stop", {"a": "\u2028x"}),
        ("", "stop", {}),
        ("{}", "length", {}),
        ("", "length", '{"name": "f", "arguments": '),
        ('{"a": 1', "length", '{"name": "f", "arguments": {"a": 1'),
        ('{"a": 1', "stop", '{"name": "f", "arguments": {"a": 1}'),
        ('{"a": NaN}', "stop", '{"name": "f", "arguments": {"a": NaN}}'),
        ('{"a": -Infinity}', "stop", '{"name": "f", "arguments": {"a": -Infinity}}'),
        ("[1]", "stop", '{"name": "f", "arguments": [1]}'),
        ("null", "stop", '{"name": "f", "arguments": null}'),
        ("[" * 100_000, "length", '{"name": "f", "arguments": ' + "[" * 100_000),
    ],
)
def test_a_call_has_the_arguments_that_the_model_wrote_or_is_text(arguments: str, reason: str, block: Any) -> None:
    pieces = [Part("arguments", piece) for piece in (arguments[:3], arguments[3:]) if piece]
    whole, events = answered([Part("content", "So: "), F, *pieces], reason)
    if isinstance(block, str):
        expected = [{"type": "text", "text": "So: " + block}]
        stopped = "max_tokens" if reason == "length" else "end_turn"
    else:
        expected = [{"type": "text", "text": "So: "}, {"type": "tool_use", "id": "c1", "name": "f", "input": block}]
        stopped = "max_tokens" if reason == "length" else "tool_use"
    assert (whole["content"], whole["stop_reason"]) == (expected, stopped)
    assert joined(events) == (expected, stopped)


def test_a_damaged_call_costs_none_of_the_others() -> None:
    parts = [F, Part("arguments", '{"a": NaN}'), G, Part("arguments", '{"b": 2}', 1)]
    whole, events = answered(parts, "stop")
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use"]
    assert (whole["content"][1]["input"], whole["stop_reason"]) == ({"b": 2}, "tool_use")
    assert joined(events) == (whole["content"], "tool_use")


def calls_of(*texts: str) -> str:
    return "".join(f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>' for text in texts)


@pytest.mark.parametrize("step", [1, 1000])
def test_nothing_follows_a_second_call_that_is_not_wanted(step: int) -> None:
    text = f"So: {calls_of('{}')} and {calls_of('{}')} and so on {calls_of('{}')} to the end"
    parser = MessageParser(tools=HermesParser(["f"]), parallel=False)
    pieces = [text[place : place + step] for place in range(0, len(text), step)]
    parts = [part for piece in pieces for part in parser.feed(Delta(0, piece, 1, None, ()))]
    parts += parser.feed(Delta(0, "", 1, "stop", ()))
    assert [part.text for part in parts if part.kind == "call"] == ["f"]
    assert "".join(part.text for part in parts if part.kind == "content").split() == ["So:", "and"]


def test_of_calls_that_were_cut_a_stream_tells_what_the_whole_answer_does() -> None:
    text = '[{"name": "f", "parameters": {}}, {"name": "f", "parameters": {"a": 1'

    def answer() -> MessagesAnswer:
        said: Any = Said(*text, "", reason="length")
        return MessagesAnswer(said, Header("r", 0, "m"), MessageParser(tools=CallListParser(["f"])))

    async def stream() -> bytes:
        return b"".join([data async for data in answer().events()])

    lines = asyncio.run(stream()).decode().split("\n")
    whole = json.loads(asyncio.run(answer().whole()))
    blocks, reason = joined([json.loads(line[6:]) for line in lines if line[:6] == "data: "])
    assert [block["type"] for block in blocks] == ["tool_use", "text"]
    blocks[0]["id"] = whole["content"][0]["id"]
    assert (blocks, reason) == (whole["content"], "max_tokens")


def test_thoughts_are_signed_once_at_their_end() -> None:
    """Clients that find no signature leave the thoughts out of the conversation, or refuse them."""
    parts = [Part("reasoning", "I "), Part("reasoning", "look"), Part("content", "4")]
    whole, events = answered(parts, "stop")
    thoughts, _ = whole["content"]
    assert thoughts["thinking"] == "I look"
    assert thoughts["signature"]
    kinds = [event.get("delta", {}).get("type", event["type"]) for event in events]
    assert kinds[1:6] == ["content_block_start", *["thinking_delta"] * 2, "signature_delta", "content_block_stop"]
    assert joined(events)[0] == whole["content"]
