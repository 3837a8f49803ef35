"""The kernels of adapters in Triton's interpreter against torch; and torch's against itself, alone and in a batch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from minisgl_backend.kernels.lora.reference import LoraFactors, LoraLayout, add_lora

SIZES = [((48, 16, 16), 96, 16, 5), ((130,), 1100, 48, 33), ((16, 20), 1030, 16, 513)]


def case(sizes: tuple[int, ...], size_in: int, rank: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(rows)
    layout = LoraLayout(sizes, size_in, rank)
    factors = LoraFactors.within(torch.zeros(3, layout.size + 128, dtype=dtype)[:, 64 : 64 + layout.size], layout)
    factors.a.normal_(0, size_in**-0.5)
    factors.b.normal_()
    factors.a[2], factors.b[2] = torch.nan, torch.nan  # a slot that no row has
    slots = torch.randint(0, 3, (rows,), dtype=torch.int32)
    return factors, torch.randn(rows, size_in).to(dtype), torch.randn(rows, sum(sizes)).to(dtype), slots  # type: ignore


@pytest.mark.parametrize(("sizes", "size_in", "rank", "rows"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels_add_what_torch_adds(
    sizes: tuple[int, ...], size_in: int, rank: int, rows: int, dtype: torch.dtype
) -> None:
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs the kernels compiled")
    pytest.importorskip("triton", reason="pip install triton; tests/conftest.py turns its interpreter on")
    from minisgl_backend.kernels.lora.gpu import TritonLora

    factors, x, out, slots = case(sizes, size_in, rank, rows, dtype)
    exact, found = out.float(), out.clone()
    add_lora(exact, x.float(), slots, dataclasses.replace(factors, a=factors.a.float(), b=factors.b.float()))
    lora = TritonLora(x.device, dtype)
    lora.add(found, x, slots, factors)
    torch.testing.assert_close(found.float(), exact, rtol=2e-3, atol=2e-3 if dtype is torch.float16 else 1e-4)
    assert torch.equal(found[slots == 0], out[slots == 0])


@pytest.mark.parametrize(("sizes", "size_in", "rank", "rows"), SIZES)
def test_what_is_added_to_a_row_hangs_on_no_other(sizes: tuple[int, ...], size_in: int, rank: int, rows: int) -> None:
    factors, x, _, slots = case(sizes, size_in, rank, rows, torch.float32)
    together = torch.zeros(rows, sum(sizes))
    add_lora(together, x, slots, factors)
    for row in range(0, rows, max(rows // 8, 1)):
        alone = torch.zeros(1, sum(sizes))
        add_lora(alone, x[row : row + 1], slots[row : row + 1], factors)
        assert torch.equal(alone[0], together[row])
    assert torch.isfinite(together).all()
