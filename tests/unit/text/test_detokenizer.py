"""Streams of text: whatever the split, the pieces add up to the tokenizer's own decode."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from minisgl_backend.text.detokenizer import new_detokenizer
from minisgl_backend.text.vocabulary import Vocabulary, vocabulary_of

TEXTS = ["Ünïcödé", "日本語のテキスト", "👩‍👩‍👧 and 🏳️‍🌈", " leading and trailing ", "a\n\n\tb", "", "é" * 5, "\x00\x7f"]


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    vocab["Ġt"], vocab["he"] = len(vocab), len(vocab) + 1
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "t"), ("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("日本", special=False)])
    return tokenizer


def byte_fallback(strip: bool = True) -> Tokenizer:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for piece in ["▁", "a", "b", "c", "é", "▁a", "</s>"]:
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True, unk_token=None))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def word_piece() -> Tokenizer:
    vocab = {word: index for index, word in enumerate(["[UNK]", "hello", "world", "##ing", "it", "##s", "é"])}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return vocabulary_of(tokenizer, frozenset(special))


def stream(words: Vocabulary, ids: list[int], cuts: list[int], skip: bool = True) -> str:
    detokenizer = new_detokenizer(words, skip)
    borders = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    pieces = [detokenizer.feed(ids[start:end]) for start, end in itertools.pairwise(borders)]
    return "".join(pieces) + detokenizer.finish()


BYTE_LEVEL = vocabulary(byte_level())
SIZE = len(BYTE_LEVEL)


@given(st.lists(st.integers(0, SIZE - 1)), st.lists(st.integers(0, 20)), st.booleans())
def test_any_ids_at_any_split(ids: list[int], cuts: list[int], skip: bool) -> None:
    assert stream(BYTE_LEVEL, ids, cuts, skip) == BYTE_LEVEL.decode(ids, skip)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback(), byte_fallback(strip=False)])
def test_any_text_token_by_token(text: str, tokenizer: Tokenizer) -> None:
    words = vocabulary(tokenizer)
    ids = tokenizer.encode(text.replace(" ", "▁") if "▁" in tokenizer.get_vocab() else text).ids
    prompt = tokenizer.encode("b").ids
    assert "b" + stream(words, ids, list(range(len(ids)))) == words.decode([*prompt, *ids])
    assert words.byte_exact


@given(st.lists(st.integers(0, 6), max_size=12), st.lists(st.integers(0, 12)))
def test_a_tokenizer_without_byte_tokens(ids: list[int], cuts: list[int]) -> None:
    words = vocabulary(word_piece())
    assert not words.byte_exact
    assert stream(words, ids, cuts) == words.decode(ids)


def test_no_piece_breaks_a_character() -> None:
    ids = byte_level().encode("ab 🎉 日 é").ids
    detokenizer = new_detokenizer(BYTE_LEVEL)
    pieces = [detokenizer.feed([token]) for token in ids]
    assert not any("�" in piece for piece in pieces)
    assert "".join(pieces) == "ab 🎉 日 é"
    assert detokenizer.finish() == ""


def test_an_incomplete_character_is_flushed_at_the_end() -> None:
    ids = byte_level().encode("x🎉").ids[:-1]
    detokenizer = new_detokenizer(BYTE_LEVEL)
    assert detokenizer.feed(ids) == "x"
    assert detokenizer.finish() == "�"


def test_special_tokens_show_only_when_asked() -> None:
    tokenizer = byte_level()
    ids = [*tokenizer.encode("hi").ids, tokenizer.token_to_id("<|end|>")]
    assert stream(BYTE_LEVEL, ids, []) == "hi"
    assert stream(BYTE_LEVEL, ids, [], skip=False) == "hi<|end|>"


def test_ids_that_the_tokenizer_does_not_know_are_no_text() -> None:
    assert stream(BYTE_LEVEL, [SIZE + 5, *byte_level().encode("ok").ids], [1]) == "ok"


def test_the_space_before_the_first_word_stays() -> None:
    """An answer continues its prompt: only at the start of a whole text would the tokenizer drop that space."""
    tokenizer = byte_fallback()
    words = vocabulary(tokenizer)
    prompt, answer = tokenizer.encode("b").ids, [tokenizer.token_to_id("▁a"), tokenizer.token_to_id("▁a")]
    assert words.decode(answer) == "a a"
    assert stream(words, answer, [1]) == " a a"
    assert words.decode([*prompt, *answer]) == "b a a"


def test_two_streams_do_not_touch() -> None:
    first, second = new_detokenizer(BYTE_LEVEL), new_detokenizer(BYTE_LEVEL)
    ids = byte_level().encode("🎉").ids
    assert first.feed(ids[:2]) == ""
    assert second.feed(ids) == "🎉"
    assert first.feed(ids[2:]) == "🎉"
