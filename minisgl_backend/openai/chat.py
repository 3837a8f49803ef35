"""/v1/chat/completions: generations as chat messages, whole or in chunks, with thoughts and tool calls taken apart."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from minisgl_backend.openai.logprobs import chat_logprobs
from minisgl_backend.openai.reasoning import ReasoningParser
from minisgl_backend.openai.requests import ChatRequest, NamedTool
from minisgl_backend.openai.sse import DONE, encode, event, line_begin
from minisgl_backend.openai.tool_calls import ArgumentsParser, CallListParser, Event, ToolParser
from minisgl_backend.openai.triton import Delta, Generation, Position


@dataclass(frozen=True, slots=True)
class Header:
    """What every chunk of an answer begins with."""

    id: str
    created: int  # seconds since the epoch
    model: str

    def fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """OpenAI's counts."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


@dataclass(slots=True)
class Fields:
    """What one delta adds to a message."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)

    def delta(self, *, first: bool) -> dict[str, Any]:
        found: dict[str, Any] = {"role": "assistant"} if first else {}
        if self.content or (first and not self):
            found["content"] = self.content
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if self.tool_calls:
            found["tool_calls"] = self.tool_calls
        return found


class MessageParser:
    """The text of one choice -> content, thoughts, tool calls."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self.has_calls = False

    def feed(self, text: str, *, ends: bool) -> Fields:
        fields = Fields()
        if self._reasoning is None:
            self._content(text, fields)
        else:
            pieces = self._reasoning.feed(text) + (self._reasoning.finish() if ends else [])
            for piece in pieces:
                if piece.kind == "reasoning":
                    fields.reasoning += piece.text
                else:
                    self._content(piece.text, fields)
        if ends and self._tools is not None:
            self._add(self._tools.finish(), fields)
        return fields

    def _content(self, text: str, fields: Fields) -> None:
        if self._tools is None:
            fields.content += text
        else:
            self._add(self._tools.feed(text), fields)

    def _add(self, events: Sequence[Event], fields: Fields) -> None:
        for one in events:
            if one.kind == "content":
                fields.content += one.text
            elif one.kind == "call":
                self.has_calls = True
                function = {"name": one.text, "arguments": ""}
                call_id = f"call_{uuid.uuid4().hex[:24]}"
                fields.tool_calls.append({"index": one.number, "id": call_id, "type": "function", "function": function})
            elif fields.tool_calls and fields.tool_calls[-1]["index"] == one.number:
                fields.tool_calls[-1]["function"]["arguments"] += one.text
            else:
                fields.tool_calls.append({"index": one.number, "function": {"arguments": one.text}})


