"""What grammars take of a step has bounds: for each token, and for all of them together."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minisgl_backend.errors import CapacityError, InvalidRequestError
from minisgl_backend.grammar import manager as grammar_module
from minisgl_backend.grammar import time_budget
from minisgl_backend.grammar.compiling.cache import GrammarCache
from minisgl_backend.grammar.compiling.compilers import GrammarCompilers
from minisgl_backend.grammar.compiling.tokenizer_info import TokenizerSource
from minisgl_backend.grammar.manager import GrammarManager
from minisgl_backend.grammar.mask_filler import MaskFiller
from minisgl_backend.grammar.time_budget import TOO_SLOW, TimeBudget
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.folder import find_model_dir
from minisgl_backend.request import FinishReason, Grammar
from tests.unit.grammar.test_grammar import Harness, guided
from tests.unit.grammar.test_mask_filler import WORDS, Matcher

xgrammar = pytest.importorskip("xgrammar")

MUCH = 1e9  # seconds
# It becomes ambiguous behind what is tried beforehand.
AMBIGUOUS = 'root ::= [0-9]{60} e\ne ::= "" | [a-z] e [a-z] e | e e'


def named(name: object) -> Grammar:
    return Grammar(kind="regex", text=str(name))


def test_the_costliest_grammar_of_a_step_is_late() -> None:
    budget = TimeBudget(MUCH, step_limit_s=1.0)
    for name, seconds in (("a", 0.3), ("b", 0.2), ("a", 0.2), ("c", 0.2)):
        assert not budget.charge(named(name), seconds)
    assert budget.over_budget == set()
    budget.charge(named("c"), 0.2)
    assert budget.over_budget == {named("a")}
    budget.charge(named("a"), 5.0)  # one that another thread had begun
    assert budget.over_budget == {named("a")}
    budget.charge(named("b"), 0.5)
    assert budget.over_budget == {named("a"), named("b")}
    budget.begin_step()
    assert budget.over_budget == set()
    budget.charge(named("a"), 0.9)
    assert budget.over_budget == set()


def test_a_popular_grammar_is_not_the_costliest() -> None:
    budget = TimeBudget()
    for _ in range(100):
        budget.charge(named("popular"), 0.003)
    for name in range(9):
        budget.charge(named(name), 0.24)
    assert len(budget.over_budget) == 2
    assert named("popular") not in budget.over_budget


def test_one_token_may_take_less_than_a_step() -> None:
    budget = TimeBudget(call_limit_s=0.1, step_limit_s=MUCH)
    assert [budget.charge(named("a"), seconds) for seconds in (0.05, 0.06, 0.11)] == [False, False, True]
    assert budget.over_budget == set()


# Masks.


def late_masks(filler: MaskFiller, matchers: list[Any], names: str, num_new: int = 0) -> dict[int, type]:
    bitmask = np.full((len(matchers), WORDS), -7, dtype=np.int32)
    errors = filler.fill(matchers, bitmask, lambda index: named(names[index]), num_new=num_new)
    for index in range(len(matchers)):
        assert index in errors or (bitmask[index] == matchers[index].number).all()
    return {index: type(error) for index, error in sorted(errors.items())}


@pytest.mark.parametrize("max_threads", [1, 4])
@pytest.mark.parametrize("count", [1, 2, 12])
def test_a_mask_that_takes_too_long_is_an_error(count: int, max_threads: int) -> None:
    """At the latest of the next step, where several are filled in one call: which of them it was is not known before;
    on a busy machine each is filled alone at once."""
    filler = MaskFiller(TimeBudget(0.05, MUCH), max_threads)
    matchers = [Matcher(number) for number in range(count)]
    assert late_masks(filler, matchers, "a" * count) == {}
    matchers[-1].computes = 0.06
    first, second = (late_masks(filler, matchers, "a" * count) for _ in range(2))
    late = {count - 1: InvalidRequestError}
    assert first == late or (count > 1 and first == {})
    assert second == late
    filler.close()


def test_a_new_mask_that_takes_too_long_is_an_error_at_once() -> None:
    filler = MaskFiller(TimeBudget(0.05, MUCH), 1)
    matchers = [Matcher(0), Matcher(1, computes=0.06), Matcher(2)]
    assert late_masks(filler, matchers, "aaa", num_new=2) == {1: InvalidRequestError}


def test_a_machine_that_stands_makes_no_mask_late() -> None:
    filler = MaskFiller(TimeBudget(0.01, 0.01), 1)
    for _ in range(3):
        assert late_masks(filler, [Matcher(number, seconds=0.02) for number in range(2)], "ab") == {}


@pytest.mark.parametrize("max_threads", [1, 2])
def test_masks_of_which_none_takes_too_long_have_a_bound_together(max_threads: int) -> None:
    """The costliest grammar has no more of them; those of others are filled."""
    budget = TimeBudget(0.04, step_limit_s=0.1)
    filler = MaskFiller(budget, max_threads)
    matchers = [Matcher(number, computes=0.02 * (number % 2)) for number in range(64)]
    late_masks(filler, matchers, "ab" * 32)  # in parts: the first that takes long has the others timed
    for matcher in matchers:
        matcher.threads.clear()
    budget.begin_step()
    errors = late_masks(filler, matchers, "ab" * 32)
    assert budget.over_budget == {named("b")}
    assert all(index % 2 for index in errors)
    assert all(matcher.threads for matcher in matchers[::2])
    assert sum(map(bool, (matcher.threads for matcher in matchers[1::2]))) <= 8
    filler.close()


def test_new_masks_of_many_grammars_have_a_bound_together() -> None:
    """Each grammar is late once its mask is made: nobody could tell before."""
    filler = MaskFiller(TimeBudget(MUCH, step_limit_s=0.05), 1)
    matchers = [Matcher(number, computes=0.02) for number in range(20)]
    errors = late_masks(filler, matchers, "abcdefghijklmnopqrst", num_new=20)
    assert set(errors.values()) == {CapacityError}
    assert sum(bool(matcher.threads) for matcher in matchers) <= 7


# Tokens.


def test_known_masks_of_many_grammars_have_a_bound_together() -> None:
    """Of grammars of which each is late by the time that it is known."""
    filler = MaskFiller(TimeBudget(0.04, step_limit_s=0.05), 1)
    matchers = [Matcher(number, computes=0.03) for number in range(40)]
    names = "".join(chr(ord("A") + number) for number in range(40))
    for _ in range(2):  # the second time it is known that they take long
        filler._budget.begin_step()
        for matcher in matchers:
            matcher.threads.clear()
        errors = late_masks(filler, matchers, names)
    assert sum(bool(matcher.threads) for matcher in matchers) <= 7
    assert CapacityError in errors.values()


class Clocks:
    """A thread's own clock and that on the wall; matchers move both."""

    def __init__(self) -> None:
        self.computed, self.passed = 0.0, 0.0

    def thread_time(self) -> float:
        return self.computed

    def perf_counter(self) -> float:
        return self.passed

    def matcher(self, computes: float, takes: float, answers: bool | Exception = True) -> Any:
        def accept(token: int) -> bool:
            self.computed += computes
            self.passed += takes
            if isinstance(answers, Exception):
                raise answers
            return answers

        return SimpleNamespace(accept_token=accept, is_terminated=lambda: False)


