"""A proposer that looks on is told the hidden states of all tokens, however a step runs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from hand_made_plans import Driver
from tiny_runner import GREEDY, PROMPTS, MakeRunner, run

from minisgl_backend.kv.pool import KVPool
from minisgl_backend.layers.context import AuxStates
from minisgl_backend.runner.batch import BatchBuilder
from minisgl_backend.runner.graphs.whole import GraphRunner
from minisgl_backend.runner.proposers.proposer import DeviceProposer
from minisgl_backend.runner.step_tensors import StepTensors
from tests.specs import one_group


class LooksOn(DeviceProposer):
    """Proposes nothing, and remembers what it was told: states by row and position."""

    graph_sizes = ()

    def __init__(self) -> None:
        super().__init__(one_group(num_q_heads=1, num_kv_heads=1, head_dim=8, page_size=4, max_seq_len=8, max_rows=1))
        self.told: dict[tuple[int, int], torch.Tensor] = {}

    def aux_states(self, num_tokens: int) -> AuxStates:
        return AuxStates(layers=(0, 1), out=torch.zeros(num_tokens, 2 * 64))

    def observe(self, rows: torch.Tensor, positions: torch.Tensor, states: torch.Tensor) -> None:
        for row, position, state in zip(rows.tolist(), positions.tolist(), states, strict=True):
            self.told[row, position] = state.clone()

    def bind(self, pool: KVPool, builder: BatchBuilder) -> None: ...

    def prepare(self, graphs: GraphRunner | None, longest_prefill: int) -> None: ...

    def propose(self, step: StepTensors) -> torch.Tensor:
        raise NotImplementedError

    def parameters(self) -> Iterable[torch.Tensor]:
        return ()


def told(make_runner: MakeRunner, **captures: object) -> dict[tuple[int, int], torch.Tensor]:
    """A lone prompt in two chunks, another one, one beside a row that decodes, and rows that decode."""
    proposer = LooksOn()
    runner, driver = make_runner(proposer=proposer, **captures), Driver(4)
    padding = runner._table.padding_row
    for row, lengths in ((2, (20, 13)), (1, (17,))):
        driver.admit(row, PROMPTS[row], GREEDY)
        for length in lengths:
            run(runner, driver, driver.plan(prefill={row: length}))
    driver.admit(0, PROMPTS[0], GREEDY)
    run(runner, driver, driver.plan(prefill={0: 4}, decode=(1,)))
    run(runner, driver, driver.plan(decode=(0, 1, 2)))
    return {key: state for key, state in proposer.told.items() if key[0] != padding}


def test_states_of_all_tokens_are_told_whatever_is_captured(make_runner: MakeRunner) -> None:
    expected = told(make_runner)
    assert sorted(expected) == [(row, at) for row, count in ((0, 5), (1, 19), (2, 34)) for at in range(count)]
    for captures in ({"pieces": (8, 17, 64), "prompt_graphs": True}, {"pieces": (32,), "graph_sizes": (4,)}):
        found = told(make_runner, **captures)
        assert found.keys() == expected.keys()
        for key, state in expected.items():
            assert state.abs().max() > 0
            torch.testing.assert_close(found[key], state, rtol=1e-4, atol=1e-4)
