"""With speculation as without: random requests with every option, whatever is proposed.

Proposers that are right, wrong or odd on purpose, and prompt lookup as it is served; every draft is verified. Engines
chunk prompts, are starved of pages, run as captured steps do, or one step after the other.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend import LLM
from minisgl_backend.request import Grammar
from minisgl_backend.scheduler.forced_drafts import no_forced_tokens
from minisgl_backend.speculation.proposer import Proposer
from tests.eagle3_heads import demo_head, eagle3_head
from tests.gauge.harness import engine, expect_short_answers
from tests.mtp_checkpoints import served_mtp_checkpoint
from tests.proposers import KINDS, EveryDraft, KnowingProposer, draft_model, verify_every_draft, what_follows
from tests.random_requests import (
    VOCAB_SIZE,
    RandomAnswer,
    RandomRequest,
    alone,
    ask_core,
    assert_same,
    random_requests,
)

REQUESTS = 6  # of a round
ROUNDS, DRAFT_ROUNDS = 4, 2
MANY_ROUNDS = 300  # with --full, of each method
MOST = 4
FORCING = {
    "type": "object",
    "properties": {"name": {"enum": ["add"]}, "first": {"enum": ["one", "two"]}, "second": {"type": "boolean"}},
    "required": ["name", "first", "second"],
    "additionalProperties": False,
}
SIZES: dict[str, Any] = {"longest_prompt": 160, "most_tokens": 16}
NGRAM: dict[str, Any] = {"speculative_config": {"method": "ngram", "num_speculative_tokens": MOST}}
MTP_LAYER: dict[str, Any] = {"speculative_config": {"method": "deepseek_mtp", "num_speculative_tokens": MOST}}
CHUNKS: dict[str, Any] = {"max_prefill_length": 48, "mixed_prefill_length": 24, "max_running_requests": 8}
CAPTURED = {"cuda_graph_max_bs": 16, "cuda_graph_max_tokens": 64, "eager_graphs": True}
CELLS: dict[str, dict[str, Any]] = {
    "together": {"max_running_requests": 16},
    "captured, starved": {"page_size": 4, "num_pages": 45, **CHUNKS, **CAPTURED},
}
MORE_CELLS: dict[str, dict[str, Any]] = {
    "small pages": {"page_size": 1, **CHUNKS},
    "sequential": {"overlap": False, **CHUNKS},
    "prompts first": {"cache_type": "naive", **CHUNKS, "mixed_prefill_length": 0},
    "captured": {**CHUNKS, **CAPTURED},
    "one at a time": {"max_running_requests": 1},
    "two ranks": {"tp": 2, **CHUNKS, **CAPTURED},
}


Expected = Callable[..., list[list[RandomAnswer]]]


@pytest.fixture(scope="module")
def mtp_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return served_mtp_checkpoint(tmp_path_factory.mktemp("mtp"))


@pytest.fixture(scope="module")
def expected() -> Iterator[Expected]:
    """What the requests of a round are answered alone, without speculation, where nothing runs beside them: one step
    after the other, nothing cached."""
    pytest.importorskip("xgrammar")
    with contextlib.ExitStack() as engines:

        @cache
        def lonely(model: str) -> LLM:
            return engines.enter_context(engine(model=model, overlap=False, cache_type="naive", max_running_requests=4))

        @cache
        def answers(seed: int, model: str = "demo") -> list[list[RandomAnswer]]:
            return [ask_core(lonely(model).engine.core, [alone(one)])[0] for one in _requests(seed)]

        yield answers


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "cell", [*CELLS, *(pytest.param(cell, marks=[pytest.mark.slow, pytest.mark.full]) for cell in MORE_CELLS)]
)
def test_speculation_changes_no_answer(cell: str, expected: Expected, pytestconfig: pytest.Config) -> None:
    cells = CELLS | MORE_CELLS
    full = pytestconfig.getoption("--full", default=False)
    number = list(cells).index(cell)
    seeds = range(number, MANY_ROUNDS, len(cells)) if full else range(number, number + ROUNDS)
    with engine(**cells[cell], **NGRAM) as llm:
        if "starved" in cell:
            expect_short_answers(llm)
        served = llm.engine.core._scheduler._drafting._proposer  # type: ignore[attr-defined]
        for seed in seeds:
            requests, answers = _requests(seed), expected(seed)
            _propose(llm, _proposer(seed, requests, answers) or served, seed)
            found = ask_core(llm.engine.core, requests, together="starved" in cell)
            assert_same(requests, answers, found, tolerance=1e-4)
            llm.engine.core._scheduler.check()  # type: ignore[attr-defined]
            assert llm.stats.pages_leased == 0
        counts = llm.stats.speculation
    assert 0 < sum(counts.accepted) < sum(counts.drafted)
    assert counts.drafts >= counts.drafted[0] >= counts.drafted[-1] > 0


# A model that proposes: all layers of the demo model, whose drafts are right, or its first ones, whose are at times.
# Or a head: the demo model's own, or random ones, whose drafts are wrong: tests/integration/test_mtp.py has right ones
# behind one. The head of MTP is a layer of another model's checkpoint.
EAGLE3, RANDOM, MTP = "eagle3", "random eagle3", "mtp"
STARVED: dict[str, Any] = {"page_size": 4, "num_pages": 45, **CHUNKS, **CAPTURED}
DRAFT_CELLS: dict[str, tuple[int | str, dict[str, Any]]] = {
    "captured, starved": (2, STARVED),
    "EAGLE-3, captured, starved": (EAGLE3, STARVED),
    "MTP, captured, starved": (MTP, STARVED),
}
MORE_DRAFT_CELLS: dict[str, tuple[int | str, dict[str, Any]]] = {
    "itself": (6, {"max_running_requests": 16}),
    "small pages": (6, {"page_size": 1, **CHUNKS}),
    "sequential": (4, {"overlap": False, **CHUNKS}),
    "prompts first": (4, {"cache_type": "naive", **CHUNKS, "mixed_prefill_length": 0}),
    "one at a time": (2, {"max_running_requests": 1}),
    "two ranks": (4, {"tp": 2, **CHUNKS, **CAPTURED}),
    "EAGLE-3": (EAGLE3, {"max_running_requests": 16}),
    "EAGLE-3, small pages": (EAGLE3, {"page_size": 1, "overlap": False, **CHUNKS}),
    "EAGLE-3, two ranks": (EAGLE3, {"tp": 2, **CHUNKS, **CAPTURED}),
    "random EAGLE-3, captured, starved": (RANDOM, STARVED),
    "random EAGLE-3, two ranks": (RANDOM, {"tp": 2, **CHUNKS, **CAPTURED}),
    "MTP": (MTP, {"max_running_requests": 16}),
    "MTP, small pages": (MTP, {"page_size": 1, "overlap": False, **CHUNKS}),
    "MTP, two ranks": (MTP, {"tp": 2, **CHUNKS, **CAPTURED}),
}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "cell",
    [*DRAFT_CELLS, *(pytest.param(cell, marks=[pytest.mark.slow, pytest.mark.full]) for cell in MORE_DRAFT_CELLS)],
)
def test_a_model_that_proposes_changes_no_answer(
    cell: str, expected: Expected, mtp_checkpoint: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    cells = DRAFT_CELLS | MORE_DRAFT_CELLS
    number, (drafts, options) = list(cells).index(cell), cells[cell]
    seeds: Sequence[int] = range(number, number + DRAFT_ROUNDS)
    if pytestconfig.getoption("--full", default=False):
        same = [name for name, (one, _) in cells.items() if _method(one) == _method(drafts)]
        seeds = range(same.index(cell), MANY_ROUNDS, len(same))
    model = mtp_checkpoint if drafts == MTP else "demo"
    proposes = {EAGLE3: demo_head(MOST), MTP: MTP_LAYER}.get(str(drafts))
    if proposes is None:
        proposes = eagle3_head(tmp_path, MOST) if drafts == RANDOM else draft_model(tmp_path, int(drafts), MOST)
    with engine(model=model, **options, **proposes) as llm:
        if "starved" in cell:
            expect_short_answers(llm)
        verify_every_draft(llm, MOST)
        for seed in seeds:
            requests, answers = _requests(seed), expected(seed, model)
            found = ask_core(llm.engine.core, requests, together="starved" in cell)
            assert_same(requests, answers, found, tolerance=1e-4)
            llm.engine.core._scheduler.check()  # type: ignore[attr-defined]
            assert llm.stats.pages_leased == 0
        counts = llm.stats.speculation
    assert counts.drafts > 0
    assert (drafts not in (RANDOM, MTP)) <= sum(counts.accepted) <= sum(counts.drafted)


def _method(drafts: int | str) -> str:
    return "draft_model" if isinstance(drafts, int) else drafts.removeprefix("random ")


def test_a_model_agrees_with_itself(tmp_path: Path) -> None:
    """At any temperature, behind cached prefixes and chunks, and from where nothing was proposed for a while."""
    with engine(**CHUNKS, **draft_model(tmp_path, 6, MOST)) as llm:
        verify_every_draft(llm, MOST)
        drafting = llm.engine.core._scheduler._drafting  # type: ignore[attr-defined]
        for is_on in (True, True, False, True):
            drafting._control.is_on = is_on
            llm.generate([[*range(3, 70)], [9, 9, 9]], temperature=0.9, seed=7, max_tokens=24, ignore_eos=True)
        counts = llm.stats.speculation
        assert counts.drafts > 10
        assert counts.accepted == counts.drafted
        assert llm.stats.total_cached_tokens > 0


@pytest.fixture(scope="module")
def drafting() -> Iterator[LLM]:
    with engine(**NGRAM, max_running_requests=4) as llm:
        yield llm


def test_text_that_a_grammar_forces_is_proposed(drafting: LLM) -> None:
    """Whatever is proposed else, which here is nothing."""
    _propose(drafting, KnowingProposer("none", VOCAB_SIZE, lambda uid, tokens, most: []), 0)
    call = '\\{"call": "(add|sub)", "of": \\[[0-9]{2}, [0-9]{2}\\]\\}'
    options: dict[str, Any] = {"temperature": 0.7, "seed": 3, "max_tokens": 64, "logprobs": 2}
    for grammar in (Grammar(kind="json_schema", text=json.dumps(FORCING)), Grammar(kind="regex", text=call)):
        (expected,) = drafting.generate(["Add 12."], grammar=grammar, speculative=False, **options)
        before = drafting.stats
        (found,) = drafting.generate(["Add 12."], grammar=grammar, **options)
        assert found.token_ids == expected.token_ids
        both = zip(found.logprobs or [], expected.logprobs or [], strict=True)
        assert all(abs(one.logprob - other.logprob) <= 1e-4 for one, other in both)
        assert drafting.stats.step - before.step < 0.7 * len(found.token_ids)
        assert sum(drafting.stats.speculation.accepted) > sum(before.speculation.accepted)


def test_requests_may_refuse_it(drafting: LLM) -> None:
    _propose(drafting, KnowingProposer("right", VOCAB_SIZE, lambda uid, tokens, most: [7] * most), 0)
    before = drafting.stats.speculation.drafts
    (without,) = drafting.generate([[9, 9, 9]], temperature=0.0, max_tokens=9, speculative=False)
    assert drafting.stats.speculation.drafts == before
    (with_drafts,) = drafting.generate([[9, 9, 9]], temperature=0.0, max_tokens=9)
    assert drafting.stats.speculation.drafts > before
    assert with_drafts.token_ids == without.token_ids


def _requests(seed: int) -> list[RandomRequest]:
    return random_requests(5000 + seed, REQUESTS, **SIZES)


def _proposer(
    seed: int, requests: Sequence[RandomRequest], answers: Sequence[Sequence[RandomAnswer]]
) -> Proposer | None:
    """None: the engine's own."""
    kind = (*KINDS, "served")[seed % (len(KINDS) + 1)]
    if kind == "served":
        return None
    return KnowingProposer(kind, VOCAB_SIZE, what_follows(requests, answers), seed)


def _propose(llm: LLM, proposer: Proposer, seed: int) -> None:
    """Text that a grammar forces is proposed, too, in every other round."""
    core = llm.engine.core
    drafting = core._scheduler._drafting  # type: ignore[attr-defined]
    drafting._proposer, drafting._control = proposer, EveryDraft(MOST)
    drafting._forced._tokens = no_forced_tokens if seed % 2 else core._grammars.forced_tokens  # type: ignore[union-attr]
