"""Tokens to an answer: however they are cut, the same text, count and reason."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from minisgl_backend.request import FinishReason
from minisgl_backend.text.output_processor import OutputProcessor, TextDelta
from minisgl_backend.text.vocabulary import Vocabulary, vocabulary_of

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
LETTERS = Vocabulary(
    lambda ids, skip: bytes(ids).decode("utf-8", "replace"),
    [bytes([i]) for i in range(256)],
    frozenset(),
    byte_exact=True,
)


def whole(
    ids: bytes,
    reason: FinishReason = LENGTH,
    *,
    ends_with_stop_token: bool = False,
    cuts: list[int] | None = None,
    **options: object,
) -> TextDelta:
    """All that a processor says of these tokens, fed in pieces."""
    output = OutputProcessor(LETTERS, **options)  # type: ignore[arg-type]
    borders = [0, *sorted(min(cut, len(ids)) for cut in cuts or ()), len(ids)]
    text, count = "", 0
    for start, end in itertools.pairwise(borders):
        last = end == len(ids) and start == borders[-2]
        delta = output.feed(
            list(ids[start:end]), reason if last else 0, ends_with_stop_token=last and ends_with_stop_token
        )
        text, count = text + delta.text, count + delta.num_tokens
        if delta.reason:
            return TextDelta(text, count, delta.reason)
    raise AssertionError("the last piece has a reason")


def expected(ids: bytes, stops: list[str], min_tokens: int, include: bool) -> TextDelta:
    """By definition: the first token after `min_tokens` with which the text ends in a stop string."""
    for count in range(min_tokens + 1, len(ids) + 1):
        text = ids[:count].decode()
        found = [stop for stop in stops if text.endswith(stop)]
        if found:
            return TextDelta(text if include else text[: -max(map(len, found))], count, STOP)
    return TextDelta(ids.decode(), len(ids), LENGTH)


@given(
    st.text("ab", max_size=12).map(str.encode),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 8),
    st.booleans(),
    st.lists(st.integers(0, 12), max_size=6),
)
def test_stop_strings_by_definition(
    ids: bytes, stops: list[str], min_tokens: int, include: bool, cuts: list[int]
) -> None:
    found = whole(ids, cuts=cuts, stop=stops, min_tokens=min_tokens, include_stop=include)
    assert found == expected(ids, stops, min_tokens, include)


@pytest.mark.parametrize("cuts", [[], [1, 2, 3]])
@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_the_text_of_a_stop_token_is_no_part_of_the_answer(stop: tuple[str, ...], cuts: list[int]) -> None:
    assert whole(b"abc4", STOP, ends_with_stop_token=True, cuts=cuts, stop=stop) == ("abc", 4, STOP)
    assert whole(b"abc4", STOP, ends_with_stop_token=True, cuts=cuts, stop=stop, include_stop=True) == ("abc4", 4, STOP)
    assert whole(b"abc4", STOP, cuts=cuts, stop=stop) == ("abc4", 4, STOP)  # a grammar's end has no token


def test_a_stop_string_may_begin_before_min_tokens_and_must_end_after() -> None:
    assert whole(b"xaabb", stop=("ab",), min_tokens=3) == ("xa", 4, STOP)
    assert whole(b"xabb", stop=("ab",), min_tokens=3) == ("xabb", 4, LENGTH)


def test_a_stop_string_of_a_character_that_never_came_whole() -> None:
    assert whole("x🎉".encode()[:-1], stop=("\N{REPLACEMENT CHARACTER}",)) == ("x", 4, STOP)
    assert whole("x🎉".encode()[:-1], stop=("y",)) == ("x\N{REPLACEMENT CHARACTER}", 4, LENGTH)


def test_stop_strings_that_begin_with_the_space_before_the_first_word() -> None:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581time": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    words = vocabulary_of(tokenizer, frozenset())
    assert OutputProcessor(words).feed([256, 256], LENGTH).text == " time time"
    assert OutputProcessor(words, stop=(" time",)).feed([256, 256]) == ("", 1, STOP)


def test_an_answer_of_words_continues_its_prompt() -> None:
    """A tokenizer whose words have their spaces from their neighbours."""
    vocab = {word: index for index, word in enumerate(["[UNK]", "hello", "world", "##ing"])}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    words = vocabulary_of(tokenizer, frozenset())
    for answer in ([2, 3, 1], [3, 3, 2]):
        prompt = [1] * 20
        output = OutputProcessor(words, prompt_tail=words.tail(prompt))
        text = "".join(output.feed([token]).text for token in answer) + output.feed([], LENGTH).text
        assert words.decode(prompt) + text == words.decode(prompt + answer)
