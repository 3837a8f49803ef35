"""Kernels of the gated delta rule on this GPU: against the plain recurrence, and against themselves in a graph."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.recurrent import reference
from minisgl_backend.kernels.recurrent.calls import WindowBatch
from minisgl_backend.kernels.recurrent.choose import recurrent_kernels
from minisgl_backend.kv.state_config import StateConfig
from tests.recurrent import RecurrentRows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Case(NamedTuple):
    config: StateConfig
    dtype: torch.dtype
    page_size: int
    max_drafts: int
    beta_scale: float = 1.0


def sizes(num_k_heads: int, group: int, k_dim: int, v_dim: int) -> StateConfig:
    return StateConfig(num_k_heads=num_k_heads, num_v_heads=group * num_k_heads, k_dim=k_dim, v_dim=v_dim, conv_width=4)


CASES = {
    "qwen3.5-9b": Case(sizes(16, 2, 128, 128), torch.bfloat16, 32, 0),
    "drafts": Case(sizes(4, 3, 128, 128), torch.bfloat16, 32, 3),
    "float32": Case(sizes(2, 2, 128, 128), torch.float32, 16, 1),
    "olmo": Case(sizes(4, 1, 96, 192), torch.bfloat16, 64, 2, beta_scale=2.0),
    "tiny": Case(sizes(2, 2, 16, 16), torch.float16, 1, 3),
}
STATES = {torch.float32: 1e-5, torch.float16: 2e-4, torch.bfloat16: 2e-4}  # relative errors
OUTPUTS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert bool(found.isfinite().all())
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_the_recurrence(name: str) -> None:
    """Prompts of many lengths at once, checkpoints, hand-over, decoding with drafts right and wrong, and folds."""
    case = CASES[name]
    lengths = [1, 3, 31, 32, 33, 63, 64, 65, 127, 130, 300]
    rows = RecurrentRows(
        case.config, num_rows=len(lengths), num_tokens=420, page_size=case.page_size, max_drafts=case.max_drafts,
        dtype=case.dtype, state_dtype=torch.float32, device="cuda", beta_scale=case.beta_scale,
        ops=recurrent_kernels(DeviceFacts.of(torch.device("cuda"))),
    )  # fmt: skip
    expected = [rows.expected(row) for row in range(len(lengths))]
    states = rows.pool.layer(0).states
    outs = rows.prefill(dict(enumerate(lengths)), {10: [(128, 20), (256, 21)]})
    for row, out in outs.items():
        assert error(out, expected[row][0][: len(out)]) < OUTPUTS[case.dtype], row
    for row, slot, border in ((10, 20, 128), (10, 21, 256)):
        assert error(states[slot], expected[row][1][border]) < STATES[case.dtype]
    for step in range(40):
        rows.fold()
        at, count = list(rows.lengths), step % (case.max_drafts + 1)
        drafts = {row: count if row % 2 else case.max_drafts * (count > 0) for row in range(len(lengths))}
        outs = rows.decode(drafts, dict.fromkeys(range(1, len(lengths), 2), count // 2), padding=step % 4)
        for row, out in outs.items():
            assert error(out, expected[row][0][at[row] : rows.lengths[row]]) < 2 * OUTPUTS[case.dtype], (step, row)
        if max(rows.lengths) > 410:
            break
    for row in range(len(lengths)):
        if rows.borders[row] > 0:
            assert error(states[rows.slots[row]], expected[row][1][rows.borders[row]]) < STATES[case.dtype], row


@pytest.mark.parametrize("beta_scale", [1.0, 2.0])
@pytest.mark.parametrize("decay", [-30.0, 0.0, 20.0])
def test_keys_that_are_alike(beta_scale: float, decay: float) -> None:
    """The worst system of a block: all keys the same, beta at its largest, no decay, or all of it."""
    rows = RecurrentRows(
        sizes(2, 2, 128, 128), num_rows=1, num_tokens=300, page_size=32, dtype=torch.bfloat16,
        state_dtype=torch.float32, device="cuda", beta_scale=beta_scale,
        ops=recurrent_kernels(DeviceFacts.of(torch.device("cuda"))),
    )  # fmt: skip
    x = rows.inputs[0]
    x[:, 2 * 128 : 4 * 128] = x[:1, 2 * 128 : 4 * 128]
    x[:, -4:], x[:, -8:-4] = decay, 20.0
    out, states = rows.expected(0)
    assert error(rows.prefill({0: 256})[0], out[:256]) < 3e-2
    assert error(rows.pool.layer(0).states[1], states[256]) < 5e-3


def test_a_captured_step_follows_its_tables() -> None:
    """One graph for rows that move on, with padding; the window as torch computes it."""
    case, count, size = CASES["qwen3.5-9b"], 5, 8
    rows = RecurrentRows(
        case.config, num_rows=count, num_tokens=120, page_size=32, dtype=case.dtype, state_dtype=torch.float32,
        device="cuda", ops=recurrent_kernels(DeviceFacts.of(torch.device("cuda"))),
    )  # fmt: skip
    rows.prefill({row: 20 * row + 1 for row in range(count)})
    x = torch.zeros(size, case.config.num_inputs, dtype=case.dtype, device="cuda")
    index = torch.full((size,), count, dtype=torch.int32, device="cuda")
    lens = torch.ones(size, dtype=torch.int32, device="cuda")
    batch, layer = WindowBatch(index, lens, rows.slots, rows.borders), rows.layers[0]
    rows.ops.delta_window(x, layer, batch, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rows.ops.delta_window(x, layer, batch, None)
    index[:count] = torch.arange(count, dtype=torch.int32, device="cuda")
    for _ in range(8):
        rows.fold()
        lens[:count] = torch.tensor(rows.lengths, dtype=torch.int32, device="cuda") + 1
        x[:count] = torch.stack([rows.inputs[row][rows.lengths[row]] for row in range(count)])
        kept = [tensor.clone() for tensor in layer.state]
        graph.replay()
        for tensor, before in zip(layer.state, kept, strict=True):
            tensor.copy_(before)
        expected = reference.delta_window(x[:count], layer, WindowBatch(index[:count], lens[:count], *batch[2:4]))
        assert error(out[:count], expected) < 1e-2
        rows.lengths = [length + 1 for length in rows.lengths]
