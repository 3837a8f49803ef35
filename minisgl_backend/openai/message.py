"""Splits the text of an answer into reasoning, content and tool calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from minisgl_backend.openai.model import AnswerFormat
from minisgl_backend.openai.requests.chat import ChatRequest
from minisgl_backend.openai.requests.tools import NamedTool
from minisgl_backend.openai.triton import Delta
from minisgl_backend.parsers.parts import STOP, STOP_TEXT, Part, ReasoningParser, ToolParser, content
from minisgl_backend.parsers.tool_calls import ArgumentsParser, CallListParser

_LETTERS = string.ascii_letters + string.digits


Told = Literal["as written", "when whole", "at the end"]


class MessageParser:
    """The text of one choice -> its parts, in order.

    A call that was cut, by the length or by a stop text, or that is damaged, is content. Where it has been told already
    it stays `broken`.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        *,
        parallel: bool = True,
        told: Told = "as written",
        apart: bool = True,
    ) -> None:
        """`parallel`: false drops the second call and all that follows. `told`: when the parts of a call are. `apart`:
        false makes reasoning content, in which no call is looked for."""
        self._reasoning = reasoning
        self._tools = tools
        self._parallel = parallel
        self._told = told
        self._apart = apart
        self._is_over = False  # a second call has begun that is dropped
        self._held: list[Part] = []  # from the first call on that is not told yet
        self._has_broken = False  # a call that was told turned out to be none
        self.is_cut = False  # a stop text has ended the answer within a call
        self._num_calls = 0
        self.num_reasoning_tokens = 0  # exact if every token is a delta of its own, otherwise up to the last delta

    def tell_at_end(self) -> None:
        """For a whole answer: calls are told when it is known which of them are."""
        self._told = "at the end"

    def feed(self, delta: Delta) -> list[Part]:
        ended = STOP_TEXT if delta.stop_text is not None and delta.reason == STOP else delta.reason
        if self._reasoning is None:
            pieces = [Part("content", delta.text)] if delta.text else []
        else:
            pieces = self._think(self._reasoning, delta, ended)
        parts: list[Part] = pieces
        if self._tools is not None:
            parts = []
            for piece in pieces:
                thought = piece if self._apart else piece._replace(kind="content")
                parts += self._tools.feed(piece.text) if piece.kind == "content" else [thought]
            if ended is not None:
                parts += self._tools.finish(ended)
        if ended == STOP_TEXT:
            parsers = (self._tools, self._reasoning)
            self.is_cut = any(parser is not None and parser.is_damaged for parser in parsers)
        if not self._parallel:
            parts = self._up_to_second_call(parts)
        return self._whole(parts, is_last=ended is not None)

    @property
    def has_calls(self) -> bool:
        """The answer ends with calls, for the client to make: all that were told are whole, and no stop text has cut
        another one."""
        return self._num_calls > 0 and not self._has_broken and not self.is_cut

    @property
    def has_reasoning(self) -> bool:
        """The answer began with reasoning."""
        return self._reasoning is not None and self._reasoning.has_reasoning

    def _think(self, reasoning: ReasoningParser, delta: Delta, ended: str | None) -> list[Part]:
        thought = reasoning.has_reasoning and not reasoning.thinking
        pieces = reasoning.feed(delta.text)
        if reasoning.thinking:
            self.num_reasoning_tokens += delta.num_tokens
        elif reasoning.has_reasoning and not thought:
            behind = sum(len(piece.text) for piece in pieces if piece.kind == "content")
            self.num_reasoning_tokens += round(delta.num_tokens * (1 - behind / max(len(delta.text), 1)))
        return pieces + (reasoning.finish(ended) if ended is not None else [])

    def _up_to_second_call(self, parts: Sequence[Part]) -> list[Part]:
        """Without the second call and all that follows, but for what says that the first one is none either."""
        found = []
        for part in parts:
            self._is_over = self._is_over or part.number > 0
            if not self._is_over or (part.kind == "broken" and part.number == 0):
                found.append(part)
        return found

    def _whole(self, parts: Sequence[Part], *, is_last: bool) -> list[Part]:
        """What can be told now."""
        found: list[Part] = []
        for part in parts:
            if part.kind == "broken":
                first = next((at for at, held in enumerate(self._held) if _is_call(held, part.number)), None)
                if first is None:
                    self._has_broken = True
                    found.append(part)
                else:
                    self._held[first:] = content(part.text)
            elif self._told == "at the end" or (self._told == "when whole" and part.kind == "arguments"):
                if self._held or part.kind == "call":
                    self._held.append(part)
                else:
                    found.append(part)
            else:
                found += self._held
                self._held = []
                (self._held if part.kind == "call" and self._told == "when whole" else found).append(part)
        if is_last:
            found, self._held = found + self._held, []
        self._num_calls += sum(part.kind == "call" for part in found)
        return found


def _is_call(part: Part, number: int) -> bool:
    return part.kind == "call" and part.number >= number


def message_parsers(
    request: ChatRequest, answer_format: AnswerFormat, prompt_tail: str = ""
) -> Sequence[MessageParser] | None:
    """One for each choice; None if the text is the content unchanged. `prompt_tail`: the end of the prompt.

    With a tool_choice other than `auto`, a grammar determines the answer's form, without reasoning unless it has a
    budget.
    """
    # A stream cannot take back what it has told of a call, and a stop text is likely to cut one.
    told: Told = "when whole" if request.stop else "as written"
    choice, parallel = request.choice, request.parallel_tool_calls is not False
    found = []
    for _ in range(request.num_choices):
        reasoning, calls = answer_format.new_reasoning(prompt_tail), answer_format.new_calls()
        if not (request.must_call and answer_format.makes_calls):
            if isinstance(choice, NamedTool):
                calls = ArgumentsParser(choice.function.name)
            elif choice == "required":
                calls = CallListParser([function.name for function in request.callable_functions])
            elif reasoning is None and calls is None:
                return None
        found.append(MessageParser(reasoning, calls, parallel=parallel, told=told, apart=answer_format.apart))
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
            elif part.kind == "broken":
                pass  # a stream has told its beginning
            elif self.tool_calls and self.tool_calls[-1]["index"] == part.number:
                self.tool_calls[-1]["function"]["arguments"] += part.text
            else:
                self.tool_calls.append({"index": part.number, "function": {"arguments": part.text}})

    def delta(self, *, first: bool) -> dict[str, Any]:
        found: dict[str, Any] = {"role": "assistant"} if first else {}
        if self.content or (first and not self):
            found["content"] = self.content
        if self.reasoning:
            found |= _reasoning_fields(self.reasoning)
        if self.tool_calls:
            found["tool_calls"] = self.tool_calls
        return found

    def message(self) -> dict[str, Any]:
        """The complete message."""
        found: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            found |= _reasoning_fields(self.reasoning)
        if self.tool_calls:
            found["content"] = self.content or None
            found["tool_calls"] = [
                {name: value for name, value in call.items() if name != "index"} for call in self.tool_calls
            ]
        return found


def _reasoning_fields(text: str) -> dict[str, str]:
    """By the field name of DeepSeek's API, SGLang and Qwen, and by that of vLLM."""
    return {"reasoning_content": text, "reasoning": text}
