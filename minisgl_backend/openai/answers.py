"""What the answers of all endpoints have in common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from minisgl_backend.openai.errors import ApiError, ClientLeft
from minisgl_backend.openai.triton import Generation


class StreamSigns(Protocol):
    """What a stream of an API says besides its answer."""

    @property
    def keep_alive(self) -> bytes:
        """While there is nothing to say."""
        ...

    def error_event(self, error: ApiError) -> bytes:
        """The event that ends a failed stream."""
        ...


class Answer(StreamSigns, Protocol):
    """One request in progress."""

    def events(self) -> AsyncIterator[bytes]:
        """The events of a stream. Raises ApiError, ClientLeft."""
        ...

    async def whole(self) -> bytes:
        """The whole answer. Raises ApiError, ClientLeft."""
        ...


class Source(Protocol):
    """Where an answer comes from."""

    def cancel(self) -> None:
        """The client has left."""
        ...


Start = Coroutine[Any, Any, tuple[Answer, Sequence[Source]]]


class PendingAnswer:
    """An answer from before its generations start: rendering and tokenizing a prompt take their time, too.

    Used by one task; `cancel` by any task of the same event loop.
    """

    def __init__(self, start: Start) -> None:
        """`start`: starts the generations of the answer. Raises ApiError."""
        self._sources: Sequence[Source] = ()
        self.answer: Answer | None = None  # when it has started
        self._left = False
        self._start = asyncio.ensure_future(self._run(start))

    @property
    def generations(self) -> list[Generation]:
        return [source for source in self._sources if isinstance(source, Generation)]

    async def started(self) -> Answer:
        """Raises ApiError, ClientLeft."""
        try:
            return await self._start
        except asyncio.CancelledError:
            if self._left:
                raise ClientLeft from None
            raise

    def cancel(self) -> None:
        """The client has left."""
        self._left = True
        self._start.cancel()
        for source in self._sources:
            source.cancel()

    async def _run(self, start: Start) -> Answer:
        self.answer, self._sources = await start
        return self.answer


@dataclass(frozen=True, slots=True)
class Header:
    """The fields that every chunk of an answer begins with."""

    id: str
    created: int  # seconds since the epoch
    model: str

    def fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def usage(*generations: Generation, reasoning: int | None = None) -> dict[str, Any]:
    """OpenAI's token counts so far. `reasoning`: its tokens; None if reasoning is not separated."""
    prompt = sum(one.num_prompt_tokens for one in generations)
    completion = sum(one.num_output_tokens for one in generations)
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }
    cached = [one.num_cached_tokens for one in generations]
    if None not in cached:
        counts["prompt_tokens_details"] = {"cached_tokens": sum(filter(None, cached))}
        if images := sum(one.num_image_tokens for one in generations):
            counts["prompt_tokens_details"]["image_tokens"] = images
    if reasoning is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return counts
