"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minisgl_backend.openai.triton import Position, TokenLogprob


def chat_logprobs(positions: Sequence[Position], num_top: int) -> dict[str, Any]:
    """/v1/chat/completions: one entry a token, with `num_top` alternatives."""
    return {"content": [_chat_entry(position, num_top) for position in positions]}


def _chat_entry(position: Position, num_top: int) -> dict[str, Any]:
    entries = list(position.values())
    top = sorted((entry for entry in entries if entry.rank <= num_top), key=lambda entry: entry.rank)
    return {**_token(entries[0]), "top_logprobs": [_token(entry) for entry in top]}


def _token(entry: TokenLogprob) -> dict[str, Any]:
    data = entry.bytes if entry.bytes is not None else list(entry.decoded_token.encode())
    return {"token": entry.decoded_token, "logprob": entry.logprob, "bytes": data}


class CompletionLogprobs:
    """/v1/completions: parallel lists; `text_offset` counts characters from the start of the choice's text."""

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._offset = 0

    def encode(self, positions: Sequence[Position | None], first_text: str = "") -> dict[str, Any]:
        """The next tokens of the choice. A position without values (a prompt's first token) has `first_text`."""
        tokens: list[str] = []
        values: list[float | None] = []
        top: list[Mapping[str, float] | None] = []
        offsets: list[int] = []
        for position in positions:
            offsets.append(self._offset)
            if position is None:
                tokens.append(first_text)
                values.append(None)
                top.append(None)
            else:
                entries = list(position.values())
                tokens.append(entries[0].decoded_token)
                values.append(entries[0].logprob)
                top.append({e.decoded_token: e.logprob for e in entries[::-1]} if self._num_top else {})
            self._offset += len(tokens[-1])
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": top if self._num_top else None,
            "text_offset": offsets,
        }


def prompt_logprobs(positions: Sequence[Position]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: null for the first token, then the server's own form."""
    return [None, *({key: _plain(entry) for key, entry in position.items()} for position in positions)]


def _plain(entry: TokenLogprob) -> dict[str, Any]:
    return {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.decoded_token}