class Followed:
    """Matchers made by hand, each with a row; all tokens are committed at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call_limit_s: float = MUCH, step_limit_s: float = MUCH) -> None:
        self.clocks = Clocks()
        for module in (grammar_module, time_budget):
            monkeypatch.setattr(module, "time", self.clocks)
        self.cache = GrammarCache(max_bytes=1 << 20)
        compilers: Any = SimpleNamespace(cache=self.cache, num_waiting=0)
        self.grammars = GrammarManager(compilers, TimeBudget(call_limit_s, step_limit_s))

    def ended(self, matchers: list[Any], names: str = "", rows: int | None = None) -> list[tuple[int, FinishReason]]:
        """Each uid is a row; `rows`: how many of them are in the step."""
        self.grammars._matchers = dict(enumerate(matchers))
        self.grammars._grammars = {uid: named(names[uid] if names else uid) for uid in range(len(matchers))}
        self.grammars._rows = {uid: uid for uid in range(len(matchers))}
        count = len(matchers) if rows is None else rows
        plan: Any = SimpleNamespace(sampled_rows=np.arange(count), admitted=())
        result: Any = SimpleNamespace(token_ids=np.zeros(count), accepted=None)
        self.grammars.begin(plan)
        self.grammars.advance(plan, result)
        ended = self.grammars.drain_ended()
        for one in ended:
            if one.detail is not None and one.detail.status == "INVALID_ARG":
                assert one.detail.error == TOO_SLOW
        assert self.grammars.drain_ended() == []
        return [(one.uid, one.reason) for one in ended]

    def late(self, *tokens: tuple[float, float]) -> list[int]:
        ended = self.ended([self.clocks.matcher(*token) for token in tokens])
        assert all(reason is FinishReason.ERROR for _, reason in ended)
        return [uid for uid, _ in ended]

    def is_refused(self, name: str) -> bool:
        try:
            self.cache.get(named(name))
        except InvalidRequestError:
            return True
        return False


def test_who_is_late_is_who_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not who waits for a machine that stands, nor who comes behind many that took a little."""
    late = Followed(monkeypatch, call_limit_s=0.1).late
    assert late((0.2, 0.2)) == [0]
    assert late((0.0, 0.2)) == []
    assert late(*[(0.02, 0.02)] * 20) == []
    assert late(*[(0.02, 0.02)] * 20, (0.0, 0.3)) == []
    assert late(*[(0.02, 0.02)] * 20, (0.2, 0.2), (0.02, 0.02)) == [20]


