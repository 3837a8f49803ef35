"""Masks of many grammars, filled on threads that stay."""

from __future__ import annotations

import builtins
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minisgl_backend.grammar import mask_filler
from minisgl_backend.grammar.mask_filler import MaskFiller
from minisgl_backend.grammar.time_budget import TimeBudget
from minisgl_backend.request import Grammar

WORDS = 3
GRAMMAR = Grammar(kind="regex", text="of all")


class Matcher:
    """Fills its number in. xgrammar's own batches refuse it, so that it is filled alone."""

    def __init__(
        self, number: int, seconds: float = 0.0, error: Exception | None = None, computes: float = 0.0
    ) -> None:
        """`seconds`: of standing still."""
        self.number, self.seconds, self.error, self.computes = number, seconds, error, computes
        self.threads: list[threading.Thread] = []

    def fill_next_token_bitmask(self, bitmask: np.ndarray, index: int) -> None:
        self.threads.append(threading.current_thread())
        time.sleep(self.seconds)
        end = time.thread_time() + self.computes
        while time.thread_time() < end:
            pass
        if self.error is not None:
            raise self.error
        bitmask[index] = self.number


@pytest.fixture
def filler() -> Any:
    filler = MaskFiller(TimeBudget(60.0, 60.0), 4)
    yield filler
    filler.close()


def filled(filler: MaskFiller, matchers: list[Matcher], num_new: int = 0) -> tuple[list[int], dict[int, Exception]]:
    bitmask = np.full((len(matchers), WORDS), -7, dtype=np.int32)
    errors = filler.fill(matchers, bitmask, lambda index: GRAMMAR, num_new=num_new)
    assert (bitmask == bitmask[:, :1]).all()
    return bitmask[:, 0].tolist(), errors


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 9, 64, 100])
@pytest.mark.parametrize("num_new", [0, 1, 70])
def test_each_bitmask_row_is_of_its_matcher(filler: MaskFiller, count: int, num_new: int) -> None:
    for turn in range(20):
        numbers = list(range(turn, turn + count))
        assert filled(filler, [Matcher(number) for number in numbers], min(num_new, count)) == (numbers, {})


def test_masks_that_take_long_are_shared(filler: MaskFiller) -> None:
    matchers = [Matcher(number, seconds=0.02) for number in range(16)]
    assert filled(filler, matchers) == (list(range(16)), {})
    assert len({thread for matcher in matchers for thread in matcher.threads}) > 1


def test_masks_that_take_no_time_wake_nobody(filler: MaskFiller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_filler, "WORK_PER_HELPER_S", 1e6)
    matchers = [Matcher(number) for number in range(16)]
    filled(filler, matchers)
    assert {thread for matcher in matchers for thread in matcher.threads} == {threading.current_thread()}


@pytest.mark.parametrize("count", [2, 12])
def test_a_matcher_that_fails_harms_no_other(filler: MaskFiller, count: int) -> None:
    error = RuntimeError("no such state")
    matchers = [Matcher(number, seconds=0.001) for number in range(count)]
    matchers[1].error = error
    for _ in range(3):
        numbers, errors = filled(filler, matchers)
        assert numbers == [0, -7, *range(2, count)]
        assert errors == {1: error}


@pytest.mark.parametrize(("count", "batches"), [(1, 0), (4, 0), (12, 6)])
def test_a_part_of_one_mask_is_no_batch(
    filler: MaskFiller, monkeypatch: pytest.MonkeyPatch, count: int, batches: int
) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    made: list[int] = []

    class Batch:
        def __init__(self, max_threads: int) -> None:
            made.append(max_threads)

        def batch_fill_next_token_bitmask(
            self, matchers: list[Matcher], bitmask: np.ndarray, indices: list[int]
        ) -> None:
            for matcher, index in zip(matchers, indices, strict=True):
                matcher.fill_next_token_bitmask(bitmask, index)

    monkeypatch.setattr(xgrammar, "BatchGrammarMatcher", Batch)
    assert filled(filler, [Matcher(number) for number in range(count)]) == (list(range(count)), {})
    assert made == [1] * batches


def test_the_library_is_loaded_at_no_masks_expense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else those of the next step would be filled one by one, and timed."""
    pytest.importorskip("xgrammar")
    now, load = 0.0, builtins.__import__

    def load_slowly(name: str, *arguments: Any) -> Any:
        nonlocal now
        now += 1.0 * (name == "xgrammar")
        return load(name, *arguments)

    monkeypatch.setattr(mask_filler, "time", SimpleNamespace(perf_counter=lambda: now, thread_time=time.thread_time))
    monkeypatch.setattr(builtins, "__import__", load_slowly)
    filler = MaskFiller(TimeBudget(0.05), 1)
    matchers = [Matcher(number) for number in range(2)]
    for _ in range(2):
        assert filled(filler, matchers) == ([0, 1], {})
    assert now == 2.0  # both times all at once


def test_without_threads_the_caller_fills_alone(filler: MaskFiller, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    matchers = [Matcher(number, seconds=0.001) for number in range(12)]
    for _ in range(2):
        assert filled(filler, matchers) == (list(range(12)), {})


def test_the_helpers_end_with_it() -> None:
    filler = MaskFiller(TimeBudget(60.0, 60.0), 3)
    matchers = [Matcher(number, seconds=0.01) for number in range(12)]
    filled(filler, matchers)
    helpers = {thread for matcher in matchers for thread in matcher.threads} - {threading.current_thread()}
    filler.close()
    for thread in helpers:
        thread.join(5.0)
        assert not thread.is_alive()
    assert filled(filler, matchers) == (list(range(12)), {})


def test_real_matchers_are_filled_as_one_by_one(filler: MaskFiller) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    words = ["a", "b", "c", "ab", "bc", *(f"{number}" for number in range(90)), "<end>"]
    info = xgrammar.TokenizerInfo(words, vocab_size=len(words), stop_token_ids=[len(words) - 1])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    matchers = [xgrammar.GrammarMatcher(compiler.compile_regex(f"[a-c]*{number}")) for number in range(40)]
    expected = np.zeros((40, WORDS), dtype=np.int32)
    for index, matcher in enumerate(matchers):
        matcher.fill_next_token_bitmask(expected, index)
    # What the memory held before is nobody's.
    for poison in (0, -1, 0x5A5A5A5A):
        bitmask = np.full((40, WORDS), poison, dtype=np.int32)
        assert filler.fill(matchers, bitmask, lambda index: GRAMMAR) == {}
        assert (bitmask == expected).all()
    terminated = matchers[7]
    assert terminated.accept_token(words.index("7"))
    assert terminated.accept_token(len(words) - 1)
    bitmask = np.zeros((40, WORDS), dtype=np.int32)
    assert list(filler.fill(matchers, bitmask, lambda index: GRAMMAR)) == [7]
    others = np.arange(40) != 7
    assert (bitmask[others] == expected[others]).all()
