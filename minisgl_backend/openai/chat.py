"""/v1/chat/completions: generations as chat messages, whole or in chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from minisgl_backend.openai.answers import Header, usage
from minisgl_backend.openai.encoding import encode
from minisgl_backend.openai.errors import ApiError
from minisgl_backend.openai.logprobs import chat_logprobs, said
from minisgl_backend.openai.message import Fields, MessageParser
from minisgl_backend.openai.requests.chat import ChatRequest
from minisgl_backend.openai.requests.tools import NamedTool
from minisgl_backend.openai.sse import DONE, KEEP_ALIVE, event, event_prefix
from minisgl_backend.openai.triton import Delta, Generation, Position


class ChatAnswer:
    """One request in progress."""

    keep_alive = KEEP_ALIVE

    def __init__(
        self,
        request: ChatRequest,
        generation: Generation,
        header: Header,
        parsers: Sequence[MessageParser] | None,
    ) -> None:
        """`parsers`: one for each choice; None if the text is the content unchanged."""
        self._request = request
        self._generation = generation
        self._header = header
        self._parsers = parsers
        self._is_named = isinstance(request.choice, NamedTool)
        self._echoed = request.echoed

    async def events(self) -> AsyncIterator[bytes]:
        """The events of a stream: one for each response of the server."""
        request = self._request
        is_plain = self._parsers is None and not request.logprobs and not request.usage_with_every_chunk
        async for data in self._plain_events() if is_plain and not self._echoed else self._full_events():
            yield data
        last = b""
        if request.include_usage or request.return_perf_metrics:
            chunk = {**self._header.fields("chat.completion.chunk"), "choices": [], "usage": self._usage()}
            if request.return_perf_metrics:
                chunk["perf_metrics"] = self._generation.perf_metrics
            last = event(chunk)
        yield last + DONE
        await self._generation.drain()

    @staticmethod
    def error_event(error: ApiError) -> bytes:
        return event(error.body)

    async def _plain_events(self) -> AsyncIterator[bytes]:
        """The common case, text only: each event is three pieces of bytes, of which one is new."""
        read = self._generation.next
        begin = event_prefix(self._header.fields("chat.completion.chunk")) + b'"delta":{'
        no_usage = b',"usage":null' if self._request.include_usage else b""
        end = b'},"logprobs":null,"finish_reason":null}]' + no_usage + b"}\n\n"
        last = b'},"logprobs":null,"finish_reason":"%s"}]' + no_usage + b"}\n\n"
        heads = [begin % index + b'"role":"assistant","content":' for index in range(self._request.num_choices)]
        later = [begin % index + b'"content":' for index in range(self._request.num_choices)]
        while (delta := await read()) is not None:
            index, reason = delta.index, delta.reason
            if not delta.text and reason is None:
                continue
            data = heads[index] + encode(delta.text)
            heads[index] = later[index]
            yield data + (end if reason is None else last % reason.encode())

    async def _full_events(self) -> AsyncIterator[bytes]:
        request, generation = self._request, self._generation
        header = self._header.fields("chat.completion.chunk")
        begun: set[int] = set()
        held: dict[int, list[Position]] = {}
        while (delta := await generation.next()) is not None:
            fields = Fields(content="" if delta.index in begun else self._echoed)
            self._add(delta, fields)
            held.setdefault(delta.index, []).extend(self._positions(delta))
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
                chunk["usage"] = self._usage() if request.usage_with_every_chunk else None
            yield event(chunk)

    async def whole(self) -> bytes:
        """The whole answer."""
        request, generation = self._request, self._generation
        for parser in self._parsers or ():
            parser.tell_at_end()
        found = [Fields(content=self._echoed) for _ in range(request.num_choices)]
        positions: list[list[Position]] = [[] for _ in found]
        reasons: list[str | None] = [None for _ in found]
        while (delta := await generation.next()) is not None:
            self._add(delta, found[delta.index])
            positions[delta.index] += self._positions(delta)
            reasons[delta.index] = delta.reason or reasons[delta.index]
        await generation.drain()
        choices = [
            {
                "index": index,
                "message": fields.message(),
                "logprobs": chat_logprobs(positions[index], request.top_logprobs or 0) if request.logprobs else None,
                "finish_reason": self._reason(index, reasons[index]),
            }
            for index, fields in enumerate(found)
        ]
        answer = {**self._header.fields("chat.completion"), "choices": choices, "usage": self._usage()}
        if request.return_perf_metrics:
            answer["perf_metrics"] = generation.perf_metrics
        return encode(answer)

    def _add(self, delta: Delta, fields: Fields) -> None:
        if self._parsers is None:
            fields.content += delta.text
            return
        fields.add(self._parsers[delta.index].feed(delta))
        if self._request.drops_reasoning:
            fields.reasoning = ""

    def _positions(self, delta: Delta) -> Sequence[Position]:
        return delta.logprobs if self._request.include_stop_str_in_output else said(delta)

    def _usage(self) -> dict[str, Any]:
        reasoning = None if self._parsers is None else sum(parser.num_reasoning_tokens for parser in self._parsers)
        return usage(self._generation, reasoning=reasoning)

    def _reason(self, index: int, reason: str | None) -> str | None:
        """OpenAI reports `stop` for a call requested by name, and `tool_calls` for all others."""
        calls = self._parsers is not None and self._parsers[index].has_calls
        return "tool_calls" if reason == "stop" and calls and not self._is_named else reason