def test_whoever_ends_is_told_once_and_harms_no_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = Followed(monkeypatch, call_limit_s=0.1)
    matcher = followed.clocks.matcher
    matchers = [
        matcher(0.2, 0.2, RuntimeError("no such state")),
        matcher(0, 0),
        matcher(0.2, 0.2, False),
        matcher(0, 0),
    ]
    assert followed.ended(matchers) == [(0, FinishReason.ERROR), (2, FinishReason.STOP)]


def test_all_sequences_of_the_costliest_grammar_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those, too, that have no row in the step, but not twice those that end by themselves."""
    followed = Followed(monkeypatch, step_limit_s=1.0)
    matcher = followed.clocks.matcher
    followed.cache.note_compiled(named("b"), "compiled", 1)
    slow = [matcher(0.2, 0.2) for _ in range(8)]
    slow[1] = matcher(0.2, 0.2, False)
    ended = followed.ended([matcher(0.1, 0.1), matcher(0.05, 0.05), *slow, matcher(0, 0)], "ac" + "b" * 8 + "d", rows=9)
    assert sorted(ended) == [(2, FinishReason.ERROR), (3, FinishReason.STOP)] + [
        (uid, FinishReason.ERROR) for uid in range(4, 10)
    ]
    assert followed.clocks.computed < 1.5
    assert [followed.is_refused(name) for name in "abcd"] == [False, True, False, False]


def test_sequences_of_many_grammars_have_a_bound_together(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = Followed(monkeypatch, call_limit_s=0.25, step_limit_s=2.0)
    names = "".join(chr(ord("A") + number) for number in range(200))
    followed.ended([followed.clocks.matcher(0.24, 0.24) for _ in names], names)
    assert followed.clocks.computed < 10.0


def test_steps_are_counted_each_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = Followed(monkeypatch, step_limit_s=1.0)
    for _ in range(5):
        assert followed.ended([followed.clocks.matcher(0.2, 0.2) for _ in range(4)], "aaaa") == []


# With real grammars.


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return ModelConfig.load(find_model_dir("demo"))


@pytest.fixture(scope="module")
def compilers(model: ModelConfig) -> Iterator[GrammarCompilers]:
    source = TokenizerSource(str(find_model_dir("demo")), False, model.vocab_size, list(model.eos_token_ids))
    compilers = GrammarCompilers(source)
    yield compilers
    compilers.close()


def end_of(harness: Harness, uid: int) -> tuple[str, str]:
    detail = harness.records.details[uid][-1]
    return detail.status, detail.error


def test_a_token_that_takes_long_to_follow_ends_its_own_sequence(
    model: ModelConfig, compilers: GrammarCompilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, slow = xgrammar.GrammarMatcher.accept_token, []

    def accept(matcher: Any, token: int) -> Any:
        end = time.thread_time() + 0.15 * (matcher in slow)
        while time.thread_time() < end:
            pass
        return right(matcher, token)

    harness = Harness(model, compilers, overlap=True, budget=TimeBudget(call_limit_s=0.1))
    for first in (10, 0):  # the second time all are known, and begin together
        for uid in (1, 2, 3):
            harness.core.submit(guided(first + uid, "regex", f"[{uid}]{{12}}"))
        if first:
            harness.run()
    harness.core.step()
    monkeypatch.setattr(xgrammar.GrammarMatcher, "accept_token", accept)
    slow.append(harness.grammars._matchers[2])
    reasons = harness.run().reasons
    assert [reasons[uid] for uid in (1, 2, 3)] == [FinishReason.STOP, FinishReason.ERROR, FinishReason.STOP]
    assert end_of(harness, 2) == ("INVALID_ARG", TOO_SLOW)


@pytest.mark.parametrize("overlap", [False, True], ids=["sequential", "overlapped"])
def test_a_grammar_whose_masks_grow_slow_ends_its_own_sequence(
    model: ModelConfig, compilers: GrammarCompilers, overlap: bool
) -> None:
    """Of an ambiguous one they take longer with each token. Its sender sees why, its next request is refused at once,
    and what was computed of it is as good as any other."""
    harness = Harness(model, compilers, overlap, TimeBudget(call_limit_s=0.02))
    text = f"{AMBIGUOUS}\n# {overlap}"
    for uid in (1, 3):
        harness.core.submit(guided(uid, "regex", f"[{uid}]{{150}}"))
    harness.core.submit(guided(2, "ebnf_grammar", text))
    assert harness.run().reasons == {1: FinishReason.STOP, 2: FinishReason.ERROR, 3: FinishReason.STOP}
    assert 60 < len(harness.records.tokens[2]) < 90
    assert end_of(harness, 2) == ("INVALID_ARG", TOO_SLOW)
    assert len(harness.scheduler._running._to_zero) == 0
    harness.core.submit(guided(4, "ebnf_grammar", text))
    harness.core.step()
    (rejected,) = harness.core.take_rejected()
    assert (rejected.uid, rejected.kind, rejected.message) == (4, "InvalidRequestError", TOO_SLOW)


def test_first_masks_that_take_long_are_found_in_their_first_step(
    model: ModelConfig, compilers: GrammarCompilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside others, which were quick in the step before; all sequences of a request begin together."""
    right, slow = xgrammar.GrammarMatcher.fill_next_token_bitmask, []

    def fill(matcher: Any, *arguments: Any) -> Any:
        end = time.thread_time() + 0.15 * (matcher in slow)
        while time.thread_time() < end:
            pass
        return right(matcher, *arguments)

    harness = Harness(model, compilers, overlap=True, budget=TimeBudget(call_limit_s=0.1))
    harness.core.submit(guided(9, "regex", "[a-c]{7}"))
    harness.run()
    harness.core.submit(guided(1, "regex", "[d-f]{150}"))
    while 1 not in harness.records.tokens:
        harness.core.step()
        harness.records.take(harness.core)  # type: ignore[arg-type]
    harness.core.submit(guided(10, "regex", "[a-c]{7}", n=3))
    (compiled,) = harness.grammars.drain_compiled()
    slow += [harness.grammars._matchers[uid] for uid in (10, 11, 12)]
    monkeypatch.setattr(xgrammar.GrammarMatcher, "fill_next_token_bitmask", fill)
    harness.scheduler.add(compiled.request)
    reasons = harness.run().reasons
    assert {uid: reasons[uid] for uid in (10, 11, 12)} == dict.fromkeys((10, 11, 12), FinishReason.ERROR)
    assert reasons[1] == FinishReason.STOP
    assert not {10, 11, 12} & set(harness.records.tokens)


