"""Token ids of one stream -> text, piece by piece: no broken characters, no lost spaces, nothing left at the end.

A stream continues its prompt: however it is split, its pieces add up to what the tokenizer's decode of prompt plus
stream has beyond that of the prompt. So a space before the first word is kept, which SentencePiece tokenizers drop at
the start of a text. (One exception: byte-fallback tokenizers turn a whole run of byte tokens into U+FFFD if any of it
is invalid; a stream has then already sent the valid characters of the run and replaces only the rest.)
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from minisgl_backend.text.vocabulary import Vocabulary

_MAX_HELD_TOKENS = 16  # no character has more tokens: one still incomplete then is invalid


class Detokenizer(Protocol):
    """The text of one stream so far."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; "" while a character is incomplete."""
        ...

    def finish(self) -> str:
        """The text held back, with U+FFFD for an incomplete character. Ends the stream."""
        ...


def new_detokenizer(
    vocabulary: Vocabulary, skip_special_tokens: bool = True, prompt_tail: Sequence[int] = ()
) -> Detokenizer:
    """A detokenizer for one stream. `prompt_tail`: the prompt's last tokens, see `Vocabulary.tail`."""
    if vocabulary.byte_exact:
        return _ByteDetokenizer(vocabulary, skip_special_tokens)
    return _WindowDetokenizer(vocabulary, skip_special_tokens, prompt_tail)


class _ByteDetokenizer:
    """By table: the bytes of each token go through an incremental UTF-8 decoder."""

    __slots__ = ("_decoder", "_table")

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._table = vocabulary.table(skip_special_tokens)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        table = self._table
        try:
            data = b"".join([table[i] for i in token_ids])
        except IndexError:  # a model may have more embedding rows than its tokenizer has tokens
            data = b"".join([table[i] for i in token_ids if i < len(table)])
        return self._decoder.decode(data)

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


class _WindowDetokenizer:
    """Decodes a short window twice, with and without the new tokens; for any tokenizer."""

    __slots__ = ("_decode", "_ids", "_known", "_skip", "_text_of_known")

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool, prompt_tail: Sequence[int]) -> None:
        self._decode = vocabulary.decode
        self._skip = skip_special_tokens
        self._ids = list(prompt_tail)  # the window: the last tokens whose text was sent, and all after them
        self._known = len(self._ids)  # number of the window's tokens whose text was sent
        self._text_of_known = self._decode(self._ids, self._skip)

    def feed(self, token_ids: Sequence[int]) -> str:
        pieces = []
        for token_id in token_ids:
            self._ids.append(token_id)
            pieces.append(self._advance(force=len(self._ids) - self._known > _MAX_HELD_TOKENS))
        return "".join(pieces)

    def finish(self) -> str:
        return self._advance(force=True) if len(self._ids) > self._known else ""

    def _advance(self, force: bool) -> str:
        text = self._decode(self._ids, self._skip)
        if text.endswith("�") and not force:
            return ""
        piece = text[len(self._text_of_known) :]
        self._ids = self._ids[self._known :]
        self._known = len(self._ids)
        self._text_of_known = self._decode(self._ids, self._skip)
        return piece
