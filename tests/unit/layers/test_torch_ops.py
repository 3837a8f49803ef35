"""The plain torch operations against formulas written out for one token at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.kernels import GemmDevice, PlainKernels
from minisgl_backend.kernels.moe.call import MixtureCall, Picked
from minisgl_backend.kernels.torch_ops import TorchOps
from tests.mixtures import by_torch, experts_of


@pytest.mark.parametrize("num_tokens", [1, 7, 40])
@pytest.mark.parametrize("experts_per_token", [1, 3])
def test_moe(num_tokens: int, experts_per_token: int) -> None:
    num_experts, hidden, size = 6, 16, 24
    x = torch.randn(num_tokens, hidden)
    gate_up, down = torch.randn(num_experts, 2 * size, hidden), torch.randn(num_experts, hidden, size)
    # Expert 4 is never chosen, and the choices of a token differ.
    choices = torch.stack([torch.tensor([0, 1, 2, 3, 5])[torch.randperm(5)] for _ in range(num_tokens)])
    ids, weights = choices[:, :experts_per_token], torch.rand(num_tokens, experts_per_token)
    expected = torch.zeros_like(x)
    for token in range(num_tokens):
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            expected[token] += weight * (down[expert] @ (F.silu(gate) * up))
    found = by_torch(x, experts_of(gate_up, down), MixtureCall(Picked(ids, weights)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_linear(bias: bool, residual: bool, norm: bool) -> None:
    x, weight = torch.randn(5, 8), torch.randn(6, 8)
    norm_weight = torch.randn(8) if norm else None
    b = torch.randn(6) if bias else None
    r = torch.randn(5, 6) if residual else None
    normed = x if norm_weight is None else x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt() * norm_weight
    expected = normed @ weight.t() + (0 if b is None else b) + (0 if r is None else r)
    out = PlainKernels(GemmDevice(TorchOps())).linear(
        x, weight, GemmCall(norm_weight, 1e-5, bias=b, residual=None if r is None else r.clone())
    )
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_gated_linear() -> None:
    x, weight = torch.randn(5, 8), torch.randn(12, 8)
    gate, up = (x @ weight.t()).chunk(2, dim=1)
    torch.testing.assert_close(
        PlainKernels(GemmDevice(TorchOps())).linear(x, weight, GemmCall(activation="silu")), F.silu(gate) * up
    )


def test_results_keep_the_number_format() -> None:
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    assert TorchOps().rms_norm(x, torch.ones(8, dtype=torch.bfloat16), 1e-6).dtype == torch.bfloat16
