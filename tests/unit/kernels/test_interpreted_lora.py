"""The kernels of adapters in Triton's interpreter against torch; and torch's against itself, alone and in a batch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from minisgl_backend.kernels.linear.call import GemmCall
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


@pytest.mark.parametrize("case", ["norm", "gated", "residual"])
def test_a_row_is_added_inside_its_gemm(case: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs the kernels compiled")
    pytest.importorskip("triton", reason="pip install triton; tests/conftest.py turns its interpreter on")
    from minisgl_backend.kernels.linear.plain.adapted import Adapted, adapted_shape
    from minisgl_backend.kernels.linear.plain.vector import vector_linear
    from minisgl_backend.kernels.lora.few_rows import shrink_row

    torch.manual_seed(3)
    sizes, size_in, rows = {"norm": ((8, 4), 96, 1), "gated": ((6, 6), 1100, 2), "residual": ((8,), 520, 1)}[case]
    factors = LoraFactors.within(torch.zeros(3, LoraLayout(sizes, size_in, 32).size), LoraLayout(sizes, size_in, 32))
    factors.a.normal_(0, size_in**-0.5)
    factors.b.normal_()
    half = dataclasses.replace(factors, a=factors.a.half(), b=factors.b.half())
    factors = dataclasses.replace(half, a=half.a.float(), b=half.b.float())
    x, weight = torch.randn(rows, size_in).half(), (torch.randn(sum(sizes), size_in) * size_in**-0.5).half()
    slots, residual = torch.tensor([1, 0][:rows], dtype=torch.int32), torch.randn(rows, sum(sizes)).half()
    norm = torch.linspace(0.5, 1.5, size_in).half() if case != "residual" else None
    call = GemmCall(
        norm, 1e-6, activation="silu" if case == "gated" else None, residual=residual if case == "residual" else None
    )
    shape = adapted_shape(x, weight, call, half)
    assert shape is not None
    hidden = shrink_row(x, slots, half, norm)
    found = vector_linear(x, weight, call, shape, adapted=Adapted(hidden, slots, half))
    exact = x.float()
    if norm is not None:
        exact = exact * torch.rsqrt(exact.square().mean(1, keepdim=True) + 1e-6) * norm.float()
    normed, exact = exact, exact @ weight.float().T
    add_lora(exact, normed, slots, factors)
    if case == "gated":
        gate, up = exact.chunk(2, dim=1)
        exact = torch.nn.functional.silu(gate) * up
    exact = exact + residual.float() if case == "residual" else exact
    torch.testing.assert_close(found.float(), exact, rtol=4e-3, atol=4e-3)
