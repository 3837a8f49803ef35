"""/v1/completions: any number of prompts, each n times; with `echo` the prompt before its continuation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from minisgl_backend.openai.answers import Header
from minisgl_backend.openai.chunks import ChunkedAnswer
from minisgl_backend.openai.logprobs import CompletionLogprobs, prompt_logprobs
from minisgl_backend.openai.requests.completions import CompletionRequest
from minisgl_backend.openai.triton import Delta, Generation, Position

_MERGED = 64  # deltas of several prompts that may wait to be sent


@dataclass(frozen=True, slots=True)
class Echo:
    """The text that `echo` puts before a continuation."""

    text: str
    first_token: str  # a prompt's first token as text; it has no log-probability


@dataclass(slots=True)
class _Choice:
    echo: Echo | None
    logprobs: CompletionLogprobs | None
    texts: list[str] = field(default_factory=list)
    positions: list[Position | None] = field(default_factory=list)
    first_text: str = ""
    first_length: int = 0  # how many of its characters are part of the text
    reason: str | None = None
    begun: bool = False


class CompletionAnswer(ChunkedAnswer):
    """One request in progress: a generation for each prompt."""

    _request: CompletionRequest
    WHOLE = CHUNK = "text_completion"
    FIRST = LATER = b'"text":'
    BEHIND = b""

    def __init__(
        self,
        request: CompletionRequest,
        generations: Sequence[Generation],
        header: Header,
        echoes: Sequence[Echo] | None,
    ) -> None:
        super().__init__(request, generations, header)
        self._echoes = echoes
        self._choices = [self._new_choice(number) for number in range(len(generations) * request.num_choices)]

    def _is_plain(self) -> bool:
        request = self._request
        is_text = self._echoes is None and request.logprobs is None and request.prompt_logprobs is None
        return is_text and len(self._generations) == 1 and not request.usage_with_every_chunk

    async def _full_events(self) -> AsyncIterator[bytes]:
        async for number, delta in self._deltas():
            choice = self._choices[number]
            self._take(number, delta)
            text = "".join(choice.texts)
            if not text and delta.reason is None:
                continue
            shown = self._shown(number, text, delta.reason)
            choice.texts, choice.positions = [], []
            yield self._chunk(shown)

    async def whole(self) -> bytes:
        """The whole answer."""
        async for number, delta in self._deltas():
            self._take(number, delta)
        await self._drain()
        choices = [
            self._shown(number, "".join(choice.texts), choice.reason) for number, choice in enumerate(self._choices)
        ]
        if self._request.prompt_logprobs is not None:
            for number, shown in enumerate(choices):
                generation = self._generations[number // self._request.num_choices]
                shown["prompt_logprobs"] = prompt_logprobs(generation.prompt_logprobs, self._request.prompt_logprobs)
        return self._answer(choices)

    def _new_choice(self, number: int) -> _Choice:
        echo = None if self._echoes is None else self._echoes[number // self._request.num_choices]
        asked = self._request.logprobs
        return _Choice(echo, None if asked is None else CompletionLogprobs(asked))

    def _take(self, number: int, delta: Delta) -> None:
        choice = self._choices[number]
        if choice.echo is not None and not choice.begun:
            choice.texts.append(choice.echo.text)
            if choice.logprobs is not None:
                generation = self._generations[number // self._request.num_choices]
                choice.positions = [None, *generation.prompt_logprobs]
                choice.first_text = choice.echo.first_token
                choice.first_length = len(choice.first_text) if choice.echo.text.startswith(choice.first_text) else 0
        choice.begun = True
        choice.reason = delta.reason or choice.reason
        if not self._request.only_echo:
            choice.texts.append(delta.text)
            choice.positions += delta.logprobs

    def _shown(self, number: int, text: str, reason: str | None) -> dict[str, Any]:
        choice = self._choices[number]
        logprobs = None
        if choice.logprobs is not None:
            logprobs = choice.logprobs.encode(choice.positions, choice.first_text, choice.first_length)
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _usage(self) -> dict[str, Any]:
        counts = super()._usage()
        if self._request.only_echo:
            counts |= {"completion_tokens": 0, "total_tokens": counts["prompt_tokens"]}
        return counts

    async def _deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """(index of the choice, its delta), of all prompts as they come."""
        per_prompt = self._request.num_choices
        if len(self._generations) == 1:
            while (delta := await self._generations[0].next()) is not None:
                yield delta.index, delta
            return
        queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue(_MERGED)
        tasks = [
            asyncio.create_task(_forward(generation, number * per_prompt, queue))
            for number, generation in enumerate(self._generations)
        ]
        try:
            unfinished = len(tasks)
            while unfinished:
                found = await queue.get()
                if isinstance(found, Exception):
                    raise found
                if found is None:
                    unfinished -= 1
                else:
                    yield found
        finally:
            for task in tasks:
                task.cancel()
            for generation in self._generations:
                generation.cancel()


async def _forward(
    generation: Generation, first: int, queue: asyncio.Queue[tuple[int, Delta] | Exception | None]
) -> None:
    try:
        while (delta := await generation.next()) is not None:
            await queue.put((first + delta.index, delta))
        await queue.put(None)
    except Exception as error:
        await queue.put(error)
