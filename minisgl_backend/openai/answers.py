"""What the answers of all endpoints have in common."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from minisgl_backend.openai.errors import ApiError
from minisgl_backend.openai.triton import Generation


class Answer(Protocol):
    """One request in progress."""

    keep_alive: bytes  # what a stream says while it has nothing to say

    def events(self) -> AsyncIterator[bytes]:
        """The events of a stream. Raises ApiError, ClientLeft."""
        ...

    async def whole(self) -> bytes:
        """The whole answer. Raises ApiError, ClientLeft."""
        ...

    def error_event(self, error: ApiError) -> bytes:
        """The event that ends a failed stream."""
        ...


@dataclass(frozen=True, slots=True)
class Header:
    """The fields that every chunk of an answer begins with."""

    id: str
    created: int  # seconds since the epoch
    model: str

    def fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def usage(*generations: Generation, thoughts: int | None = None) -> dict[str, Any]:
    """OpenAI's token counts so far. `thoughts`: reasoning tokens; None if reasoning is not separated."""
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
    if thoughts is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": thoughts}
    return counts
