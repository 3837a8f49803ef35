"""Sampled texts depend on the seed alone: not on company, preemption, chunks, overlap or siblings."""

from __future__ import annotations

import msgspec
import pytest

from minisgl_backend import SamplingParams
from tests.gauge.harness import engine, expect_short_answers

NUM_PROMPTS = 7
MAX_TOKENS = 24
WARM = SamplingParams(temperature=1.3, max_tokens=MAX_TOKENS)
STYLES = (
    WARM,
    msgspec.structs.replace(WARM, top_p=0.9, min_p=0.01),
    msgspec.structs.replace(WARM, top_k=20, repetition_penalty=1.2, presence_penalty=0.5),
)


def prompt(index: int) -> list[int]:
    return [5 + (7 * index + 3 * place) % 900 for place in range(20 + 9 * index)]


def params(index: int) -> SamplingParams:
    return msgspec.structs.replace(STYLES[index % len(STYLES)], seed=1000 + index)


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """Each prompt's tokens when nothing else runs."""
    with engine(max_running_requests=4) as llm:
        return [llm.generate([prompt(index)], params(index))[0].token_ids for index in range(NUM_PROMPTS)]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "sequential"])
def test_company_changes_no_sampled_text(alone: list[list[int]], overlap: bool) -> None:
    with engine(overlap=overlap, max_prefill_length=48, mixed_prefill_length=16) as llm:
        outputs = llm.generate(
            [prompt(index) for index in range(NUM_PROMPTS)], [params(index) for index in range(NUM_PROMPTS)]
        )
    assert [output.token_ids for output in outputs] == alone


def test_what_neighbours_ask_changes_no_text_in_bfloat16() -> None:
    """Rounded logits tie often. As many tokens run in every step, so that products are rounded alike."""
    seeded = msgspec.structs.replace(WARM, top_p=0.95, top_k=200, seed=7, ignore_eos=True, logprobs=3)
    plain = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    busy = [
        {"temperature": 1.0, "seed": 1},
        {"temperature": 1.5, "top_k": 5, "seed": 2},
        {"temperature": 1.5, "top_p": 0.8, "min_p": 0.02, "seed": 3, "logprobs": 20},
        {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"logit_bias": {7: 3.0, 9: -100.0}, "bad_words_token_ids": ((5,), (6, 7))},
        {"temperature": 1.0, "seed": 4, "min_tokens": MAX_TOKENS, "stop_token_ids": (3,)},
    ]
    prompts = [prompt(index) for index in range(NUM_PROMPTS)]
    found = []
    with engine(dtype="bfloat16", cache_type="naive") as llm:
        for neighbours in ([{}] * len(busy), busy):
            sampling = [seeded, *(msgspec.structs.replace(plain, **options) for options in neighbours)]
            (completion,) = llm.generate(prompts, sampling)[0].completions
            found.append((completion.token_ids, completion.logprobs))
    assert len(found[0][0]) == MAX_TOKENS
    assert found[0] == found[1]


def test_preemption_changes_no_sampled_text(alone: list[list[int]]) -> None:
    longest = len(prompt(NUM_PROMPTS - 1)) + MAX_TOKENS
    with engine(page_size=1, num_pages=longest + MAX_TOKENS) as llm:
        expect_short_answers(llm)
        prompts, sampling = [prompt(index) for index in range(NUM_PROMPTS)], [params(i) for i in range(NUM_PROMPTS)]
        outputs = llm.generate(prompts, sampling)
        assert llm.stats.total_preempted > 0, "this engine must take pages from running sequences"
    assert [output.token_ids for output in outputs] == alone


def test_siblings_are_the_same_in_any_company(alone: list[list[int]]) -> None:
    several = [msgspec.structs.replace(params(index), n=3) for index in range(NUM_PROMPTS)]
    with engine(max_prefill_length=64, max_running_requests=8) as llm:
        together = llm.generate([prompt(index) for index in range(NUM_PROMPTS)], several)
        one = llm.generate([prompt(2)], several[2])[0]
    assert [completion.token_ids for completion in one.completions] == [
        completion.token_ids for completion in together[2].completions
    ]
    for output, first in zip(together, alone, strict=True):
        answers = [completion.token_ids for completion in output.completions]
        assert answers[0] == first, "the first of several is the one that n=1 gives"
        assert len(set(map(tuple, answers))) > 1, "siblings differ"


def test_requests_without_a_seed_differ() -> None:
    with engine(max_running_requests=4) as llm:
        outputs = llm.generate([prompt(1)] * 2, msgspec.structs.replace(WARM, ignore_eos=True))
    assert outputs[0].token_ids != outputs[1].token_ids
