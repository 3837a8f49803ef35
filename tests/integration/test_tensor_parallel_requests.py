"""Every option of a request on two ranks, under captured graphs and pieces, against the same request on one.

Both ranks run what is captured on a GPU through its eager stand-ins: the same padding, static buffers and order of
collectives, on the CPU.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from minisgl_backend import LLM, SamplingParams
from minisgl_backend.environment import Environment
from minisgl_backend.request import Grammar, PoolingParams
from minisgl_backend.sampling.metadata import SamplingRows
from tests.gauge.harness import BASELINE, expect_short_answers
from tests.random_requests import RandomAnswer, RandomRequest, ask_core, assert_same, random_requests

ROUNDS, MANY_ROUNDS = (4, 6), range(20)  # of random requests; with --full many, else two in which pages are taken
REQUESTS = 10  # of a round
FEW_PAGES = {**BASELINE, "page_size": 1, "num_pages": 300, "max_running_requests": 8, "max_prefill_length": 64}
CAPTURED = {"tp": 2, "cuda_graph_max_tokens": 64}
PROMPT = [5, 6, 7, 8, 9]


def environment(eager_graphs: bool) -> Environment:
    return Environment(overlap=True, log_level="WARNING", flashinfer_tensor_cores=None, eager_graphs=eager_graphs)


@pytest.fixture(scope="module")
def single() -> Iterator[LLM]:
    with LLM("demo", environment=environment(False), **FEW_PAGES) as llm:
        yield llm


@pytest.fixture(scope="module")
def pair() -> Iterator[LLM]:
    with LLM("demo", environment=environment(True), **CAPTURED, **FEW_PAGES) as llm:
        yield llm


def answer_all(llm: LLM, rounds: list[list[RandomRequest]]) -> list[list[list[RandomAnswer]]]:
    expect_short_answers(llm)
    return [ask_core(llm.engine.core, requests) for requests in rounds]


def test_random_requests_are_answered_as_on_one_rank(single: LLM, pair: LLM, pytestconfig: pytest.Config) -> None:
    pytest.importorskip("xgrammar")
    seeds = MANY_ROUNDS if pytestconfig.getoption("--full", default=False) else ROUNDS
    rounds = [random_requests(seed, REQUESTS, longest_prompt=200, most_tokens=30) for seed in seeds]
    expected, found = answer_all(single, rounds), answer_all(pair, rounds)
    for requests, ours, theirs in zip(rounds, expected, found, strict=True):
        assert_same(requests, ours, theirs)
    assert pair.stats.total_preempted > 0
    assert pair.stats.pages_leased == 0


OPTIONS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 2},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "both_logprobs": {"logprobs": 0, "prompt_logprobs": 0},
    "grammar": {"grammar": Grammar(kind="regex", text="[a-c]{3,9}")},
    "random_grammar": {"grammar": Grammar(kind="regex", text="[a-c]{3,9}"), "temperature": 1.0, "seed": 5},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {77: 5.0}},
    "bad_words": {"bad_words_token_ids": ((20, 21), (30,))},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": tuple(range(16, 200))},
    "siblings": {"n": 3, "temperature": 1.0, "seed": 3},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_one_option_at_a_time(single: LLM, pair: LLM, name: str) -> None:
    if "grammar" in name:
        pytest.importorskip("xgrammar")
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **OPTIONS[name]})
    plain = SamplingParams(temperature=0.0, max_tokens=12)
    expected, found = (llm.generate([PROMPT, PROMPT[::-1]], [params, plain]) for llm in (single, pair))
    for one, other in zip(expected, found, strict=True):
        assert [c.token_ids for c in one.completions] == [c.token_ids for c in other.completions]
        assert one.finish_reason == other.finish_reason != "error"


@pytest.mark.parametrize("kind", ["last", "mean", "cls", "token_logprobs"])
def test_vectors(single: LLM, pair: LLM, kind: Any) -> None:
    """Alone, where a lone prompt has a graph of its own, and over chunks."""
    pooling = PoolingParams(kind=kind, token_ids=(5, 77) if kind == "token_logprobs" else ())
    for prompts in ([PROMPT], [PROMPT * 30, PROMPT[::-1], PROMPT * 7]):
        for one, other in zip(*(llm._pooled(prompts, pooling) for llm in (single, pair)), strict=True):
            np.testing.assert_allclose(one.embedding, other.embedding, atol=1e-4, rtol=1e-4)


def test_a_request_that_rank_0_cannot_prepare_leaves_the_ranks_in_step(
    pair: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = SamplingParams(temperature=0.0, max_tokens=12)
    (before,) = pair.generate([PROMPT], plain)
    admit = SamplingRows.admit

    def refuse(self: SamplingRows, admitted: Any) -> None:
        admit(self, admitted)  # as far as it gets: it leaves rules behind that no other rank has
        if admitted.params.min_p == 0.5:
            raise OverflowError("Python integer out of bounds for int32")

    monkeypatch.setattr(SamplingRows, "admit", refuse)
    poison = SamplingParams(temperature=1.0, seed=1, max_tokens=9, min_p=0.5, min_tokens=9, logit_bias={5: 1.0})
    (bad,) = pair.generate([PROMPT], poison)
    assert bad.finish_reason == "error"
    assert "out of bounds" in bad.completions[0].error
    for _ in range(2):
        (after,) = pair.generate([PROMPT], plain)
        assert after.token_ids == before.token_ids


def test_an_interrupt_leaves_the_ranks_in_step(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C once the other rank has the step and waits for this one in its first sum."""
    plain = SamplingParams(temperature=0.0, max_tokens=12)
    (before,) = pair.generate([PROMPT], plain)
    runner: Any = pair.engine.core._runner  # type: ignore[attr-defined]
    execute = runner.execute

    def interrupted(batch: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return execute(batch)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "execute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pair.generate([PROMPT], plain)
    (after,) = pair.generate([PROMPT], plain)
    assert after.token_ids == before.token_ids
