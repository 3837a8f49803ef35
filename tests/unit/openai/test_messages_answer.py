"""What ended an answer of /v1/messages is no part of its text."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from minisgl_backend.openai.answers import Header
from minisgl_backend.openai.anthropic import MessagesAnswer
from minisgl_backend.openai.triton import Delta


class Said:
    """A generation that is known beforehand."""

    num_prompt_tokens, num_output_tokens, num_cached_tokens = 1, 2, None

    def __init__(self, *texts: str, reason: str, has_special_tokens: bool) -> None:
        self._deltas = [Delta(0, text, 1, None, ()) for text in texts]
        self._deltas[-1].reason = reason
        self.has_special_tokens = has_special_tokens

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
