"""INT8 weights on a GPU against the same integers on the CPU."""

from __future__ import annotations

import pytest
import torch

from minisgl_backend.kernels.linear import int8
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.kernels import GemmDevice, LinearKernels
from minisgl_backend.kernels.moe.call import MixtureCall, Picked
from minisgl_backend.kernels.torch_ops import TorchOps
from tests.mixtures import TORCH, by_gpu, by_torch, experts_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("sizes", [(2048, 5120), (1003, 777)])
@pytest.mark.parametrize("rows", [1, 17, 33, 300])
def test_linear(rows: int, sizes: tuple[int, int]) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, sizes[1]), torch.randint(-127, 128, sizes, dtype=torch.int8)
    scale, residual = torch.rand(sizes[0]) / 5000 + 1e-5, torch.randn(rows, sizes[0])
    reference, ours = (LinearKernels("int8", GemmDevice(TorchOps(), torch.device(name))) for name in ("cpu", "cuda"))
    expected = reference.linear(x, int8.Int8Weight(weight, scale), GemmCall(residual=residual))
    on_gpu = int8.Int8Weight(weight.cuda(), scale.cuda())
    found = ours.linear(x.cuda(), on_gpu, GemmCall(residual=residual.cuda())).cpu()
    assert (found - expected).norm() / expected.norm() < 1e-3


@pytest.mark.parametrize("tokens", [1, 9, 300, 3000])
def test_experts(tokens: int) -> None:
    """With few pairs an expert and with many."""
    torch.manual_seed(tokens)
    experts, hidden, size = 16, 512, 192
    gate_up, down = torch.randn(experts, 2 * size, hidden) / 20, torch.randn(experts, hidden, size) / 10
    weights = []
    for weight in (gate_up, down):
        numbers, scales = int8.quantize_tokens(weight.flatten(0, 1))
        weights.append(int8.Int8Weight(numbers.view(weight.shape), scales.view(weight.shape[:2])))
    x, residual = torch.randn(tokens, hidden), torch.randn(tokens, hidden)
    ids, shares = TORCH.route(torch.randn(tokens, experts), 4, True)
    expected = by_torch(x, experts_of(*weights), MixtureCall(Picked(ids, shares), residual=residual), "int8")
    there = experts_of(*(int8.Int8Weight(weight.numbers.cuda(), weight.scale.cuda()) for weight in weights))
    call = MixtureCall(Picked(ids.cuda(), shares.cuda()), residual=residual.cuda())
    found = by_gpu(x.cuda(), there, call, "int8").cpu()
    # Between the GEMMs a number halfway between two integers goes to either.
    assert (found - expected).norm() / expected.norm() < 2e-3
