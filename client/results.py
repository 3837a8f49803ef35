"""Responses: pieces of a stream, and whole answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_KNOWN_OUTPUTS = frozenset(
    "text_output finish_reason num_input_tokens num_output_tokens sequence_index logprobs prompt_logprobs".split()
)


@dataclass(frozen=True)
class Reply:
    """One response: its outputs, flattened, by name. `final` is None if the protocol has no such flag."""

    outputs: Mapping[str, Sequence[Any]]
    final: bool | None = None


@dataclass(frozen=True)
class Chunk:
    """A piece of one sequence of a stream. Counts are None if the server does not report them."""

    text: str
    finish_reason: str | None = None  # "stop" or "length" on the last chunk of its sequence
    index: int = 0  # which of the `n` sequences
    num_input_tokens: int | None = None  # the prompt's, the same in each chunk
    num_output_tokens: int | None = None  # of this chunk alone
    logprobs: list[Any] | None = None  # one entry per token, if requested
    prompt_logprobs: list[Any] | None = None
    extra: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # the server's other outputs


@dataclass(frozen=True)
class Choice:
    """One whole sequence."""

    text: str
    finish_reason: str | None
    index: int
    num_output_tokens: int | None
    logprobs: list[Any] | None = None


@dataclass(frozen=True)
class Result:
    """A whole answer. `text`, `finish_reason` and `logprobs` are those of the first sequence."""

    request_id: str
    choices: tuple[Choice, ...]
    num_input_tokens: int | None
    num_output_tokens: int | None  # of all sequences together
    prompt_logprobs: list[Any] | None = None
    extra: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def texts(self) -> list[str]:
        return [choice.text for choice in self.choices]

    @property
    def finish_reason(self) -> str | None:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> list[Any] | None:
        return self.choices[0].logprobs


def chunks_of(reply: Reply) -> list[Chunk]:
    """The chunks in one response: none in a bare final flag, one in a stream, n in a whole answer of n sequences."""
    outputs = reply.outputs
    texts = outputs.get("text_output", ())
    extra = {name: values for name, values in outputs.items() if name not in _KNOWN_OUTPUTS}
    return [
        Chunk(
            text=text,
            finish_reason=real_reason(_item(outputs, "finish_reason", position, len(texts))),
            index=_first(outputs, "sequence_index", 0) if len(texts) == 1 else position,
            num_input_tokens=_first(outputs, "num_input_tokens", None),
            num_output_tokens=_item(outputs, "num_output_tokens", position, len(texts)),
            logprobs=_logprobs(_item(outputs, "logprobs", position, len(texts))),
            prompt_logprobs=_logprobs(_first(outputs, "prompt_logprobs", None)),
            extra=extra,
        )
        for position, text in enumerate(texts)
    ]


def real_reason(value: Any) -> str | None:
    """A finish reason, None while its sequence goes on."""
    return value if value not in (None, "", "None") else None  # vLLM's backend says "None" while it goes on


class Collector:
    """Joins the chunks of a request to a Result."""

    def __init__(self) -> None:
        self._chunks: dict[int, list[Chunk]] = {}
        self._num_input_tokens: int | None = None
        self._prompt_logprobs: list[Any] | None = None
        self._extra: dict[str, Sequence[Any]] = {}

    def add(self, chunk: Chunk) -> None:
        self._chunks.setdefault(chunk.index, []).append(chunk)
        if chunk.num_input_tokens is not None:
            self._num_input_tokens = chunk.num_input_tokens
        if chunk.prompt_logprobs is not None:
            self._prompt_logprobs = chunk.prompt_logprobs
        self._extra.update(chunk.extra)

    def result(self, request_id: str) -> Result:
        """All that was added so far; an answer without any chunk is an empty text."""
        choices = tuple(_join(index, chunks) for index, chunks in sorted(self._chunks.items()))
        return Result(
            request_id=request_id,
            choices=choices or (Choice("", None, 0, None),),
            num_input_tokens=self._num_input_tokens,
            num_output_tokens=_sum([choice.num_output_tokens for choice in choices]),
            prompt_logprobs=self._prompt_logprobs,
            extra=self._extra,
        )


def _join(index: int, chunks: Sequence[Chunk]) -> Choice:
    logprobs = [record for chunk in chunks for record in chunk.logprobs or ()]
    reasons = [chunk.finish_reason for chunk in chunks if chunk.finish_reason is not None]
    return Choice(
        text="".join(chunk.text for chunk in chunks),
        finish_reason=reasons[-1] if reasons else None,
        index=index,
        num_output_tokens=_sum([chunk.num_output_tokens for chunk in chunks]),
        logprobs=logprobs if any(chunk.logprobs is not None for chunk in chunks) else None,
    )


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _first(outputs: Mapping[str, Sequence[Any]], name: str, default: Any) -> Any:
    values = outputs.get(name, ())
    return values[0] if len(values) else default


def _item(outputs: Mapping[str, Sequence[Any]], name: str, position: int, count: int) -> Any:
    """The value of one sequence; a single value for several sequences is a total and counts for the first."""
    values = outputs.get(name, ())
    if len(values) == count:
        return values[position]
    return values[0] if len(values) and position == 0 else None


def _logprobs(value: Any) -> list[Any] | None:
    if value in (None, "", "null"):
        return None
    records = json.loads(value)
    return records if isinstance(records, list) else [records]
