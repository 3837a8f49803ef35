"""/v1/chat/completions: generations as chat messages, whole or in chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from minisgl_backend.openai.answers import Header, usage
from minisgl_backend.openai.chunks import ChunkedAnswer
from minisgl_backend.openai.logprobs import chat_logprobs, said
from minisgl_backend.openai.message import Fields, MessageParser
from minisgl_backend.openai.requests.chat import ChatRequest
from minisgl_backend.openai.requests.tools import NamedTool
from minisgl_backend.openai.triton import Delta, Generation, Position


class ChatAnswer(ChunkedAnswer):
    """One request in progress."""

    _request: ChatRequest
    WHOLE, CHUNK = "chat.completion", "chat.completion.chunk"
    FIRST, LATER, BEHIND = b'"delta":{"role":"assistant","content":', b'"delta":{"content":', b"}"

    def __init__(
        self,
        request: ChatRequest,
        generation: Generation,
        header: Header,
        parsers: Sequence[MessageParser] | None,
    ) -> None:
        """`parsers`: one for each choice; None if the text is the content unchanged."""
        super().__init__(request, [generation], header)
        self._generation = generation
        self._parsers = parsers
        self._is_named = isinstance(request.choice, NamedTool)
        self._echoed = request.echoed

    def _is_plain(self) -> bool:
        request = self._request
        is_text = self._parsers is None and not request.logprobs and not self._echoed
        return is_text and not request.usage_with_every_chunk

    async def _full_events(self) -> AsyncIterator[bytes]:
        generation = self._generation
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
                "logprobs": self._logprobs(positions),
                "finish_reason": self._reason(delta.index, delta.reason),
            }
            begun.add(delta.index)
            yield self._chunk(choice)

    async def whole(self) -> bytes:
        """The whole answer."""
        generation = self._generation
        for parser in self._parsers or ():
            parser.tell_at_end()
        found = [Fields(content=self._echoed) for _ in range(self._request.num_choices)]
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
                "logprobs": self._logprobs(positions[index]),
                "finish_reason": self._reason(index, reasons[index]),
            }
            for index, fields in enumerate(found)
        ]
        return self._answer(choices)

    def _add(self, delta: Delta, fields: Fields) -> None:
        if self._parsers is None:
            fields.content += delta.text
            return
        fields.add(self._parsers[delta.index].feed(delta))
        if self._request.drops_reasoning:
            fields.reasoning = ""

    def _logprobs(self, positions: Sequence[Position]) -> dict[str, Any] | None:
        return chat_logprobs(positions, self._request.top_logprobs or 0) if self._request.logprobs else None

    def _positions(self, delta: Delta) -> Sequence[Position]:
        return delta.logprobs if self._request.include_stop_str_in_output else said(delta)

    def _usage(self) -> dict[str, Any]:
        reasoning = None if self._parsers is None else sum(parser.num_reasoning_tokens for parser in self._parsers)
        return usage(self._generation, reasoning=reasoning)

    def _reason(self, index: int, reason: str | None) -> str | None:
        """OpenAI reports `stop` for a call requested by name, and `tool_calls` for all others."""
        calls = self._parsers is not None and self._parsers[index].has_calls
        return "tool_calls" if reason == "stop" and calls and not self._is_named else reason
