"""Splits the text of an answer into reasoning, content and tool calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from minisgl_backend.openai.model import AnswerFormat
from minisgl_backend.openai.requests.chat import ChatRequest
from minisgl_backend.openai.requests.tools import NamedTool
from minisgl_backend.openai.triton import Delta
from minisgl_backend.parsers.parts import Part, ThoughtParser, ToolParser
from minisgl_backend.parsers.tool_calls import ArgumentsParser, CallListParser

_LETTERS = string.ascii_letters + string.digits


class MessageParser:
    """The text of one choice -> its parts, in order."""

    def __init__(
        self, reasoning: ThoughtParser | None = None, tools: ToolParser | None = None, *, parallel: bool = True
    ) -> None:
        """`parallel`: false drops all calls but the first."""
        self._reasoning = reasoning
        self._tools = tools
        self._parallel = parallel
        self.has_calls = False
        self.num_thought_tokens = 0  # exact if every token is a delta of its own, otherwise up to the last delta

    def feed(self, delta: Delta) -> list[Part]:
        if self._reasoning is None:
            pieces = [Part("content", delta.text)] if delta.text else []
        else:
            pieces = self._think(self._reasoning, delta)
        parts: list[Part] = pieces
        if self._tools is not None:
            parts = []
            for piece in pieces:
                parts += self._tools.feed(piece.text) if piece.kind == "content" else [piece]
            if delta.reason is not None:
                parts += self._tools.finish(delta.reason)
        if not self._parallel:
            parts = [part for part in parts if part.number == 0]
        self.has_calls = self.has_calls or any(part.kind == "call" for part in parts)
        return parts

    @property
    def has_thought(self) -> bool:
        """The answer began with reasoning."""
        return self._reasoning is not None and self._reasoning.has_thought

    def _think(self, reasoning: ThoughtParser, delta: Delta) -> list[Part]:
        thought = reasoning.has_thought and not reasoning.thinking
        pieces = reasoning.feed(delta.text)
        if reasoning.thinking:
            self.num_thought_tokens += delta.num_tokens
        elif reasoning.has_thought and not thought:
            behind = sum(len(piece.text) for piece in pieces if piece.kind == "content")
            self.num_thought_tokens += round(delta.num_tokens * (1 - behind / max(len(delta.text), 1)))
        return pieces + (reasoning.finish(delta.reason) if delta.reason is not None else [])


def message_parsers(
    request: ChatRequest, answer_format: AnswerFormat, prompt_tail: str = ""
) -> Sequence[MessageParser] | None:
    """One for each choice; None if the text is the content unchanged. `prompt_tail`: the end of the prompt.

    With a tool_choice other than `auto`, a grammar determines the answer's form, without reasoning unless it has a
    budget.
    """
    choice, parallel = request.choice, request.parallel_tool_calls is not False
    found = []
    for _ in range(request.num_choices):
        thoughts, calls = answer_format.new_thoughts(prompt_tail), answer_format.new_calls()
        if request.must_call and answer_format.makes_calls:
            found.append(MessageParser(thoughts, calls, parallel=parallel))
        elif isinstance(choice, NamedTool):
            found.append(MessageParser(thoughts, ArgumentsParser(choice.function.name), parallel=parallel))
        elif choice == "required":
            found.append(MessageParser(thoughts, CallListParser(), parallel=parallel))
        else:
            if thoughts is None and calls is None:
                return None
            found.append(MessageParser(thoughts, calls, parallel=parallel))
    return found


def new_call_id() -> str:
    """Nine letters and digits: Mistral's templates accept nothing else, and all others accept these."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


@dataclass(slots=True)
class Fields:
    """Parts as fields of a chat message, or of one delta."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)

    def add(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if part.kind == "content":
                self.content += part.text
            elif part.kind == "reasoning":
                self.reasoning += part.text
            elif part.kind == "call":
                function = {"name": part.text, "arguments": ""}
                call = {"index": part.number, "id": part.id or new_call_id(), "type": "function", "function": function}
                self.tool_calls.append(call)
            elif self.tool_calls and self.tool_calls[-1]["index"] == part.number:
                self.tool_calls[-1]["function"]["arguments"] += part.text
            else:
                self.tool_calls.append({"index": part.number, "function": {"arguments": part.text}})

    def delta(self, *, first: bool) -> dict[str, Any]:
        found: dict[str, Any] = {"role": "assistant"} if first else {}
        if self.content or (first and not self):
            found["content"] = self.content
        if self.reasoning:
            found |= _thoughts(self.reasoning)
        if self.tool_calls:
            found["tool_calls"] = self.tool_calls
        return found

    def message(self) -> dict[str, Any]:
        """The complete message."""
        found: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            found |= _thoughts(self.reasoning)
        if self.tool_calls:
            found["content"] = self.content or None
            found["tool_calls"] = [
                {name: value for name, value in call.items() if name != "index"} for call in self.tool_calls
            ]
        return found


def _thoughts(text: str) -> dict[str, str]:
    """By the field name of DeepSeek's API, SGLang and Qwen, and by that of vLLM."""
    return {"reasoning_content": text, "reasoning": text}
