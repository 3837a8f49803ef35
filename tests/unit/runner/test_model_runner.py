"""Hand-made plans through a real tiny model give what transformers gives, however they are cut into steps."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hand_made_plans import Driver
from tiny_runner import GREEDY, PROMPTS, SAMPLED, VOCAB, MakeRunner, generate, run

from minisgl_backend.request import Grammar, SamplingParams

GRAMMAR = Grammar(kind="json")


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_greedy_equals_transformers(make_runner: MakeRunner, expected: list[list[int]], page_size: int) -> None:
    answers = generate(make_runner(page_size), PROMPTS, [GREEDY] * 4, page_size=page_size)
    assert answers == expected


def test_padded_static_inputs_change_nothing(make_runner: MakeRunner, expected: list[list[int]]) -> None:
    assert generate(make_runner(graph_sizes=(1, 2, 6)), PROMPTS, [GREEDY] * 4) == expected
    assert generate(make_runner(graph_sizes=(1, 2)), PROMPTS[:1], [GREEDY]) == expected[:1]


@pytest.mark.parametrize("pieces", [(), (8, 64), (8, 16), (21,)])
def test_chunks_and_mixed_steps_change_nothing(
    make_runner: MakeRunner, expected: list[list[int]], pieces: tuple[int, ...]
) -> None:
    """Also in pieces, where some steps are padded, some fit exactly (21 tokens) and some are too large."""
    runner, driver = make_runner(pieces=pieces), Driver(4)
    driver.admit(0, PROMPTS[0], GREEDY)
    run(runner, driver, driver.plan(prefill={0: 4}))
    driver.admit(3, PROMPTS[2], GREEDY)
    run(runner, driver, driver.plan(prefill={3: 5}, decode=(0,)))
    driver.admit(1, PROMPTS[1], GREEDY)
    run(runner, driver, driver.plan(prefill={3: 20, 1: 3}, decode=(0,)))
    run(runner, driver, driver.plan(prefill={1: 14, 3: 8}))
    for _ in range(9):
        run(runner, driver, driver.plan(decode=(3, 1)))
    for _ in range(7):
        run(runner, driver, driver.plan(decode=(0,)))
    found = [driver.tokens[row][len(PROMPTS[p]) :] for row, p in ((0, 0), (1, 1), (3, 2))]
    assert found == [expected[0], expected[1], expected[2]]


def test_a_step_may_be_launched_before_the_last_one_is_read(make_runner: MakeRunner, expected: list[list[int]]) -> None:
    runner, driver = make_runner(), Driver(4)
    driver.admit(0, PROMPTS[0], GREEDY)
    plan = driver.plan(prefill={0: 4})
    pending = runner.execute(runner.prepare(plan))
    found = []
    for _ in range(9):
        plan = driver.plan(decode=(0,))
        following = runner.execute(runner.prepare(plan))
        found += pending.result().token_ids.tolist()
        pending = following
    found += pending.result().token_ids.tolist()
    assert found == expected[0]


def test_resumption_continues_where_it_stopped(make_runner: MakeRunner, expected: list[list[int]]) -> None:
    """A preempted sequence comes back in another row, with its answer so far as part of what is prefilled."""
    runner, driver = make_runner(), Driver(4)
    so_far = PROMPTS[2] + expected[2][:4]
    driver.admit(5, so_far, GREEDY, prompt_len=len(PROMPTS[2]))
    run(runner, driver, driver.plan(prefill={5: len(so_far)}))
    for _ in range(5):
        run(runner, driver, driver.plan(decode=(5,)))
    assert driver.tokens[5][len(PROMPTS[2]) :] == expected[2]


def test_a_seed_gives_the_same_text_in_any_company(make_runner: MakeRunner) -> None:
    together = generate(make_runner(), PROMPTS, SAMPLED)
    alone = [generate(make_runner(), [prompt], [wish])[0] for prompt, wish in zip(PROMPTS, SAMPLED, strict=True)]
    padded = generate(make_runner(graph_sizes=(1, 2, 6), pieces=(32, 64)), PROMPTS, SAMPLED)
    assert together == alone == padded


def test_a_seed_survives_preemption_and_another_row(make_runner: MakeRunner) -> None:
    together = generate(make_runner(), PROMPTS, SAMPLED)
    for index, wish in enumerate(SAMPLED):
        runner, driver = make_runner(), Driver(4)
        so_far = PROMPTS[index] + together[index][:4]
        driver.admit(4, so_far, wish, prompt_len=len(PROMPTS[index]))
        run(runner, driver, driver.plan(prefill={4: len(so_far)}))
        for _ in range(5):
            run(runner, driver, driver.plan(decode=(4,)))
        assert driver.tokens[4][len(PROMPTS[index]) :] == together[index]


def test_different_seeds_differ(make_runner: MakeRunner) -> None:
    wishes = [SamplingParams(temperature=1.5, seed=seed) for seed in (0, 1, 2**32, 2**63)]
    answers = generate(make_runner(), [PROMPTS[0]] * 4, wishes)
    assert len({tuple(answer) for answer in answers}) == 4


@pytest.mark.parametrize("pieces", [(), (64,)])
def test_logprobs_equal_transformers(make_runner: MakeRunner, tiny_model_dir: Path, pieces: tuple[int, ...]) -> None:
    from transformers import Qwen3ForCausalLM

    reference = Qwen3ForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    wish = SamplingParams(temperature=1.0, seed=8, logprobs=3, prompt_logprobs=2)
    runner, driver = make_runner(pieces=pieces), Driver(4)
    prompt = PROMPTS[2]
    driver.admit(0, PROMPTS[0], GREEDY)
    driver.admit(1, prompt, wish)
    first = run(runner, driver, driver.plan(prefill={0: 4, 1: 10}))
    second = run(runner, driver, driver.plan(prefill={1: len(prompt) - 10}, decode=(0,)))
    third = run(runner, driver, driver.plan(decode=(0, 1)))
    with torch.inference_mode():
        expected = torch.log_softmax(reference(torch.tensor([driver.tokens[1]])).logits[0], dim=-1)

    of_prompt = first.prompt_logprobs[1] + second.prompt_logprobs[1]
    assert len(of_prompt) == len(prompt) - 1
    assert not third.prompt_logprobs
    assert set(second.logprobs) == {0}
    assert set(third.logprobs) == {1}
    found = [*of_prompt, second.logprobs[0], third.logprobs[1]]
    for position, (token, entry) in enumerate(zip(driver.tokens[1][1:], found, strict=True)):
        line = expected[position]
        assert entry.logprob == pytest.approx(float(line[token]), abs=1e-4)
        assert entry.rank == int((line > line[token]).sum()) + 1
        top = 2 if position < len(prompt) - 1 else 3
        values, ids = line.topk(top)
        assert entry.top_ids == tuple(ids.tolist())
        assert entry.top == pytest.approx(values.tolist(), abs=1e-4)


def test_a_row_with_nan_fails_alone(make_runner: MakeRunner, expected: list[list[int]]) -> None:
    runner = make_runner()
    model = runner._model
    logits_of = model.logits

    def poisoned(hidden: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        logits = logits_of(hidden)
        logits[1] = torch.nan
        return logits

    driver = Driver(4)
    for row in (0, 1):
        driver.admit(row, PROMPTS[row], GREEDY)
    model.logits = poisoned  # type: ignore[method-assign]
    result = run(runner, driver, driver.plan(prefill={0: 4, 1: 17}))
    assert result.failed_rows == {1}
    assert result.token_ids[0] == expected[0][0]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("graph_sizes", [(), (4,)])
def test_grammar_masks_allow_only_their_tokens(
    make_runner: MakeRunner, graph_sizes: tuple[int, ...], in_place: bool
) -> None:
    runner, driver = make_runner(graph_sizes=graph_sizes), Driver(4)
    for row in (0, 1, 2):
        driver.admit(row, PROMPTS[0], SamplingParams(temperature=2.0, seed=row, grammar=GRAMMAR if row else None))
    plan = driver.plan(prefill={0: 4, 1: 4, 2: 4})
    pending = runner.execute(runner.prepare(plan))
    runner.sample(pending, None)
    driver.commit(plan, pending.result().token_ids)
    bits = runner.grammar_bitmask(2) if in_place else np.empty((2, -(-VOCAB // 32)), dtype=np.int32)
    bits[:] = 0
    bits[0, 33 // 32] = 1 << (33 % 32)
    bits[1, 159 // 32] = np.array(1 << (159 % 32), dtype=np.uint32).astype(np.int32)
    plan = driver.plan(decode=(0, 1, 2))
    pending = runner.execute(runner.prepare(plan))
    assert pending.unsampled is not None
    runner.sample(pending, (np.array([1, 2], dtype=np.int32), bits))
    assert pending.result().token_ids[1:].tolist() == [33, 159]


def test_a_plan_without_tokens_is_executed(make_runner: MakeRunner) -> None:
    runner, driver = make_runner(), Driver(4)
    driver.admit(0, PROMPTS[0], GREEDY)
    empty = runner.execute(runner.prepare(msgspec.structs.replace(driver.plan(), step=1))).result()
    assert len(empty.token_ids) == 0
    driver.admit(0, PROMPTS[1], GREEDY)
    assert len(run(runner, driver, driver.plan(prefill={0: 6})).token_ids) == 0
