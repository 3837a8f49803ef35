"""Text that a grammar forces is cut as tokenizers mostly cut it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from minisgl_backend.grammar.forced_text import GreedyTokenizer

VOCABULARY = [b"{", b'"', b"na", b"name", b'":', b" ", b"<end>", b"", b" ", b"\xe4\xb8"]
TOKENIZER = GreedyTokenizer(SimpleNamespace(decoded_vocab=VOCABULARY, special_token_ids=[], stop_token_ids=[6]))


@pytest.mark.parametrize(
    ("text", "most", "expected"),
    [
        (b'{"name": ', 9, [0, 1, 3, 4, 8]),  # the longest token, and of equal ones the last
        (b'{"name": ', 2, [0, 1]),
        (b'{"nam', 9, [0, 1, 2]),  # behind it no token fits
        (b"{\xe4\xb8", 9, [0, 9]),  # within a character
        (b"<end>", 9, []),  # a token that ends the answer is no text
        (b"", 9, []),
    ],
)
def test_text_is_tokenized_greedily(text: bytes, most: int, expected: list[int]) -> None:
    assert TOKENIZER.encode(text, most).tolist() == expected
