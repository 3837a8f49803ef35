"""Activations in every kernel that has an epilogue for them, by Triton's interpreter against torch's own functions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.kernels import GemmDevice, PlainKernels
from minisgl_backend.kernels.moe.call import MixtureCall
from minisgl_backend.kernels.torch_ops import TorchOps, activate_mul
from tests.mixtures import TORCH, by_torch, experts_of, interpreted

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels compiled", allow_module_level=True)
pytest.importorskip("triton", reason="pip install triton; tests/conftest.py turns its interpreter on")

from minisgl_backend.kernels import elementwise as fused
from minisgl_backend.kernels.linear.plain import small_rows
from minisgl_backend.kernels.linear.plain.small_rows import LinearShape
from minisgl_backend.kernels.moe import few_tokens, grouped, one_token

REFERENCES = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
CPU = torch.device("cpu")


@pytest.mark.parametrize("activation", REFERENCES)
def test_elementwise(activation: str) -> None:
    gate_up = torch.cat([torch.linspace(-20, 20, 400), torch.randn(400)]).view(1, 800)
    expected = REFERENCES[activation](gate_up[:, :400]) * gate_up[:, 400:]
    torch.testing.assert_close(fused.activate_mul(gate_up, activation), expected, atol=2e-6, rtol=1e-5)


def test_swiglu_oai() -> None:
    """gpt-oss: of both halves clamped, against transformers' words for it."""
    gate_up = torch.cat([torch.linspace(-20, 20, 400), torch.randn(400) * 8]).view(1, 800)
    gate, up = gate_up[:, :400].clamp(max=7.0), gate_up[:, 400:].clamp(-7.0, 7.0)
    expected = (up + 1) * (gate * torch.sigmoid(gate * 1.702))
    torch.testing.assert_close(fused.activate_mul(gate_up, "swiglu_oai"), expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(activate_mul(gate_up, "swiglu_oai"), expected)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        (1, LinearShape(4, 64, 1, 2, 1, vector=True)),
        (3, LinearShape(16, 32, 1, 4, 1, slices=2)),
        (9, LinearShape(32, 32, 1, 4, 2)),
    ],
)
def test_epilogues_of_few_rows(rows: int, shape: LinearShape, activation: str) -> None:
    x, weight = torch.randn(rows, 64), torch.randn(2 * 40, 64) / 8
    gate, up = (x @ weight.T).chunk(2, dim=1)
    workspace = small_rows.LinearWorkspace(CPU, 128, 4)
    found = small_rows.linear(x, weight, workspace, GemmCall(activation=activation), shape=shape)
    torch.testing.assert_close(found, REFERENCES[activation](gate) * up, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        PlainKernels(GemmDevice(TorchOps())).linear(x, weight, GemmCall(activation=activation)),
        REFERENCES[activation](gate) * up,
    )


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_mixtures(tokens: int) -> None:
    hidden, size, experts, k = 64, 32, 4, 2
    x, router = torch.randn(tokens, hidden), torch.randn(experts, hidden) / 8
    gate_up, down = torch.randn(experts, 2 * size, hidden) / 8, torch.randn(experts, hidden, size) / 8
    weighted, call = experts_of(gate_up, down, k, activation="gelu_tanh"), MixtureCall(router=router)
    expected = by_torch(x, weighted, call)
    if tokens == 40:
        call = MixtureCall(TORCH.route(x @ router.T, k, True))
    found = {1: one_token, 3: few_tokens, 40: grouped}[tokens].mixture(interpreted(), x, weighted, call)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    gate, up = (x[0] @ gate_up.transpose(1, 2)).chunk(2, dim=-1)
    outputs = torch.einsum("eh,eoh->eo", F.gelu(gate, approximate="tanh") * up, down)
    shares, chosen = (x[0] @ router.T).softmax(0).topk(k)
    torch.testing.assert_close(expected[0], (shares / shares.sum()) @ outputs[chosen], atol=1e-5, rtol=1e-4)


def test_a_gate() -> None:
    """Of outputs of attention, from some columns of what was projected."""
    projected, x = torch.randn(3, 1500, generator=torch.Generator().manual_seed(0)), torch.ones(3, 1100)
    expected = TorchOps().gate(x.clone(), projected[:, 400:])
    torch.testing.assert_close(expected, projected[:, 400:].sigmoid())
    torch.testing.assert_close(fused.gate(x, projected[:, 400:]), expected)
