"""What is remembered of grammars has bounds in number, bytes and time."""

from __future__ import annotations

import pytest

from minisgl_backend.engine import grammar_memory
from minisgl_backend.engine.grammar_memory import MAX_REMEMBERED, GrammarMemory
from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.request import Grammar


def named(text: object) -> Grammar:
    return Grammar(kind="regex", text=str(text))


def test_compiled_ones_go_in_the_order_of_their_last_use() -> None:
    memory = GrammarMemory(most_bytes=30)
    for name in "abc":
        memory.note_compiled(named(name), name, 10)
    memory.note_compiled(named("a"), "again", 10)  # counted once
    assert memory.recall(named("a")) == "a"
    memory.note_compiled(named("d"), "d", 10)
    assert [memory.recall(named(name)) for name in "abcd"] == ["a", None, "c", "d"]
    memory.note_compiled(named("large"), "large", 31)
    assert [memory.recall(named(name)) for name in ("a", "d", "large")] == [None, None, None]
    memory.note_compiled(named("e"), "e", 30)
    assert memory.recall(named("e")) == "e"


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