class ChatAnswer:
    """One request on its way."""

    def __init__(
        self,
        request: ChatRequest,
        generation: Generation,
        header: Header,
        new_reasoning: Callable[[], ReasoningParser] | None,
        new_tools: Callable[[], ToolParser] | None,
    ) -> None:
        """`new_tools`: of tool_choice `auto`; the other choices have parsers of their own."""
        self._request = request
        self._generation = generation
        self._header = header
        choice = request.choice
        if isinstance(choice, NamedTool):
            name = choice.function.name
            new_reasoning, new_tools = None, lambda: ArgumentsParser(name)
        elif choice == "required":
            new_reasoning, new_tools = None, CallListParser
        self._named = isinstance(choice, NamedTool)
        parsed = new_reasoning is not None or new_tools is not None
        self._parsers = (
            [
                MessageParser(new_reasoning() if new_reasoning else None, new_tools() if new_tools else None)
                for _ in range(request.num_choices)
            ]
            if parsed
            else None
        )

    async def lines(self) -> AsyncIterator[bytes]:
        """The events of a stream. One response of the server becomes one line."""
        request, generation = self._request, self._generation
        if self._parsers is None and not request.logprobs and not request.usage_with_every_chunk:
            lines = self._plain_lines()
        else:
            lines = self._parsed_lines()
        async for line in lines:
            yield line
        last = b""
        if request.include_usage or request.return_perf_metrics:
            chunk = {**self._header.fields("chat.completion.chunk"), "choices": []}
            chunk |= {"usage": usage(generation.num_prompt_tokens, generation.num_output_tokens)}
            if request.return_perf_metrics:
                chunk["perf_metrics"] = generation.perf_metrics
            last = event(chunk)
        yield last + DONE
        await generation.drain()

    async def _plain_lines(self) -> AsyncIterator[bytes]:
        """Text alone, which nearly every stream is: three pieces of bytes, of which one is new."""
        read = self._generation.next
        begin = line_begin(self._header.fields("chat.completion.chunk")) + b'"delta":{'
        no_usage = b',"usage":null' if self._request.include_usage else b""
        end = b'},"logprobs":null,"finish_reason":null}]' + no_usage + b"}\n\n"
        last = b'},"logprobs":null,"finish_reason":"%s"}]' + no_usage + b"}\n\n"
        heads = [begin % index + b'"role":"assistant","content":' for index in range(self._request.num_choices)]
        later = [begin % index + b'"content":' for index in range(self._request.num_choices)]
        while (delta := await read()) is not None:
            index, reason = delta.index, delta.reason
            if not delta.text and reason is None:
                continue
            line = heads[index] + encode(delta.text)
            heads[index] = later[index]
            yield line + (end if reason is None else last % reason.encode())

    async def _parsed_lines(self) -> AsyncIterator[bytes]:
        request, generation = self._request, self._generation
        header = self._header.fields("chat.completion.chunk")
        begun: set[int] = set()
        held: dict[int, list[Position]] = {}
        while (delta := await generation.next()) is not None:
            fields = self._fields(delta)
            held.setdefault(delta.index, []).extend(delta.logprobs)
            if not fields and delta.reason is None:
                continue
            positions = held.pop(delta.index)
            choice = {
                "index": delta.index,
                "delta": fields.delta(first=delta.index not in begun),
                "logprobs": chat_logprobs(positions, request.top_logprobs or 0) if request.logprobs else None,
                "finish_reason": self._reason(delta.index, delta.reason),
            }
            begun.add(delta.index)
            chunk = {**header, "choices": [choice]}
            if request.include_usage:
                counts = usage(generation.num_prompt_tokens, generation.num_output_tokens)
                chunk["usage"] = counts if request.usage_with_every_chunk else None
            yield event(chunk)

    async def whole(self) -> bytes:
        """The answer in one piece."""
        request, generation = self._request, self._generation
        texts: list[list[str]] = [[] for _ in range(request.num_choices)]
        positions: list[list[Position]] = [[] for _ in range(request.num_choices)]
        reasons: list[str | None] = [None] * request.num_choices
        while (delta := await generation.next()) is not None:
            texts[delta.index].append(delta.text)
            positions[delta.index] += delta.logprobs
            reasons[delta.index] = delta.reason or reasons[delta.index]
        await generation.drain()
        choices = []
        for index, pieces in enumerate(texts):
            text = "".join(pieces)
            fields = Fields(content=text) if self._parsers is None else self._parsers[index].feed(text, ends=True)
            message: dict[str, Any] = {"role": "assistant", "content": fields.content}
            if fields.reasoning:
                message["reasoning_content"] = fields.reasoning
            if fields.tool_calls:
                message["content"] = fields.content or None
                message["tool_calls"] = [
                    {name: value for name, value in call.items() if name != "index"} for call in fields.tool_calls
                ]
            logprobs = chat_logprobs(positions[index], request.top_logprobs or 0) if request.logprobs else None
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": logprobs,
                    "finish_reason": self._reason(index, reasons[index]),
                }
            )
        answer = {**self._header.fields("chat.completion"), "choices": choices}
        answer["usage"] = usage(generation.num_prompt_tokens, generation.num_output_tokens)
        if request.return_perf_metrics:
            answer["perf_metrics"] = generation.perf_metrics
        return encode(answer)

    def _fields(self, delta: Delta) -> Fields:
        if self._parsers is None:
            return Fields(content=delta.text)
        return self._parsers[delta.index].feed(delta.text, ends=delta.reason is not None)

    def _reason(self, index: int, reason: str | None) -> str | None:
        """OpenAI says `stop` of a call that was asked for by name, and `tool_calls` of all others."""
        calls = self._parsers is not None and self._parsers[index].has_calls
        return "tool_calls" if reason == "stop" and calls and not self._named else reason
