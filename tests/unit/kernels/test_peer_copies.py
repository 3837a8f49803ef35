"""The kernel that adds what other ranks have sent, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from minisgl_backend.kernels.torch_ops import TorchOps

if torch.cuda.is_available():
    pytest.skip("tests/gpu/test_collectives.py runs the kernel compiled", allow_module_level=True)
pytest.importorskip("triton", reason="pip install triton; tests/conftest.py turns its interpreter on")

from minisgl_backend.kernels.collectives.copy_engines import Received, add_norm

EPS = 1e-6


def ends(
    partials: list[torch.Tensor],
    residual: torch.Tensor,
    weight: torch.Tensor,
    rank: int,
    *,
    counts: int = 1,
    number: int = 1,
    stop: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `rank` makes of the ranks' parts when `counts` sums have come of each."""
    size, rows = len(partials), len(residual)
    inbox = torch.full((size - 1, rows + 3, residual.shape[1]), float("nan"), dtype=residual.dtype)
    for away in range(1, size):
        inbox[away - 1, :rows] = partials[(rank + away) % size]
    come = torch.full((size - 1,), counts, dtype=torch.int32)
    stops = torch.full((1,), stop, dtype=torch.int32)
    received = Received(rank, inbox, number, come.data_ptr(), stops.data_ptr())
    result = add_norm(partials[rank], residual.clone(), weight, EPS, received, 2)
    assert bool((come == counts).all())
    return result


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_rank_gets_the_same_sum(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    rows, hidden = 5, 24
    partials = [torch.randn(rows, hidden).to(dtype) for _ in range(size)]
    residual, weight = torch.randn(rows, hidden).to(dtype), torch.randn(hidden).to(dtype)
    total = torch.zeros(rows, hidden)
    for partial in partials:  # in float32 in the order of the ranks, rounded once
        total = total + partial.float()
    expected = (total + residual.float()).to(dtype)
    for rank in range(size):
        summed, normed = ends(partials, residual, weight, rank)
        assert torch.equal(summed, expected)
        tolerance = 2e-3 if dtype == torch.float16 else 1e-6
        torch.testing.assert_close(normed, TorchOps().rms_norm(expected, weight, EPS), rtol=tolerance, atol=0)


@pytest.mark.parametrize(("counts", "number"), [(1, 1), (2, 1), (2**31 - 1, 2**31 - 2), (-(2**31), 2**31 - 1), (0, -1)])
def test_counts_go_round(counts: int, number: int) -> None:
    """Nobody waits for a sum that has come, nor for one before the last that has."""
    one = torch.ones(1, 8)
    summed, _ = ends([one, one], one, one[0], 0, counts=counts, number=number)
    assert torch.equal(summed, 3 * one)


def test_a_sum_that_waits_in_vain_ends_when_it_is_told_to() -> None:
    one = torch.ones(1, 8)
    ends([one, one], one, one[0], 0, counts=0, number=1, stop=1)
