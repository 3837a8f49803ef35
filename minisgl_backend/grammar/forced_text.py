"""Jump-forward decoding: text that a grammar forces becomes draft tokens.

Where a grammar allows only one text, as for the braces and names of a JSON schema, its bytes are known in advance, but
not how the model would tokenize them. They are proposed in the most likely tokenization, the longest token first, and
verified like all drafts. (SGLang's jump-forward decoding, Zheng et al. 2024, "SGLang: Efficient Execution of Structured
Language Model Programs", appends the text and tokenizes everything again, which may change the output.)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minisgl_backend.arrays import NO_INT32, Int32Array

LONGEST_TOKEN = 24  # bytes; tokens of forced text are rarely longer


class GreedyTokenizer:
    """Splits bytes into the longest tokens of a vocabulary, from left to right."""

    def __init__(self, tokenizer_info: Any) -> None:
        """tokenizer_info: xgrammar's TokenizerInfo."""
        self._ids = _ids_of(tokenizer_info)
        self._longest = max(map(len, self._ids), default=0)

    def encode(self, text: bytes, most: int) -> Int32Array:
        """The first tokens of the text, int32 [at most `most`]; stops where no token fits."""
        tokens: list[int] = []
        start = 0
        while start < len(text) and len(tokens) < most:
            token, start = self._first(text, start)
            if token is None:
                break
            tokens.append(token)
        return np.array(tokens, dtype=np.int32) if tokens else NO_INT32

    def _first(self, text: bytes, start: int) -> tuple[int | None, int]:
        """The longest token of the text at `start`, and where it ends; (None, start) if there is none."""
        for end in range(min(start + self._longest, len(text)), start, -1):
            if (token := self._ids.get(text[start:end])) is not None:
                return token, end
        return None, start


def _ids_of(tokenizer_info: Any) -> dict[bytes, int]:
    """Bytes -> token. Of tokens with equal bytes the last, since byte-fallback tokens come first in vocabularies."""
    special = set(tokenizer_info.special_token_ids) | set(tokenizer_info.stop_token_ids)
    return {
        text: token
        for token, text in enumerate(tokenizer_info.decoded_vocab)
        if 0 < len(text) <= LONGEST_TOKEN and token not in special
    }
