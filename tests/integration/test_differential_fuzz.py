"""Each request alone against all together: random requests with every option, chunked, starved of pages, overlapped,
with shared prefixes, padded and in pieces. Whatever runs beside a request, its answer is the same.

More rounds, with tensor parallelism against one rank, are in test_tensor_parallel_requests.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend import LLM
from minisgl_backend.models.folder import find_model_dir
from tests.gauge.harness import engine, expect_short_answers
from tests.proposers import EveryDraft, KnowingProposer, what_follows
from tests.random_requests import (
    VOCAB_SIZE,
    RandomAnswer,
    RandomRequest,
    alone,
    ask_core,
    assert_same,
    random_requests,
)

# Of random requests, the same in each cell: what each is answered alone is asked once. With --full each cell has twenty
# of its own. Of the model's short answers few outgrow their pages: those of PREEMPTING have one that does.
ROUNDS, PREEMPTING, MANY_ROUNDS = 6, (80, 125), 180
REQUESTS = 6  # of a round
SIZES: dict[str, Any] = {"longest_prompt": 160, "most_tokens": 16}
CHUNKS = {"max_prefill_length": 48, "mixed_prefill_length": 24, "max_running_requests": 8}
CAPTURED = {"cuda_graph_max_bs": 8, "cuda_graph_max_tokens": 64, "eager_graphs": True}
CELLS: dict[str, dict[str, Any]] = {
    "together": {"max_running_requests": 16},
    "small pages": {"page_size": 1, **CHUNKS},
    "sequential": {"overlap": False, **CHUNKS},
    "longest prefix first": {"schedule_policy": "lpm", "page_size": 4, **CHUNKS},
    "prompts first": {"cache_type": "naive", **CHUNKS, "mixed_prefill_length": 0},
    "starved": {"page_size": 4, "num_pages": 45, **CHUNKS},
    "few pages, sequential": {"page_size": 1, "num_pages": 178, "overlap": False, **CHUNKS},
    "captured": {**CHUNKS, **CAPTURED},
    "captured, starved": {"page_size": 4, "num_pages": 45, **CHUNKS, **CAPTURED},
}
# With --full: what cells above have together with something else.
WITH_FULL = ("small pages", "sequential", "captured")
MOST_DRAFTS = 4
NGRAM: dict[str, Any] = {"speculative_config": {"method": "ngram", "num_speculative_tokens": MOST_DRAFTS}}
STARVED_WINDOWS = {"page_size": 4, "num_pages": 60, **CHUNKS, **CAPTURED}
WINDOWS = {  # two layers of three see few tokens: three cache groups
    "use_sliding_window": True,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}


@pytest.fixture(scope="module")
def lonely() -> Iterator[LLM]:
    """Where nothing runs beside a request: one step after the other, nothing cached."""
    pytest.importorskip("xgrammar")
    with engine(overlap=False, cache_type="naive", max_running_requests=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(lonely: LLM) -> Callable[[int], list[list[RandomAnswer]]]:
    """What the requests of a round are answered alone."""
    return lru_cache(lambda seed: [_ask_alone(lonely, one) for one in _requests(seed)])


@pytest.fixture(scope="module")
def with_windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, its weights as they are, with windows."""
    folder = tmp_path_factory.mktemp("windows")
    for path in find_model_dir("demo").iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | WINDOWS))
    return folder


def test_company_changes_no_answer_where_there_are_windows(
    with_windows: Path, pytestconfig: pytest.Config, expected: Callable[[int], list[list[RandomAnswer]]]
) -> None:
    """Also with drafts, right and wrong ones."""
    full = pytestconfig.getoption("--full", default=False)
    rounds = [_requests(seed) for seed in range(20 if full else 2)]
    with engine(model=str(with_windows), overlap=False, cache_type="naive", max_running_requests=4) as llm:
        answers = [[_ask_alone(llm, one) for one in requests] for requests in rounds]
    assert answers[0] != expected(0), "windows change answers"
    with engine(model=str(with_windows), **STARVED_WINDOWS) as llm:
        expect_short_answers(llm)
        for requests, wanted in zip(rounds, answers, strict=True):
            assert_same(requests, wanted, ask_core(llm.engine.core, requests, together=True))
            llm.engine.core._scheduler.check()  # type: ignore[attr-defined]
            assert llm.stats.pages_leased == 0
    with engine(model=str(with_windows), **STARVED_WINDOWS, **NGRAM) as llm:
        drafting = llm.engine.core._scheduler._drafting  # type: ignore[attr-defined]
        for requests, wanted in zip(rounds, answers, strict=True):
            drafting._proposer = KnowingProposer("erring", VOCAB_SIZE, what_follows(requests, wanted))
            drafting._control = EveryDraft(MOST_DRAFTS)
            assert_same(requests, wanted, ask_core(llm.engine.core, requests), tolerance=1e-4)
            llm.engine.core._scheduler.check()  # type: ignore[attr-defined]
        assert 0 < sum(llm.stats.speculation.accepted) < sum(llm.stats.speculation.drafted)


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, marks=[pytest.mark.full] if cell in WITH_FULL else []) for cell in CELLS]
)
def test_company_changes_no_answer(
    cell: str, expected: Callable[[int], list[list[RandomAnswer]]], pytestconfig: pytest.Config
) -> None:
    full = pytestconfig.getoption("--full", default=False)
    seeds = range(list(CELLS).index(cell), MANY_ROUNDS, len(CELLS)) if full else range(ROUNDS)
    with engine(**CELLS[cell]) as llm:
        if "starved" in cell:
            expect_short_answers(llm)
        for seed in (*seeds, *PREEMPTING) if cell == "captured, starved" else seeds:
            requests = _requests(seed)
            found = ask_core(llm.engine.core, requests, together="starved" in cell)
            assert_same(requests, expected(seed), found)
            llm.engine.core._scheduler.check()  # type: ignore[attr-defined]
            assert llm.stats.pages_leased == 0
        preempted = llm.stats.total_preempted
    assert preempted or cell != "captured, starved"


def _requests(seed: int) -> list[RandomRequest]:
    return random_requests(1000 + seed, REQUESTS, **SIZES)


def _ask_alone(llm: LLM, request: RandomRequest) -> list[RandomAnswer]:
    (answers,) = ask_core(llm.engine.core, [alone(request)])
    return answers


NOT_DRAWN = {"bad_words", "skip_special_tokens", "include_stop_str_in_output"}  # of texts alone
NOT_DRAWN |= {"thinking_token_budget", "thinking_tags"}  # of models that think
NOT_DRAWN |= {"lora_name"}  # of servers with adapters


def test_requests_differ() -> None:
    """The generator draws what the rounds are about."""
    drawn = [one.params for seed in range(MANY_ROUNDS) for one in _requests(seed)]
    plain = type(drawn[0])()
    for name in plain.__struct_fields__:
        if name not in NOT_DRAWN:
            assert any(getattr(one, name) != getattr(plain, name) for one in drawn), name
