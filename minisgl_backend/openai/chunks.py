"""What the answers of OpenAI's chats and completions have in common: chunks, usage, and how a stream ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

from minisgl_backend.openai.answers import Header, usage
from minisgl_backend.openai.encoding import encode
from minisgl_backend.openai.errors import ApiError
from minisgl_backend.openai.requests.base import Generating
from minisgl_backend.openai.sse import DONE, KEEP_ALIVE, event, event_prefix
from minisgl_backend.openai.triton import Generation


class ChunkedAnswer(ABC):
    """One request in progress. A subclass says what a choice holds."""

    keep_alive = KEEP_ALIVE
    WHOLE: ClassVar[str]  # `object` of the whole answer
    CHUNK: ClassVar[str]  # and of a chunk
    # A choice around its text, as JSON: before the first text, before later ones, and behind each.
    FIRST: ClassVar[bytes]
    LATER: ClassVar[bytes]
    BEHIND: ClassVar[bytes]

    def __init__(self, request: Generating, generations: Sequence[Generation], header: Header) -> None:
        self._request = request
        self._generations = generations
        self._header = header

    @staticmethod
    def error_event(error: ApiError) -> bytes:
        return event(error.body)

    async def events(self) -> AsyncIterator[bytes]:
        """The events of a stream: one for each response of the server."""
        async for data in self._plain_events() if self._is_plain() else self._full_events():
            yield data
        last = b""
        if self._request.include_usage or self._request.return_perf_metrics:
            last = event(self._with_figures({**self._header.fields(self.CHUNK), "choices": []}))
        yield last + DONE
        await self._drain()

    @abstractmethod
    def _is_plain(self) -> bool:
        """Whether all chunks hold text alone, of one generation."""

    @abstractmethod
    def _full_events(self) -> AsyncIterator[bytes]: ...

    async def _plain_events(self) -> AsyncIterator[bytes]:
        """The common case: each event is three pieces of bytes, of which one is new."""
        read, choices = self._generations[0].next, range(self._request.num_choices)
        begin = event_prefix(self._header.fields(self.CHUNK))
        no_usage = b',"usage":null' if self._request.include_usage else b""
        end = self.BEHIND + b',"logprobs":null,"finish_reason":null}]' + no_usage + b"}\n\n"
        last = self.BEHIND + b',"logprobs":null,"finish_reason":"%s"}]' + no_usage + b"}\n\n"
        heads = [begin % index + self.FIRST for index in choices]
        later = [begin % index + self.LATER for index in choices]
        while (delta := await read()) is not None:
            index, reason = delta.index, delta.reason
            if not delta.text and reason is None:
                continue
            data = heads[index] + encode(delta.text)
            heads[index] = later[index]
            yield data + (end if reason is None else last % reason.encode())

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        chunk = {**self._header.fields(self.CHUNK), "choices": [choice]}
        if self._request.include_usage:
            chunk["usage"] = self._usage() if self._request.usage_with_every_chunk else None
        return event(chunk)

    def _answer(self, choices: Sequence[dict[str, Any]]) -> bytes:
        return encode(self._with_figures({**self._header.fields(self.WHOLE), "choices": choices}))

    def _with_figures(self, answer: dict[str, Any]) -> dict[str, Any]:
        figures = {"perf_metrics": self._generations[0].perf_metrics} if self._request.return_perf_metrics else {}
        return {**answer, "usage": self._usage(), **figures}

    def _usage(self) -> dict[str, Any]:
        return usage(*self._generations)

    async def _drain(self) -> None:
        for generation in self._generations:
            await generation.drain()
