"""What is remembered of grammars has bounds in number, bytes and time."""

from __future__ import annotations

import pytest

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.grammar import memory as grammar_memory
from minisgl_backend.grammar.memory import ENTRY_BYTES, MAX_REMEMBERED, TEXT_BYTES, GrammarMemory
from minisgl_backend.request import Grammar


def named(text: object) -> Grammar:
    return Grammar(kind="regex", text=str(text))


def beyond_itself(num_bytes: int) -> int:
    """What xgrammar must say of a grammar with a text of one character that takes so much in all."""
    return num_bytes - ENTRY_BYTES - TEXT_BYTES


def test_compiled_ones_go_in_the_order_of_their_last_use() -> None:
    memory = GrammarMemory(most_bytes=30_000)
    for name in "abc":
        memory.note_compiled(named(name), name, beyond_itself(10_000))
    memory.note_compiled(named("a"), "again", beyond_itself(10_000))  # counted once
    assert memory.recall(named("a")) == "a"
    memory.note_compiled(named("d"), "d", beyond_itself(10_000))
    assert [memory.recall(named(name)) for name in "abcd"] == ["a", None, "c", "d"]
    memory.note_compiled(named("e"), "e", beyond_itself(30_000))
    assert [memory.recall(named(name)) for name in "acde"] == [None, None, None, "e"]


def test_one_that_is_too_large_drives_no_other_out() -> None:
    memory = GrammarMemory(most_bytes=30_000)
    memory.note_compiled(named("a"), "a", beyond_itself(10_000))
    memory.note_compiled(named("b"), "b", beyond_itself(30_001))
    assert [memory.recall(named(name)) for name in "ab"] == ["a", None]
    memory.note_compiled(named("c"), "c", beyond_itself(20_000))
    assert [memory.recall(named(name)) for name in "ac"] == ["a", "c"]


def test_texts_and_entries_take_memory_too() -> None:
    """xgrammar counts neither: of a schema that is all description it says 2 KB."""
    memory = GrammarMemory(most_bytes=1 << 20)
    for texts, most in (([f"{number:060000}" for number in range(100)], 10), (list(range(1000)), 300)):
        for text in texts:
            memory.note_compiled(named(text), "compiled", 1)
        assert 0 < sum(memory.is_settled(named(text)) for text in texts) <= most


def test_what_was_compiled_may_be_refused_later() -> None:
    memory = GrammarMemory(most_bytes=20_000)
    for name in "ab":
        memory.note_compiled(named(name), name, beyond_itself(10_000))
    memory.note_refused(named("a"), "too hard")
    memory.note_refused(named("a"), "too hard")
    memory.note_compiled(named("a"), "a", beyond_itself(10_000))  # by whoever had begun before
    with pytest.raises(InvalidRequestError, match="too hard"):
        memory.recall(named("a"))
    memory.note_compiled(named("c"), "c", beyond_itself(10_000))  # there is room
    assert [memory.recall(named(name)) for name in "bc"] == ["b", "c"]


def test_refusals_and_slowness_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = GrammarMemory(most_bytes=0)
    memory.note_refused(named("wrong"), "too hard")
    memory.note_slow(named("slow"), True)
    assert memory.is_settled(named("wrong"))
    assert not memory.is_settled(named("slow"))
    with pytest.raises(InvalidRequestError, match="too hard"):
        memory.recall(named("wrong"))
    monkeypatch.setattr(grammar_memory, "REMEMBERED_S", 0.0)
    assert memory.recall(named("wrong")) is None
    assert not memory.is_settled(named("wrong"))
    assert not memory.is_slow(named("slow"))


def test_as_many_as_may_are_remembered_and_the_oldest_go() -> None:
    memory = GrammarMemory(most_bytes=0)
    for number in range(MAX_REMEMBERED):
        memory.note_slow(named(number), True)
    memory.note_slow(named(0), True)  # the newest now
    memory.note_slow(named("new"), True)
    assert [memory.is_slow(named(name)) for name in (0, 1, 2, "new")] == [True, False, True, True]
    memory.note_slow(named("new"), False)
    assert not memory.is_slow(named("new"))
