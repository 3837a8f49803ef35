"""Kernels of the gated delta rule against the plain recurrence, in Triton's interpreter; tests/gpu runs them
compiled."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.recurrent import RecurrentRows, small

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels compiled", allow_module_level=True)
pytest.importorskip("triton", reason="pip install triton; tests/conftest.py turns its interpreter on")

import triton
import triton.language as tl

from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.recurrent.choose import recurrent_kernels
from minisgl_backend.kernels.recurrent.parts import halves
from minisgl_backend.kernels.recurrent.window import delta_window
from minisgl_backend.kv.state_config import StateConfig

BOUNDS = {torch.float32: 2e-5, torch.float16: 1e-2}  # the interpreter has no products of bfloat16


def rows_of(config: StateConfig, dtype: torch.dtype = torch.float32, **options: Any) -> RecurrentRows:
    return RecurrentRows(
        config, dtype=dtype, state_dtype=torch.float32, ops=recurrent_kernels(DeviceFacts.named("h100")), **options
    )


@pytest.mark.parametrize(
    ("config", "dtype", "page_size", "max_drafts", "streams"),
    [
        (small(2), torch.float16, 16, 0, True),
        (small(1, 24, 48), torch.float32, 16, 0, False),
        (small(1, 24, 48), torch.float32, 32, 0, True),
        (small(1, 16, 32), torch.float32, 16, 2, None),
        (small(3, 24, 48, num_k_heads=1), torch.float32, 64, 1, None),
        (small(4, num_k_heads=1, width=3), torch.float32, 1, 3, None),
    ],
)
def test_decoding(
    config: StateConfig, dtype: torch.dtype, page_size: int, max_drafts: int, streams: bool | None
) -> None:
    """Windows and folds, with drafts right and wrong, padding, steps made twice; tails longer than what a program reads
    at once; sizes that are no power of two."""
    rows = rows_of(config, dtype, num_tokens=130, page_size=page_size, max_drafts=max_drafts)
    rows.ops = rows.ops._replace(delta_window=partial(delta_window, streams=streams))
    expected = [rows.expected(row) for row in range(3)]
    rows.prefill({0: 1, 1: page_size + 14, 2: 30})
    for step in range(5):
        rows.fold()
        at, count = list(rows.lengths), step % (max_drafts + 1)
        drafts = {0: 0, 1: count, 2: max_drafts if step else 0}  # the first step has none
        found = rows.decode(drafts, {1: count // 2}, padding=step % 3, attempts=1 + step % 2)
        for row, out in found.items():
            bound = BOUNDS[dtype]
            torch.testing.assert_close(out, expected[row][0][at[row] : rows.lengths[row]], rtol=bound, atol=bound)
    for row in range(3):
        states = expected[row][1][rows.borders[row]]
        bound = BOUNDS[dtype] / 3
        torch.testing.assert_close(rows.pool.layer(0).states[rows.slots[row]], states, rtol=bound, atol=bound)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (small(2), torch.float16),
        (small(1, 16, 32, num_k_heads=1), torch.float32),
        (small(3, 24, 48, num_k_heads=1, width=3), torch.float32),
    ],
)
def test_prompts(config: StateConfig, dtype: torch.dtype) -> None:
    """Chunks of very different lengths at once, checkpoints, a next chunk from a slot to itself, and what is handed
    over to decoding."""
    rows, bound = rows_of(config, dtype, num_rows=3, num_tokens=170), BOUNDS[dtype]
    expected = [rows.expected(row) for row in range(3)]
    found = [rows.prefill({0: 48, 1: 2, 2: 129}, {0: [(16, 6)], 2: [(112, 5)]})]
    found.append(rows.prefill({0: 48 + 65}))
    torch.testing.assert_close(torch.cat([out[0] for out in found]), expected[0][0][:113], rtol=bound, atol=bound)
    for row, end in ((1, 2), (2, 129)):
        torch.testing.assert_close(found[0][row], expected[row][0][:end], rtol=bound, atol=bound)
    for row, slot, border in ((0, 6, 16), (2, 5, 112), (0, 1, 112), (2, 3, 128)):
        states = rows.pool.layer(0).states[slot]
        torch.testing.assert_close(states, expected[row][1][border], rtol=bound / 3, atol=bound / 3)
    for _ in range(2):
        rows.fold()
        for row, out in rows.decode(dict.fromkeys(range(3), 0)).items():
            last = expected[row][0][rows.lengths[row] - 1 :][:1]
            torch.testing.assert_close(out, last, rtol=bound, atol=bound)


@triton.jit
def _halves_kernel(x_ptr, high_ptr, low_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    high, low = halves(tl.load(x_ptr + i), tl.bfloat16)
    tl.store(high_ptr + i, high.to(tl.float32))
    tl.store(low_ptr + i, low.to(tl.float32))


def test_upper_halves_are_the_nearest() -> None:
    """Lower ones of one sign would add up in products that leave theirs out: blocks of keys that are alike lost digits
    by it."""
    x = torch.cat([torch.randn(510, generator=torch.Generator().manual_seed(0)), torch.tensor([0.0, -1e30])])
    high, low = torch.empty(2, 512)
    _halves_kernel[(1,)](x, high, low, 512)
    assert torch.equal(high, x.bfloat16().float())
    torch.testing.assert_close(high + low, x, rtol=2**-16, atol=0)
