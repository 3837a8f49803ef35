"""Grammars on the demo model's tokenizer, driven by plans made by hand."""

from __future__ import annotations

import dataclasses
import gc
import json
import random
import re
import time
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from minisgl_backend.engine.core import MAX_FAILED_STEPS, EngineCore
from minisgl_backend.errors import CapacityError, InvalidRequestError
from minisgl_backend.grammar import manager as grammar_module
from minisgl_backend.grammar.compiling.cache import GrammarCache
from minisgl_backend.grammar.compiling.compilers import GrammarCompilers, Job
from minisgl_backend.grammar.compiling.tokenizer_info import TokenizerSource
from minisgl_backend.grammar.manager import GrammarManager
from minisgl_backend.grammar.time_budget import TimeBudget
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.folder import find_model_dir
from minisgl_backend.request import FinishReason, Grammar
from minisgl_backend.scheduler.scheduler import Scheduler
from minisgl_backend.step import StepPlan, StepResult
from tests.fakes import Records, make_request
from tests.unit.engine.test_core import LIMITS, TRIAL

pytest.importorskip("xgrammar")

SCHEMA = json.dumps(
    {"type": "object", "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}}, "required": ["n", "ok"]}
)


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return ModelConfig.load(find_model_dir("demo"))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(find_model_dir("demo")))


@pytest.fixture(scope="module")
def source(model: ModelConfig) -> TokenizerSource:
    return TokenizerSource(str(find_model_dir("demo")), False, model.vocab_size, list(model.eos_token_ids))


class MaskedPending:
    """A step that samples any token that the masks allow, once they are there."""

    def __init__(self, plan: StepPlan, tokens: np.ndarray, guided: bool) -> None:
        self.plan, self.tokens = plan, tokens
        self.unsampled = self if guided else None
        self.failed_rows: set[int] = set()  # those of which nothing is allowed

    def result(self) -> StepResult:
        assert self.unsampled is None, "read before it was sampled"
        return StepResult(self.plan.step, self.tokens, failed_rows=frozenset(self.failed_rows))


