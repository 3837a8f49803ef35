"""Prompt steps that are captured, in pieces or whole, give what eager ones give."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hand_made_plans import Driver
from tiny_runner import GREEDY, PROMPTS, SAMPLED, MakeRunner, run

from minisgl_backend.layers.model_input import ModelInput
from minisgl_backend.request import SamplingParams
from minisgl_backend.runner.graphs.pieces import EagerPieces, piece_sizes
from minisgl_backend.runner.model_runner import ModelRunner
from minisgl_backend.runner.start.step_sizes import TILE_TOKENS
from tests.parity.checkpoints import save_checkpoint


def test_captured_passes_of_lone_prompts_change_nothing(make_runner: MakeRunner, expected: list[list[int]]) -> None:
    """Padded and not, of other sizes before; a second chunk and a prompt beside a running row go in pieces."""
    runner, driver = make_runner(pieces=(8, 17, 64), prompt_graphs=True), Driver(4)
    backend = runner.attention.backends[0][0]
    taken = []
    for row, lengths in ((2, (20, 13)), (0, (4,)), (1, (17,))):
        driver.admit(row, PROMPTS[row], GREEDY)
        for length in lengths:
            run(runner, driver, driver.plan(prefill={row: length}))
            taken.append(backend.num_attended // 2)
    assert taken == [1, 1, 2, 3]
    driver.admit(3, PROMPTS[3], GREEDY)
    run(runner, driver, driver.plan(prefill={3: 1}, decode=(0,)))
    assert backend.num_attended // 2 == 3
    for _ in range(9):
        run(runner, driver, driver.plan(decode=(0, 1, 2, 3)))
    found = [driver.tokens[row][len(prompt) :] for row, prompt in enumerate(PROMPTS)]
    assert [answer[:10] for answer in found] == expected


def test_layers_that_differ_in_their_heads(make_runner: MakeRunner, tmp_path: Path) -> None:
    """Lone prompts, whole and in two chunks, the second of which goes in pieces, as does one beside a running row."""
    save_checkpoint("gemma4", tmp_path)

    def answers(runner: ModelRunner) -> list[list[int]]:
        driver = Driver(4 * runner.columns.kernel_pages, len(runner.columns.kinds))
        for row, lengths in ((2, (20, 13)), (0, (4,))):
            driver.admit(row, PROMPTS[row], GREEDY)
            for length in lengths:
                run(runner, driver, driver.plan(prefill={row: length}))
        driver.admit(1, PROMPTS[1], GREEDY)
        run(runner, driver, driver.plan(prefill={1: 17}, decode=(0,)))
        for _ in range(6):
            run(runner, driver, driver.plan(decode=(0, 1, 2)))
        return [driver.tokens[row] for row in range(3)]

    captured = make_runner(pieces=(8, 64), prompt_graphs=True, folder=tmp_path)
    assert answers(captured) == answers(make_runner(folder=tmp_path))
    backends, _ = captured.attention.backends
    assert [one.num_attended for one in backends] == [2 * len(one.group.layers) for one in backends]
    assert len({one.group.head_dim for one in backends}) == 2


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_a_lone_prompt_takes_over_pages_of_the_prefix_cache(
    make_runner: MakeRunner, expected: list[list[int]], page_size: int
) -> None:
    """The pages of an earlier row, whose first tokens are not computed again."""
    runner, driver = make_runner(page_size, pieces=(8, 64), prompt_graphs=True), Driver(page_size)
    prompt, cached = PROMPTS[2], 32 // page_size * page_size
    driver.admit(0, prompt, GREEDY)
    run(runner, driver, driver.plan(prefill={0: len(prompt)}))
    driver.admit(3, prompt, GREEDY)
    shared = np.arange(1, 1 + cached // page_size, dtype=np.int32)
    driver.computed[3], driver.pages[3] = cached, len(shared)
    plan = driver.plan(prefill={3: len(prompt) - cached})
    plan = msgspec.structs.replace(
        plan,
        page_rows=np.full(len(shared) + len(plan.page_ids), 3, dtype=np.int32),
        page_columns=np.arange(len(shared) + len(plan.page_ids), dtype=np.int32),
        page_ids=np.concatenate([shared, plan.page_ids]),
    )
    run(runner, driver, plan)
    assert runner.attention.backends[0][0].num_attended // 2 == 2
    for _ in range(9):
        run(runner, driver, driver.plan(decode=(3,)))
    assert driver.tokens[3][len(prompt) :] == expected[2]


def test_lone_prompts_are_sampled_as_in_company(make_runner: MakeRunner) -> None:
    """With penalties, rules, log-probabilities and prompt log-probabilities, which need the hidden states of all."""
    wishes = [*SAMPLED, SamplingParams(temperature=1.0, seed=8, logprobs=3, prompt_logprobs=2)]

    def answers(runner: ModelRunner) -> list[object]:
        found: list[object] = []
        for wish in wishes:
            driver = Driver(4)
            driver.admit(0, PROMPTS[2], wish)
            result = run(runner, driver, driver.plan(prefill={0: len(PROMPTS[2])}))
            answer = [run(runner, driver, driver.plan(decode=(0,))).token_ids.tolist() for _ in range(6)]
            found.append((result.token_ids.tolist(), answer, len(result.logprobs), len(result.prompt_logprobs)))
        return found

    captured = make_runner(pieces=(64,), prompt_graphs=True)
    assert answers(captured) == answers(make_runner(pieces=(64,)))
    assert captured.attention.backends[0][0].num_attended == 2 * len(SAMPLED)


def test_a_chunk_with_nan_is_found_where_it_samples_nothing(make_runner: MakeRunner) -> None:
    runner, driver = make_runner(pieces=(64,), prompt_graphs=True), Driver(4)
    runner._model.model.embed_tokens.weight.data[PROMPTS[2][3]] = torch.nan  # type: ignore[attr-defined]
    driver.admit(0, PROMPTS[2], GREEDY)
    assert run(runner, driver, driver.plan(prefill={0: 20})).failed_rows == {0}


def test_padding_of_pieces_writes_no_page_of_a_step_before(make_runner: MakeRunner) -> None:
    """The slots of the long step would be left in the padding of the short one."""
    runner, driver = make_runner(pieces=(64,)), Driver(4)
    driver.admit(0, PROMPTS[2], GREEDY)
    run(runner, driver, driver.plan(prefill={0: len(PROMPTS[2])}))
    pages = [cache[1:] for layer in (0, 1) for cache in (runner._pool.layer(layer).k, runner._pool.layer(layer).v)]
    before = [cache.clone() for cache in pages]
    taken = driver.next_page - 1
    driver.admit(1, PROMPTS[0], GREEDY)
    run(runner, driver, driver.plan(prefill={1: len(PROMPTS[0])}))
    for cache, kept in zip(pages, before, strict=True):
        assert torch.equal(cache[:taken], kept[:taken])


def test_piece_sizes() -> None:
    assert piece_sizes(0) == ()
    assert piece_sizes(10) == (10,)
    assert piece_sizes(100) == (16, 32, 48, 64, 96, 100)
    assert piece_sizes(512) == (16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)
    assert piece_sizes(1500)[-6:] == (896, 1024, 1152, 1280, 1408, 1500)
    assert set(range(TILE_TOKENS, 2049, TILE_TOKENS)) <= set(piece_sizes(2048))  # steps that the planner fills
    assert piece_sizes(8448)[-11:] == (1920, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 8448)


@pytest.mark.parametrize(
    ("num_tokens", "fits"),
    [(1, True), (513, True), (2048, True), (2049, False), (2275, False), (2276, True), (2560, True), (8448, True),
     (4097, False), (4552, True), (8449, False)],
)  # fmt: skip
def test_long_steps_are_not_padded_by_much(num_tokens: int, fits: bool) -> None:
    pieces = EagerPieces(piece_sizes(8448), 8)
    tokens = torch.zeros(num_tokens, dtype=torch.int32)
    assert pieces.serves(ModelInput(tokens, tokens)) == fits
    assert not pieces.serves(ModelInput(tokens, tokens, by_row=tokens))
    assert pieces.sparse_sizes[:3] == (2048, 2560, 3072)
    assert EagerPieces(piece_sizes(2048), 8).sparse_sizes == ()
