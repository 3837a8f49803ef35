"""The CPU's compiled kernels of layers with states: against the plain recurrence, and against torch's short
convolution."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from minisgl_backend.kernels.cpu.library import cpu_library
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.recurrent.choose import recurrent_kernels
from minisgl_backend.kernels.recurrent.short_conv import ShortConvCall, choose_short_conv, short_conv_in_torch
from minisgl_backend.kernels.select import select_ops
from minisgl_backend.kv.state_config import StateConfig
from tests.recurrent import RecurrentRows, small

CPU = torch.device("cpu")
OUTPUTS, STATES = {torch.bfloat16: 2e-3, torch.float16: 5e-4}, 1e-5  # relative errors

pytestmark = pytest.mark.skipif(cpu_library() is None, reason="this machine has no compiled kernels")


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize(
    ("config", "dtype", "page_size", "max_drafts"),
    [
        (small(2), torch.bfloat16, 16, 0),
        (small(1, 32, 48), torch.float16, 32, 3),
        (small(3, 48, 80, num_k_heads=1, width=3), torch.bfloat16, 1, 1),
        (small(2, 128, 128), torch.bfloat16, 4, 2),
    ],
)
def test_windows_and_folds(config: StateConfig, dtype: torch.dtype, page_size: int, max_drafts: int) -> None:
    """Drafts right and wrong, padding, steps made twice, folds over several pages."""
    kernels = recurrent_kernels(DeviceFacts.of(CPU))
    assert kernels.delta_window.__module__ == kernels.delta_fold.__module__ == "minisgl_backend.kernels.cpu.recurrent"
    rows = RecurrentRows(
        config, num_tokens=130, page_size=page_size, max_drafts=max_drafts, dtype=dtype, state_dtype=torch.float32,
        ops=kernels, beta_scale=2.0, num_layers=2,
    )  # fmt: skip
    # As layers have them.
    rows.layers = [
        dataclasses.replace(layer, conv_weight=layer.conv_weight.float(), norm_weight=layer.norm_weight.float())
        for layer in rows.layers
    ]
    expected = [rows.expected(row, 1) for row in range(3)]
    rows.prefill({0: 1, 1: page_size + 14, 2: 30})
    for step in range(16):
        if step % 5 != 1:
            rows.fold()
        at, count = list(rows.lengths), step % (max_drafts + 1)
        if max(rows.lengths) - int(rows.borders.max()) >= page_size:
            rows.fold()
        drafts = {0: 0, 1: count, 2: max_drafts if step else 0}
        found = rows.decode(drafts, {1: count // 2}, padding=step % 3, attempts=1 + step % 2)
        for row, out in found.items():
            assert error(out, expected[row][0][at[row] : rows.lengths[row]]) < OUTPUTS[dtype], (step, row)
    for row in range(3):
        if border := int(rows.borders[row]):
            assert error(rows.pool.layer(1).states[rows.slots[row]], expected[row][1][border]) < STATES, row


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "page_size", "has_bias"), [(3, 16, False), (3, 1, True), (7, 4, True)])
def test_short_convolutions(dtype: torch.dtype, width: int, page_size: int, has_bias: bool) -> None:
    """Prompts beside rows that decode with drafts, of which some are rejected: what torch computes and keeps."""
    kernel, channels, drafts, draw = choose_short_conv(select_ops(CPU, 64, dtype)), 48, 3, random.Random(width)
    assert kernel.__module__ == "minisgl_backend.kernels.cpu.recurrent"
    torch.manual_seed(width)
    weight, bias = torch.randn(channels, width).to(dtype), torch.randn(channels).to(dtype) if has_bias else None
    columns, length = -(-400 // page_size), min(width + drafts, page_size)
    table = torch.randperm(3 * columns).int().view(3, columns) + 1
    ring = torch.zeros(3 * columns + 1, length, channels, dtype=dtype)
    lengths = [0, 0, 0]
    for step in range(20):
        counts = [page_size * draw.randint(1, 9) if step < 2 else 1 + draw.randint(0, drafts) for _ in lengths]
        rows = torch.tensor([row for row, count in enumerate(counts) for _ in range(count)], dtype=torch.int32)
        ends = torch.tensor([lengths[row] + 1 + i for row, n in enumerate(counts) for i in range(n)]).int()
        rings, outs = [ring.clone(), ring.clone()], torch.empty(2, len(rows), channels, dtype=dtype)
        inputs = torch.randn(len(rows), 3 * channels).to(dtype)
        for run, kept, out in zip((short_conv_in_torch, kernel), rings, outs, strict=True):
            run(ShortConvCall(inputs, weight, bias, rows, ends, table, page_size, kept, out))
        assert torch.equal(rings[0][1:], rings[1][1:])  # page 0 pads
        assert error(outs[1], outs[0]) < OUTPUTS[dtype]
        ring = rings[1]
        lengths = [
            at + (count if step < 2 else draw.randint(1, count)) for at, count in zip(lengths, counts, strict=True)
        ]