class RandomRunner:
    """Samples any token that the masks allow."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._random = random.Random(seed)
        self.masked_steps = 0
        self.fails_sample = False
        self.steps: dict[int, list[int]] = {}  # those that name a row with a grammar
        self._guided: dict[int, bool] = {}
        self._unsampled = False  # a step waits for `sample`, with tensors that the next `prepare` overwrites

    def prepare(self, plan: StepPlan) -> StepPlan:
        assert not self._unsampled, "the step before is not sampled yet"
        self._guided |= {admitted.row: admitted.params.is_guided for admitted in plan.admitted}
        return plan

    def execute(self, plan: StepPlan) -> MaskedPending:
        tokens = np.array([self._random.randrange(4, self._vocab_size) for _ in plan.sampled_rows], dtype=np.int32)
        guided = [row for row in plan.sampled_rows.tolist() if self._guided[row]]
        for row in guided:
            self.steps.setdefault(row, []).append(plan.step)
        self._unsampled = bool(guided)
        return MaskedPending(plan, tokens, bool(guided))

    def grammar_bitmask(self, count: int) -> np.ndarray:
        self.bitmask_rows = np.full((count, -(-self._vocab_size // 32)), 0x5A5A5A5A, dtype=np.int32)
        return self.bitmask_rows

    def sample(self, pending: MaskedPending, masks: Any) -> None:
        assert masks is None or masks[1] is self.bitmask_rows
        self._unsampled = False
        if self.fails_sample:
            raise RuntimeError("no memory for that")
        pending.unsampled = None
        if masks is not None:
            self.masked_steps += 1
            for index, bitmask in zip(masks[0].tolist(), masks[1], strict=True):
                allowed = np.unpackbits(bitmask.view(np.uint8), bitorder="little")[: self._vocab_size].nonzero()[0]
                if len(allowed):
                    pending.tokens[index] = self._random.choice(allowed.tolist())
                else:
                    pending.failed_rows.add(int(pending.plan.sampled_rows[index]))


class SharedCompilers:
    """For many tests: a process takes seconds to start."""

    def __init__(self, compilers: GrammarCompilers) -> None:
        self.submit, self.cache = compilers.submit, compilers.cache
        self.num_waiting = 0

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def compilers(source: TokenizerSource) -> Iterator[GrammarCompilers]:
    compilers = GrammarCompilers(source)
    yield compilers
    compilers.close()


class Harness:
    def __init__(
        self, model: ModelConfig, compilers: GrammarCompilers, overlap: bool, budget: TimeBudget | None = None
    ) -> None:
        shared: Any = SharedCompilers(compilers)
        self.grammars = GrammarManager(shared, budget)
        limits = dataclasses.replace(LIMITS, eos_token_ids=model.eos_token_ids)
        self.scheduler = Scheduler(limits, seed=0)
        self.runner = RandomRunner(model.vocab_size, seed=1)
        self.core = EngineCore(
            self.scheduler, self.runner, overlap=overlap, grammars=self.grammars, health_check_plan=TRIAL
        )
        self.records = Records()

    def run(self) -> Records:
        while True:
            busy = self.core.step()
            self.records.take(self.core)  # type: ignore[arg-type]
            if not busy and not self.core.waits_for_thread:
                return self.records
            if not busy:
                time.sleep(0.002)


@pytest.fixture(params=[False, True], ids=["sequential", "overlapped"])
def harness(request: pytest.FixtureRequest, model: ModelConfig, compilers: GrammarCompilers) -> Iterator[Harness]:
    harness = Harness(model, compilers, request.param)
    yield harness
    harness.core.close()


def guided(uid: int, kind: str, text: str = "", **params: Any) -> Any:
    grammar = Grammar(kind=kind, text=text)  # type: ignore[arg-type]
    return make_request(uid, [5, 6, 7], grammar=grammar, **{"max_tokens": 200, **params})


def text_of(harness: Harness, tokenizer: Any, uid: int) -> str:
    return str(tokenizer.decode(harness.records.tokens[uid], skip_special_tokens=True))


def test_every_answer_obeys_its_own_grammar(harness: Harness, tokenizer: Any) -> None:
    harness.core.submit(guided(1, "regex", "[a-c]{5}-[0-9]{3}"))
    harness.core.submit(guided(2, "json_schema", SCHEMA))
    harness.core.submit(guided(3, "ebnf_grammar", 'root ::= ("yes" | "no") "!"'))
    harness.core.submit(guided(10, "regex", "(left|right)", n=3))
    harness.core.submit(make_request(4, [5, 6], max_tokens=40, ignore_eos=True))
    records = harness.run()
    assert harness.core.take_rejected() == []
    assert re.fullmatch("[a-c]{5}-[0-9]{3}", text_of(harness, tokenizer, 1))
    assert text_of(harness, tokenizer, 3) in ("yes!", "no!")
    for uid in (10, 11, 12):
        assert text_of(harness, tokenizer, uid) in ("left", "right")
    if records.reasons[2] == FinishReason.STOP:
        assert set(json.loads(text_of(harness, tokenizer, 2))) >= {"n", "ok"}
    assert all(records.reasons[uid] == FinishReason.STOP for uid in (1, 3, 10, 11, 12))
    assert len(records.tokens[4]) == 40


def test_sequences_with_grammars_take_part_in_every_step(harness: Harness, tokenizer: Any) -> None:
    """Also overlapped: only sampling waits for the token before."""
    harness.core.submit(guided(1, "regex", "[a-c]{30}"))
    harness.run()
    (steps,) = harness.runner.steps.values()
    assert len(steps) >= 30
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    assert re.fullmatch("[a-c]{30}", text_of(harness, tokenizer, 1))


def test_many_grammars_are_followed_together(harness: Harness, tokenizer: Any) -> None:
    """More than one thread may fill their masks."""
    for uid in range(1, 8):
        harness.core.submit(guided(uid, "regex", f"[{uid}]{{{10 + uid}}}"))
    harness.run()
    assert [text_of(harness, tokenizer, uid) for uid in range(1, 8)] == [str(uid) * (10 + uid) for uid in range(1, 8)]


@pytest.mark.parametrize("stage", ["fill_next_token_bitmask", "accept_token"])
@pytest.mark.parametrize("count", [2, 6])
def test_a_grammar_that_breaks_ends_its_own_sequence(
    harness: Harness, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, stage: str, count: int
) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    right = getattr(xgrammar.GrammarMatcher, stage)
    broken: list[Any] = []

    def breaks(matcher: Any, *arguments: Any) -> Any:
        if any(matcher is one for one in broken):
            raise RuntimeError("no such state")
        return right(matcher, *arguments)

    def batch_breaks(filler: Any, matchers: list[Any], *arguments: Any) -> None:
        raise RuntimeError("no such state")

    for uid in range(1, count + 1):
        harness.core.submit(guided(uid, "regex", f"[{uid}]{{12}}"))
    while 2 not in harness.records.tokens:
        harness.core.step()
        harness.records.take(harness.core)  # type: ignore[arg-type]
    monkeypatch.setattr(xgrammar.GrammarMatcher, stage, breaks)
    monkeypatch.setattr(xgrammar.BatchGrammarMatcher, "batch_fill_next_token_bitmask", batch_breaks)
    broken.append(harness.grammars._matchers[2])
    records = harness.run()
    assert records.reasons == dict.fromkeys(range(1, count + 1), FinishReason.STOP) | {2: FinishReason.ERROR}
    detail = records.details[2][-1]
    assert (detail.status, detail.error) == (
        "INTERNAL",
        "the grammar could not be followed: RuntimeError: no such state",
    )
    for uid in {*range(1, count + 1)} - {2}:
        assert text_of(harness, tokenizer, uid) == str(uid) * 12


def test_what_is_known_needs_no_room(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.core.submit(guided(1, "regex", "[1]{4}"))
    harness.run()
    monkeypatch.setattr(grammar_module, "MAX_COMPILING", 0)
    for uid, pattern in ((2, "[1]{4}"), (3, "[3]{4}")):
        harness.core.submit(guided(uid, "regex", pattern))
    (rejected,) = harness.core.take_rejected()
    assert (rejected.uid, rejected.kind) == (3, "CapacityError")
    assert harness.run().reasons[2] == FinishReason.STOP


def test_what_is_known_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    class Compilers:
        cache = GrammarCache(max_bytes=1 << 20)
        num_waiting = 0

        def submit(self, job: Job) -> None:
            if (compiled := self.cache.get(job.grammar)) is not None:
                job.done(compiled, None)

    monkeypatch.setattr(grammar_module, "MAX_COMPILING", 3)
    grammars = GrammarManager(Compilers())  # type: ignore[arg-type]
    known = Grammar(kind="regex", text="known")
    Compilers.cache.note_compiled(known, "compiled", 1)
    for uid in range(5):
        grammars.submit(make_request(uid, [5], grammar=known), known)
    assert (grammars.num_ready, grammars.room) == (5, 3)
    for uid in range(5, 8):
        grammar = Grammar(kind="regex", text=str(uid))
        grammars.submit(make_request(uid, [5], grammar=grammar), grammar)
    assert grammars.room == 0
    with pytest.raises(CapacityError):
        grammars.submit(make_request(8, [5], grammar=grammar), grammar)


def test_no_compiler_keeps_a_runner_alive(model: ModelConfig, source: TokenizerSource) -> None:
    """Its thread lives until the process ends; one that frees tensors then ends it with SIGABRT."""
    compilers = GrammarCompilers(source)
    harness = Harness(model, compilers, overlap=True)
    harness.core.submit(guided(1, "regex", "[0-9]{4}"))
    harness.run()
    runner = weakref.ref(harness.runner)
    del harness
    gc.collect()
    assert runner() is None
    compilers.close()


def test_a_step_that_cannot_be_sampled_fails_its_sequences(harness: Harness) -> None:
    harness.core.submit(guided(1, "regex", "[a-c]{30}"))
    harness.runner.fails_sample = True
    assert harness.run().reasons == {1: FinishReason.ERROR}
    harness.runner.fails_sample = False
    harness.core.submit(guided(2, "regex", "[0-9]{4}"))
    assert harness.run().reasons[2] == FinishReason.STOP


def test_an_engine_is_tried_out_when_no_step_waits_for_its_sampling(harness: Harness) -> None:
    """Each prompt comes while the step before it is about to fail."""
    harness.runner.fails_sample = True
    for uid in range(1, 4 * MAX_FAILED_STEPS):
        harness.core.submit(guided(uid, "regex", "[0-9]{4}"))
        while harness.core.waits_for_thread:
            harness.core.step()
            harness.records.take(harness.core)  # type: ignore[arg-type]
    assert set(harness.run().reasons.values()) == {FinishReason.ERROR}
    harness.runner.fails_sample = False
    harness.core.submit(guided(99, "regex", "[0-9]{4}"))
    assert harness.run().reasons[99] == FinishReason.STOP


def test_a_complete_answer_ends_even_where_eos_is_ignored(harness: Harness, tokenizer: Any) -> None:
    harness.core.submit(guided(1, "regex", "[0-9]{4}", ignore_eos=True))
    records = harness.run()
    assert records.reasons[1] == FinishReason.STOP
    assert len(text_of(harness, tokenizer, 1)) == 4


def test_json_without_a_schema_is_json_without_idle_blanks(harness: Harness, tokenizer: Any) -> None:
    """Between values at most one blank, as json.dumps writes them: a model could write blanks without end."""
    for uid in range(1, 9):
        harness.core.submit(guided(uid, "json", max_tokens=40))
    records = harness.run()
    for uid in range(1, 9):
        text = text_of(harness, tokenizer, uid)
        assert text[0] in "{["
        outside = re.sub(r'"(\\.|[^"\\])*("|$)', '""', text)  # of its strings
        assert not re.search(r"\s\s|\s$(?<![,:] )|^.\s", outside), text
        if records.reasons[uid] == FinishReason.STOP:
            json.loads(text)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("regex", "[0-9", "cannot be compiled"),
        ("ebnf_grammar", "root ::= (", "cannot be compiled"),
        ("json_schema", "{", "no JSON schema"),
        ("json_schema", "[1]", "an object"),
        ("json_schema", '{"a":' * 70 + "1" + "}" * 70, "64 levels"),
        ("json_schema", '{"type": "nonsense"}', "the schema's type at /"),
        ("json_schema", '{"$ref": "#"}', "leads back to itself"),
        ("ebnf_grammar", "root ::= root", "accepts no text"),
        ("regex", "(([a-z]{0,80}){0,80}){0,80}b", "takes too long to follow"),
    ],
)
def test_wrong_grammars_are_refused_by_name(harness: Harness, kind: str, text: str, words: str) -> None:
    harness.core.submit(guided(1, kind, text))
    harness.run()
    (rejected,) = harness.core.take_rejected()
    assert (rejected.uid, rejected.kind) == (1, "InvalidRequestError")
    assert "guided_decoding_guide" in rejected.message
    assert words in rejected.message


def test_min_tokens_is_refused_beside_a_grammar(harness: Harness) -> None:
    harness.core.submit(guided(1, "regex", "[0-9]", min_tokens=5))
    (rejected,) = harness.core.take_rejected()
    assert "min_tokens is 5" in rejected.message


def test_an_abort_during_compilation_still_ends_every_sequence(harness: Harness) -> None:
    harness.core.submit(guided(1, "regex", "[a-z]{3}", n=2))
    harness.core.abort([1, 2], FinishReason.CANCELLED)
    assert harness.run().reasons == {1: FinishReason.CANCELLED, 2: FinishReason.CANCELLED}
    assert harness.grammars.num_compiling == 0


def test_a_deadline_that_passes_during_compilation_ends_every_sequence(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness.grammars._compilers, "submit", lambda job: None)  # it never comes to an end
    harness.core.submit(guided(1, "regex", "[a-z]{3}", n=2, deadline=time.monotonic() - 1))
    harness.core.submit(guided(3, "regex", "[a-z]{3}", deadline=time.monotonic() + 3600))
    harness.core.step()
    harness.records.take(harness.core)  # type: ignore[arg-type]
    assert harness.records.reasons == {1: FinishReason.CANCELLED, 2: FinishReason.CANCELLED}
    assert harness.grammars.num_compiling == 1


def test_what_was_cancelled_counts_until_the_compilers_have_passed_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Compilers:
        """Has taken the first job only."""

        jobs: ClassVar[list[Job]] = []
        cache = GrammarCache(max_bytes=0)

        @property
        def num_waiting(self) -> int:
            return len(self.jobs) - 1

        def submit(self, job: Job) -> None:
            self.jobs.append(job)

    def submit(number: int) -> None:
        grammar = Grammar(kind="regex", text=str(number))
        grammars.submit(make_request(number, [5], grammar=grammar), grammar)

    compilers = Compilers()
    grammars = GrammarManager(compilers)  # type: ignore[arg-type]
    monkeypatch.setattr(grammar_module, "MAX_COMPILING", 10)
    for number in range(10):
        submit(number)
    for number in range(9):
        assert grammars.cancel(number) == 1
    submit(10)
    with pytest.raises(CapacityError):
        submit(11)
    assert [number for number, job in enumerate(compilers.jobs) if job.is_awaited()] == [9, 10]


def test_without_the_package_the_request_is_refused(monkeypatch: pytest.MonkeyPatch, source: TokenizerSource) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    compilers = GrammarCompilers(source)
    grammars = GrammarManager(compilers)
    request = guided(1, "json")
    with pytest.raises(InvalidRequestError, match="pip install"):
        grammars.submit(request, request.params.grammar)
