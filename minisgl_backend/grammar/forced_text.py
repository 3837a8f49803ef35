"""Text that a grammar forces, as drafts.

Where a grammar leaves one text alone, as it does for the braces and names of a JSON schema, its bytes are known ahead.
How the model cuts them into tokens is not: they are proposed as tokenizers mostly cut them, the longest token first,
and verified as all drafts are. (SGLang's jump-forward decoding, Zheng et al. 2024, "SGLang: Efficient Execution of
Structured Language Model Programs", takes the text as it is and cuts all of it anew, which may change an answer.)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minisgl_backend.arrays import NO_INT32, Int32Array

LONGEST_TOKEN = 24  # bytes; of text that is forced hardly any token is longer


class GreedyTokenizer:
    """Cuts bytes into tokens of one vocabulary."""

    def __init__(self, tokenizer_info: Any) -> None:
        """tokenizer_info: xgrammar's TokenizerInfo."""
        self._ids = _ids_of(tokenizer_info)
        self._longest = max(map(len, self._ids), default=0)

    def encode(self, text: bytes, most: int) -> Int32Array:
        """The first tokens of the text, int32 [at most `most`]; fewer where no token fits."""
        tokens: list[int] = []
        start = 0
        while start < len(text) and len(tokens) < most:
            token, start = self._first(text, start)
            if token is None:
                break
            tokens.append(token)
        return np.array(tokens, dtype=np.int32) if tokens else NO_INT32

    def _first(self, text: bytes, start: int) -> tuple[int | None, int]:
        """The longest token that the text has at `start`, and where it ends."""
        for end in range(min(start + self._longest, len(text)), start, -1):
            if (token := self._ids.get(text[start:end])) is not None:
                return token, end
        return None, start


def _ids_of(tokenizer_info: Any) -> dict[bytes, int]:
    """Tokens by their bytes. Of equal ones the last: those of single bytes, which are a last resort, come first."""
    special = set(tokenizer_info.special_token_ids) | set(tokenizer_info.stop_token_ids)
    return {
        text: token
        for token, text in enumerate(tokenizer_info.decoded_vocab)
        if 0 < len(text) <= LONGEST_TOKEN and token not in special
    }
