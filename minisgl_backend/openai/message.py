"""The text of an answer taken apart: thoughts, content, tool calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from minisgl_backend.openai.requests.chat import ChatRequest
from minisgl_backend.openai.requests.tools import NamedTool
from minisgl_backend.openai.triton import Delta
from minisgl_backend.parsers.parts import Part
from minisgl_backend.parsers.reasoning import ReasoningParser
from minisgl_backend.parsers.tool_calls import ArgumentsParser, CallListParser, ToolParser

_LETTERS = string.ascii_letters + string.digits


class MessageParser:
    """The text of one choice -> its parts, in order."""

    def __init__(
        self, reasoning: ReasoningParser | None = None, tools: ToolParser | None = None, *, parallel: bool = True
    ) -> None:
        """`parallel`: false leaves out all calls but the first."""
        self._reasoning = reasoning
        self._tools = tools
        self._parallel = parallel
        self.has_calls = False
        self.num_thought_tokens = 0  # exact where every token is a delta of its own, else to within the last of them

    def feed(self, delta: Delta) -> list[Part]:
        if self._reasoning is None:
            pieces = [Part("content", delta.text)] if delta.text else []
        else:
            pieces = self._think(self._reasoning, delta)
        if self._tools is None:
            return pieces
        parts: list[Part] = []
        for piece in pieces:
            parts += [piece] if piece.kind == "reasoning" else self._tools.feed(piece.text)
        if delta.reason is not None:
            parts += self._tools.finish(delta.reason)
        if not self._parallel:
            parts = [part for part in parts if part.number == 0]
        self.has_calls = self.has_calls or any(part.kind == "call" for part in parts)
        return parts

    @property
    def has_thought(self) -> bool:
        """The answer began with thoughts."""
        return self._reasoning is not None and self._reasoning.has_thought

    def _think(self, reasoning: ReasoningParser, delta: Delta) -> list[Part]:
        thought = reasoning.has_thought and not reasoning.thinking
        pieces = reasoning.feed(delta.text)
        if reasoning.thinking:
            self.num_thought_tokens += delta.num_tokens
        elif reasoning.has_thought and not thought:
            behind = sum(len(piece.text) for piece in pieces if piece.kind == "content")
            self.num_thought_tokens += round(delta.num_tokens * (1 - behind / max(len(delta.text), 1)))
        return pieces + (reasoning.finish() if delta.reason is not None else [])


def message_parsers(
    request: ChatRequest,
    new_reasoning: Callable[[], ReasoningParser] | None,
    new_tools: Callable[[], ToolParser] | None,
) -> Sequence[MessageParser] | None:
    """One for each choice; None where the text is the content as it is.

    `new_tools` is that of tool_choice `auto`. The other choices have a grammar and with it a form of their own, without
    thoughts.
    """
    choice = request.choice
    if isinstance(choice, NamedTool):
        name = choice.function.name
        new_reasoning, new_tools = None, lambda: ArgumentsParser(name)
    elif choice == "required":
        new_reasoning, new_tools = None, CallListParser
    if new_reasoning is None and new_tools is None:
        return None
    return [
        MessageParser(
            new_reasoning() if new_reasoning else None,
            new_tools() if new_tools else None,
            parallel=request.parallel_tool_calls is not False,
        )
        for _ in range(request.num_choices)
    ]


def new_call_id() -> str:
    """Nine letters and digits: Mistral's templates take no others, and all others take these."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


@dataclass(slots=True)
class Fields:
    """Parts as fields of a chat message, or of what one delta adds to it."""

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
                call = {"index": part.number, "id": new_call_id(), "type": "function", "function": function}
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
        """All of it, as the answer in one piece has it."""
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
    """By the name of DeepSeek's API, SGLang and Qwen, and by that of vLLM."""
    return {"reasoning_content": text, "reasoning": text}
