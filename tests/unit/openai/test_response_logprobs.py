"""Which log-probabilities an answer of /v1/responses has: those of its content's tokens, each once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from minisgl_backend.openai.answers import Header
from minisgl_backend.openai.message import MessageParser
from minisgl_backend.openai.requests.responses import ResponsesRequest
from minisgl_backend.openai.responses import ResponseAnswer
from minisgl_backend.openai.triton import Delta, TokenLogprob
from minisgl_backend.parsers.reasoning import TagReasoningParser
from minisgl_backend.parsers.tool_calls import HermesParser

CALL = '<tool_call>{"name": "f", "arguments": {"a": "Hi"}}</tool_call>'


class Said:
    """A generation that is known beforehand."""

    num_prompt_tokens, num_output_tokens, num_cached_tokens, num_image_tokens = 1, 1, None, 0

    def __init__(self, deltas: Sequence[Sequence[str]], texts: Sequence[str]) -> None:
        self._deltas = [
            Delta(0, text, len(tokens), None, [{str(n): TokenLogprob(-1.0, 1, one)} for n, one in enumerate(tokens)])
            for tokens, text in zip(deltas, texts, strict=True)
        ]
        self._deltas[-1].reason = "stop"

    async def next(self) -> Delta | None:
        return self._deltas.pop(0) if self._deltas else None

    async def drain(self) -> None:
        pass


def told(deltas: Sequence[Sequence[str]], texts: Sequence[str] | None = None) -> list[tuple[str, list[str]]]:
    """(text, tokens) of the content's deltas."""
    body = {"input": "x", "include": ["message.output_text.logprobs"]}
    said: Any = Said(deltas, texts or ["".join(tokens) for tokens in deltas])
    parser = MessageParser(TagReasoningParser(inside=False), HermesParser(["f"]))
    answer = ResponseAnswer(ResponsesRequest.model_validate(body), said, Header("r", 0, "m"), parser)

    async def read() -> list[bytes]:
        return [line async for line in answer.events()]

    lines = b"".join(asyncio.run(read())).decode().splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    return [
        (event["delta"], [entry["token"] for entry in event["logprobs"]])
        for event in events
        if event["type"] == "response.output_text.delta"
    ]


@pytest.mark.parametrize(
    ("deltas", "content"),
    [
        ([["Hi", " there"], ["!"]], [("Hi there", ["Hi", " there"]), ("!", ["!"])]),
        ([["<think>", "a b", "</think>", "Hi"], ["!"]], [("Hi", ["Hi"]), ("!", ["!"])]),
        ([["<think>"], ["b"], ["</think>"], ["\n\n"], ["Hi"], ["!"]], [("Hi", ["Hi"]), ("!", ["!"])]),
        ([["<think>", "b"], ["</think>", "i"], ["!"]], [("i", ["i"]), ("!", ["!"])]),
        ([["<think>", "\n\n", "</think>", "\n\nHi"], ["!"]], [("Hi", ["\n\nHi"]), ("!", ["!"])]),
        ([["<think>", "b</think>Hi"], ["!"]], [("Hi", ["b</think>Hi"]), ("!", ["!"])]),
        ([["a", " <"], [" b"], ["."]], [("a", ["a"]), (" < b", [" <", " b"]), (".", ["."])]),
        ([["Hi", CALL, "Hi", "!"]], [("Hi", ["Hi"]), ("Hi!", ["Hi", "!"])]),
        ([["Hi"], ["\n", CALL[:20]], [CALL[20:]], ["Bye"]], [("Hi", ["Hi"]), ("Bye", ["Bye"])]),
    ],
)
def test_every_token_of_the_content_is_told_where_it_stands(
    deltas: Sequence[Sequence[str]], content: list[tuple[str, list[str]]]
) -> None:
    assert told(deltas) == content


def test_characters_of_several_tokens() -> None:
    broken = ["a", "\ufffd", "\ufffd"]
    assert told([broken, ["b"]], ["a😀", "b"]) == [("a😀", broken), ("b", ["b"])]
    assert told([["Hi", "<eos>"]], ["Hi"]) == [("Hi", ["Hi"])]
