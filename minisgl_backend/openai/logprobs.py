"""Log-probabilities in OpenAI's two formats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from minisgl_backend.openai.triton import Delta, Position, TokenLogprob


def chat_logprobs(positions: Sequence[Position], num_top: int) -> dict[str, Any]:
    """/v1/chat/completions: one entry per token, with `num_top` alternatives."""
    return {"content": [_chat_entry(position, num_top) for position in positions]}


def _chat_entry(position: Position, num_top: int) -> dict[str, Any]:
    entries = list(position.values())
    top = sorted((entry for entry in entries if entry.rank <= num_top), key=lambda entry: entry.rank)
    return {**_token(entries[0]), "top_logprobs": [_token(entry) for entry in top]}


def _token(entry: TokenLogprob) -> dict[str, Any]:
    data = entry.bytes if entry.bytes is not None else list(entry.decoded_token.encode())
    return {"token": entry.decoded_token, "logprob": entry.logprob, "bytes": data}


def said(delta: Delta) -> Sequence[Position]:
    """The positions of a delta, except those of the stop token or stop string that ended the answer: as in OpenAI's
    API, the tokens add up to the content."""
    positions = list(delta.logprobs)
    if delta.reason != "stop":
        return positions
    while positions:
        last = next(iter(positions[-1].values()))
        if last.bytes is not None or (last.decoded_token and delta.text.endswith(last.decoded_token)):
            break
        positions.pop()
    return positions


class HeldPositions:
    """Tokens whose text has not been emitted yet; assigns them to the answer's parts.

    Tokens of text that is never emitted (tags, the white space around them) belong to no part.
    """

    def __init__(self) -> None:
        self._held: list[tuple[Position, str]] = []  # with the part of each token's text that is still to come

    def add(self, positions: Sequence[Position]) -> None:
        self._held += [(position, next(iter(position.values())).decoded_token) for position in positions]

    def skip(self, text: str) -> None:
        """Drops the tokens up to the end of `text`; one that continues after it stays for the next part."""
        start = self._text().find(text)
        if start >= 0:
            end = start + len(text)
            self._held = [
                (position, own[max(end - begin, 0) :])
                for begin, position, own in self._with_offsets()
                if begin + len(own) > end or begin >= end
            ]

    def take(self, text: str, *, latest: bool = False) -> list[Position]:
        """The tokens that contain any of `text`; earlier ones are dropped, later ones stay held.

        Returns all held tokens if their texts do not add up to it, as with characters of several tokens. `latest`:
        `text` is the last occurrence, if it may have occurred before.
        """
        whole = self._text()
        start = whole.rfind(text) if latest else whole.find(text)
        if start < 0:
            return self.take_all()
        end = start + len(text)
        placed = list(self._with_offsets())
        self._held = [(position, own) for begin, position, own in placed if begin >= end]
        return [position for begin, position, own in placed if begin < end and begin + len(own) > start]

    def take_all(self) -> list[Position]:
        found = [position for position, _ in self._held]
        self._held = []
        return found

    def _text(self) -> str:
        return "".join(own for _, own in self._held)

    def _with_offsets(self) -> Iterator[tuple[int, Position, str]]:
        """With the number of characters before each."""
        begin = 0
        for position, own in self._held:
            yield begin, position, own
            begin += len(own)


class CompletionLogprobs:
    """/v1/completions: parallel lists; `text_offset` counts characters from the start of the choice's text."""

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._offset = 0

    def encode(
        self, positions: Sequence[Position | None], first_text: str = "", first_length: int | None = None
    ) -> dict[str, Any]:
        """The next tokens of the choice. A position without values (a prompt's first token) has `first_text`, of which
        `first_length` characters (None: all) are part of the choice's text: 0 for a token added by the tokenizer."""
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
                entries = [entry for _, entry in _asked(position.items(), self._num_top)]
                tokens.append(entries[0].decoded_token)
                values.append(entries[0].logprob)
                top.append(dict(reversed(list(_by_text(position.items(), self._num_top).items()))))
            self._offset += first_length if position is None and first_length is not None else len(tokens[-1])
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": top if self._num_top else None,
            "text_offset": offsets,
        }


def prompt_logprobs(positions: Sequence[Position], num_top: int) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: null for the first token, then the server's own format."""
    return [None, *(_prompt_entry(position, num_top) for position in positions)]


def _prompt_entry(position: Position, num_top: int) -> dict[str, Any]:
    asked = _asked(position.items(), num_top)
    return {key: _plain(entry) for key, entry in asked}


def _by_text(entries: Iterable[tuple[str, TokenLogprob]], num_top: int) -> dict[str, float]:
    """Values by the tokens' texts. If several have the same text (partial characters), the first one keeps it; the
    others are named by their bytes, as OpenAI does, or by their id, as vLLM does."""
    found: dict[str, float] = {}
    for number, entry in _asked(entries, num_top):
        text = entry.decoded_token
        if text in found:
            as_bytes = "".join(f"\\x{byte:02x}" for byte in entry.bytes or ())
            text = f"bytes:{as_bytes}" if as_bytes else f"token_id:{number}"
        found[text] = entry.logprob
    return found


def _asked(entries: Iterable[tuple[str, TokenLogprob]], num_top: int) -> Iterator[tuple[str, TokenLogprob]]:
    """The token's own value first, then the `num_top` most likely ones; echoed and prompt log-probabilities may request
    different numbers."""
    return (item for number, item in enumerate(entries) if number == 0 or item[1].rank <= num_top)


def _plain(entry: TokenLogprob) -> dict[str, Any]:
    return {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.decoded_token}