@pytest.mark.parametrize("overlap", [False, True], ids=["sequential", "overlapped"])
def test_many_sequences_of_a_grammar_have_a_bound_together(
    model: ModelConfig, compilers: GrammarCompilers, overlap: bool
) -> None:
    harness = Harness(model, compilers, overlap, TimeBudget(call_limit_s=0.05, step_limit_s=0.1))
    text = f"root ::= [0-9]{{60}} e\ne ::= [a-z] | e e | e e e\n# {overlap}"
    harness.core.submit(guided(1, "regex", "[1]{150}"))
    harness.core.submit(guided(10, "ebnf_grammar", text, n=20))  # more than have a row
    longest = 0.0
    while harness.core.waits_for_thread or harness.grammars._matchers:
        started = time.thread_time()
        harness.core.step()
        longest = max(longest, time.thread_time() - started)
        harness.records.take(harness.core)  # type: ignore[arg-type]
    records = harness.run()
    assert records.reasons == {1: FinishReason.STOP} | dict.fromkeys(range(10, 30), FinishReason.ERROR)
    assert {end_of(harness, uid) for uid in range(10, 30)} == {("INVALID_ARG", TOO_SLOW)}
    assert longest < 0.4
    harness.core.submit(guided(40, "ebnf_grammar", text))
    harness.core.step()
    assert [rejected.message for rejected in harness.core.take_rejected()] == [TOO_SLOW]
