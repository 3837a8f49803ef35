"""The table of a vocabulary against the tokenizer's own word."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from minisgl_backend.models.folder import find_model_dir
from minisgl_backend.text.vocabulary import vocabulary_of


def byte_level(vocab: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_every_letter_is_its_byte_and_nothing_else_is() -> None:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    others = [chr(code) for code in range(0x180) if chr(code) not in alphabet]
    tokens = [*alphabet, *others, "\u0100\n", "\U0001f600"]
    table = vocabulary_of(byte_level({token: i for i, token in enumerate(tokens)}), frozenset()).table(False)
    assert sorted(table[:256]) == [bytes([byte]) for byte in range(256)]
    for letter, data in zip(tokens[:256], table[:256], strict=True):
        decoded = decoders.ByteLevel().decode([letter])
        assert decoded == data.decode("utf-8", "replace")
    assert table[256:] == [token.encode() for token in tokens[256:]]


def test_holes_are_empty_and_added_tokens_have_their_place() -> None:
    tokenizer = byte_level({"a": 0, "b": 1, "c": 7, "d": 9})
    tokenizer.add_tokens(["b", "<new>", AddedToken("<end>", special=True)])
    table = vocabulary_of(tokenizer, frozenset()).table(False)
    assert [token.decode() for token in table] == [tokenizer.id_to_token(i) or "" for i in range(len(table))]


@pytest.mark.parametrize("pieces", [["<unk>", "a", "b", "a", "c"]])
def test_a_token_with_two_ids_has_its_text_at_both(pieces: list[str]) -> None:
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    tokenizer.decoder = decoders.ByteLevel()
    assert vocabulary_of(tokenizer, frozenset()).table(False) == [piece.encode() for piece in pieces]


def test_the_demo_models_table_says_what_its_tokenizer_says() -> None:
    tokenizer = Tokenizer.from_file(str(find_model_dir("demo") / "tokenizer.json"))
    table = vocabulary_of(tokenizer, frozenset()).table(False)
    assert len(table) == 1 + max(tokenizer.get_vocab().values())
    for i in range(0, len(table), 7):
        assert table[i].decode("utf-8", "replace") == tokenizer.decode([i], skip_special_tokens=False)
