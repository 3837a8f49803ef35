"""/v1/completions: any number of prompts, each n times; with `echo` the prompt before its continuation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from minisgl_backend.openai.answers import Header, usage
from minisgl_backend.openai.encoding import encode
from minisgl_backend.openai.errors import ApiError
from minisgl_backend.openai.logprobs import CompletionLogprobs, prompt_logprobs
from minisgl_backend.openai.requests.completions import CompletionRequest
from minisgl_backend.openai.sse import DONE, KEEP_ALIVE, event, event_prefix
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


class CompletionAnswer:
    """One request in progress: a generation for each prompt."""

    keep_alive = KEEP_ALIVE

    def __init__(
        self,
        request: CompletionRequest,
        generations: Sequence[Generation],
        header: Header,
        echoes: Sequence[Echo] | None,
    ) -> None:
        self._request = request
        self._generations = generations
        self._header = header
        self._echoes = echoes
        self._choices = [self._new_choice(number) for number in range(len(generations) * request.num_choices)]

    async def events(self) -> AsyncIterator[bytes]:
        """The events of a stream: one for each response of the server."""
        request = self._request
        simple = self._echoes is None and request.logprobs is None and request.prompt_logprobs is None
        if simple and len(self._generations) == 1 and not request.usage_with_every_chunk:
            events = self._plain_events(self._generations[0])
        else:
            events = self._full_events()
        async for data in events:
            yield data
        last = b""
        if request.include_usage or request.return_perf_metrics:
            chunk = {**self._header.fields("text_completion"), "choices": [], "usage": self._usage()}
            if request.return_perf_metrics:
                chunk["perf_metrics"] = self._generations[0].perf_metrics
            last = event(chunk)
        yield last + DONE
        await self._drain()

    @staticmethod
    def error_event(error: ApiError) -> bytes:
        return event(error.body)

    async def _plain_events(self, generation: Generation) -> AsyncIterator[bytes]:
        """Text only, of one prompt: each event is three pieces of bytes, of which one is new."""
        read = generation.next
        begin = event_prefix(self._header.fields("text_completion")) + b'"text":'
        no_usage = b',"usage":null' if self._request.include_usage else b""
        end = b',"logprobs":null,"finish_reason":null}]' + no_usage + b"}\n\n"
        last = b',"logprobs":null,"finish_reason":"%s"}]' + no_usage + b"}\n\n"
        heads = [begin % index for index in range(self._request.num_choices)]
        while (delta := await read()) is not None:
            reason = delta.reason
            if delta.text or reason is not None:
                yield heads[delta.index] + encode(delta.text) + (end if reason is None else last % reason.encode())

    async def _full_events(self) -> AsyncIterator[bytes]:
        header = self._header.fields("text_completion")
        async for number, delta in self._deltas():
            choice = self._choices[number]
            self._take(number, delta)
            text = "".join(choice.texts)
            if not text and delta.reason is None:
                continue
            chunk = {**header, "choices": [self._shown(number, text, delta.reason)]}
            choice.texts, choice.positions = [], []
            if self._request.include_usage:
                chunk["usage"] = self._usage() if self._request.usage_with_every_chunk else None
            yield event(chunk)

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
        answer = {**self._header.fields("text_completion"), "choices": choices, "usage": self._usage()}
        if self._request.return_perf_metrics:
            answer["perf_metrics"] = self._generations[0].perf_metrics
        return encode(answer)

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
        counts = usage(*self._generations)
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

    async def _drain(self) -> None:
        for generation in self._generations:
            await generation.drain()


async def _forward(
    generation: Generation, first: int, queue: asyncio.Queue[tuple[int, Delta] | Exception | None]
) -> None:
    try:
        while (delta := await generation.next()) is not None:
            await queue.put((first + delta.index, delta))
        await queue.put(None)
    except Exception as error:
        await queue.put(error)
