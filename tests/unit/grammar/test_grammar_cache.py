"""The cache of compiled, refused and slow grammars has limits in number, bytes and time."""

from __future__ import annotations

import pytest

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.grammar.compiling import cache as grammar_cache
from minisgl_backend.grammar.compiling.cache import BYTES_PER_CHAR, ENTRY_BYTES, MAX_ENTRIES, GrammarCache
from minisgl_backend.request import Grammar


def named(text: object) -> Grammar:
    return Grammar(kind="regex", text=str(text))


def beyond_itself(num_bytes: int) -> int:
    """The size that xgrammar reports for a grammar with a text of one character and `num_bytes` in total."""
    return num_bytes - ENTRY_BYTES - BYTES_PER_CHAR


def test_compiled_ones_go_in_the_order_of_their_last_use() -> None:
    cache = GrammarCache(max_bytes=30_000)
    for name in "abc":
        cache.note_compiled(named(name), name, beyond_itself(10_000))
    cache.note_compiled(named("a"), "again", beyond_itself(10_000))  # counted once
    assert cache.get(named("a")) == "a"
    cache.note_compiled(named("d"), "d", beyond_itself(10_000))
    assert [cache.get(named(name)) for name in "abcd"] == ["a", None, "c", "d"]
    cache.note_compiled(named("e"), "e", beyond_itself(30_000))
    assert [cache.get(named(name)) for name in "acde"] == [None, None, None, "e"]


def test_one_that_is_too_large_drives_no_other_out() -> None:
    cache = GrammarCache(max_bytes=30_000)
    cache.note_compiled(named("a"), "a", beyond_itself(10_000))
    cache.note_compiled(named("b"), "b", beyond_itself(30_001))
    assert [cache.get(named(name)) for name in "ab"] == ["a", None]
    cache.note_compiled(named("c"), "c", beyond_itself(20_000))
    assert [cache.get(named(name)) for name in "ac"] == ["a", "c"]


def test_texts_and_entries_take_memory_too() -> None:
    """xgrammar counts neither: of a schema that is all description it says 2 KB."""
    cache = GrammarCache(max_bytes=1 << 20)
    for texts, most in (([f"{number:060000}" for number in range(100)], 10), (list(range(1000)), 300)):
        for text in texts:
            cache.note_compiled(named(text), "compiled", 1)
        assert 0 < sum(cache.is_known(named(text)) for text in texts) <= most


def test_what_was_compiled_may_be_refused_later() -> None:
    cache = GrammarCache(max_bytes=20_000)
    for name in "ab":
        cache.note_compiled(named(name), name, beyond_itself(10_000))
    cache.note_refused(named("a"), "too hard")
    cache.note_refused(named("a"), "too hard")
    cache.note_compiled(named("a"), "a", beyond_itself(10_000))  # by whoever had begun before
    with pytest.raises(InvalidRequestError, match="too hard"):
        cache.get(named("a"))
    cache.note_compiled(named("c"), "c", beyond_itself(10_000))  # there is room
    assert [cache.get(named(name)) for name in "bc"] == ["b", "c"]


def test_refusals_and_slowness_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = GrammarCache(max_bytes=0)
    cache.note_refused(named("wrong"), "too hard")
    cache.note_slow(named("slow"), True)
    assert cache.is_known(named("wrong"))
    assert not cache.is_known(named("slow"))
    with pytest.raises(InvalidRequestError, match="too hard"):
        cache.get(named("wrong"))
    monkeypatch.setattr(grammar_cache, "ENTRY_TTL_S", 0.0)
    assert cache.get(named("wrong")) is None
    assert not cache.is_known(named("wrong"))
    assert not cache.is_slow(named("slow"))


def test_as_many_as_may_are_remembered_and_the_oldest_go() -> None:
    cache = GrammarCache(max_bytes=0)
    for number in range(MAX_ENTRIES):
        cache.note_slow(named(number), True)
    cache.note_slow(named(0), True)  # the newest now
    cache.note_slow(named("new"), True)
    assert [cache.is_slow(named(name)) for name in (0, 1, 2, "new")] == [True, False, True, True]
    cache.note_slow(named("new"), False)
    assert not cache.is_slow(named("new"))
