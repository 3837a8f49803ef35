"""Tokens of one sequence -> its text and its end: the only code that makes answers, for `LLM` and the server.

Works like vLLM and SGLang: a stop string counts if it ends in a token after the first `min_tokens`, and the text ends
before it; the text of a stop or end-of-sequence token is not part of the answer; `include_stop` adds both. Tokens after
a stop string, which the engine computed before it was told, do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from minisgl_backend.request import FinishReason, SamplingParams
from minisgl_backend.text.detokenizer import new_detokenizer
from minisgl_backend.text.stop_strings import StopStrings
from minisgl_backend.text.vocabulary import Vocabulary


class TextDelta(NamedTuple):
    """What some tokens add to an answer."""

    text: str  # without what may yet become a stop string or a whole character
    num_tokens: int  # number of the tokens that belong to the answer
    reason: int  # FinishReason; 0: the answer goes on


class OutputProcessor:
    """The growing text of one sequence. Nothing may be fed after its end."""

    __slots__ = ("_detokenizer", "_include_stop", "_min_tokens", "_num_tokens", "_stops")

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        prompt_tail: Sequence[int] = (),
    ) -> None:
        """`prompt_tail`: the prompt's last tokens, see `Vocabulary.tail`."""
        self._detokenizer = new_detokenizer(vocabulary, skip_special_tokens, prompt_tail)
        self._stops = StopStrings(stop, include=include_stop) if stop else None
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._num_tokens = 0

    @classmethod
    def of(cls, params: SamplingParams, vocabulary: Vocabulary, prompt_tail: Sequence[int]) -> OutputProcessor:
        """For an answer whose stop strings this class has to find."""
        return cls(
            vocabulary,
            stop=params.stop,
            min_tokens=params.min_tokens,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            prompt_tail=prompt_tail,
        )

    @property
    def is_eager(self) -> bool:
        """Whether tokens must be fed as they come: one may end the answer in a way that the engine cannot see."""
        return self._stops is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return None if self._stops is None else self._stops.found

    def feed(self, token_ids: Sequence[int], reason: int = 0, *, ends_with_stop_token: bool = False) -> TextDelta:
        """Takes the next tokens, any number of them; the result does not depend on how they are split.

        `reason`: 0, or why the engine ended the sequence with these tokens; `ends_with_stop_token`: because of the last
        one.
        """
        num_texts = len(token_ids) - (ends_with_stop_token and not self._include_stop)
        if self._stops is None:
            text = self._detokenizer.feed(token_ids[:num_texts])
            return TextDelta(text + self._detokenizer.finish() if reason else text, len(token_ids), reason)
        return self._search(self._stops, token_ids, num_texts, reason)

    def _search(self, stops: StopStrings, token_ids: Sequence[int], num_texts: int, reason: int) -> TextDelta:
        # Token by token, so that the number of tokens in the answer is exact.
        pieces = []
        for position in range(num_texts):
            self._num_tokens += 1
            counts = self._num_tokens > self._min_tokens
            text, found = stops.feed(self._detokenizer.feed((token_ids[position],)), counts=counts)
            pieces.append(text)
            if found:
                return TextDelta("".join(pieces), position + 1, FinishReason.STOP)
        if reason:
            rest = self._detokenizer.finish()
            text, found = stops.feed(rest, counts=bool(rest) and self._num_tokens > self._min_tokens)
            pieces += [text] if found else [text, stops.finish()]
            if found:
                return TextDelta("".join(pieces), len(token_ids), FinishReason.STOP)
        return TextDelta("".join(pieces), len(token_ids), reason)
