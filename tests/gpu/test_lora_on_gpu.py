"""Adapters on a real GPU: kernels against torch, alone and in batches, and greedy tokens with and without graphs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backend import LLM
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.lora.reference import LoraFactors, LoraLayout, add_lora
from tests.adapter_folders import merge, save_for
from tests.parity.checkpoints import reference_model, save_checkpoint

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZES = [((4096, 1024, 1024), 5120, 16), ((5120,), 17408, 16), ((96, 48), 1030, 64), ((130,), 64, 48)]


@pytest.mark.parametrize(("sizes", "size_in", "rank"), SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 64, 700])
def test_what_is_added_to_a_row_is_right_and_hangs_on_no_other(
    sizes: tuple[int, ...], size_in: int, rank: int, dtype: torch.dtype, rows: int
) -> None:
    from minisgl_backend.kernels.lora.gpu import TritonLora

    torch.manual_seed(rows)
    device, num_slots = torch.device("cuda"), 9
    layout = LoraLayout(sizes, size_in, rank)
    factors = LoraFactors.within(torch.zeros(num_slots, layout.size, dtype=dtype, device=device), layout)
    factors.a.normal_(0, size_in**-0.5)
    factors.b.normal_(0, rank**-0.5)
    factors.a[-1], factors.b[-1] = torch.nan, torch.nan  # a slot that no row has
    slots = torch.randint(0, num_slots, (rows,), dtype=torch.int32, device=device)
    slots[0] = 1
    x, out = torch.randn(rows, size_in, device=device).to(dtype), torch.zeros(rows, sum(sizes), device=device).to(dtype)
    exact, found = out.double(), out.clone()
    double = dataclasses.replace(factors, a=factors.a.double(), b=factors.b.double())
    add_lora(exact, x.double(), slots, double)
    lora = TritonLora(x.device, dtype)
    lora.add(found, x, slots, factors)
    scale = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}[dtype]
    torch.testing.assert_close(found.double(), exact, rtol=scale, atol=scale)
    for row in range(0, rows, max(rows // 16, 1)):
        alone = out[row : row + 1].clone()
        lora.add(alone, x[row : row + 1], slots[row : row + 1], factors)
        assert torch.equal(alone[0], found[row])


CALLS = {
    "qkv": ((1024, 256, 256), 5120),
    "o": ((5120,), 1024),
    "gate_up": ((1024, 1024), 5120),
    "down": ((5120,), 3072),
}


def _chain(
    lora: Any, kernels: Any, weights: dict[str, torch.Tensor], factors: dict[str, LoraFactors], hidden: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The GEMMs of a layer, whatever is between them."""
    ops = kernels.device.ops
    norm_weight = torch.linspace(0.5, 1.5, hidden.shape[1], device=hidden.device).to(hidden.dtype)

    def run(name: str, x: torch.Tensor, call: GemmCall) -> torch.Tensor:
        norm = None if call.norm_weight is None else lambda rows: ops.rms_norm(rows, norm_weight, 1e-6)
        return lora.linear(kernels.linear, weights[name], x, slots, factors[name], call, norm)

    qkv = run("qkv", hidden, GemmCall(norm_weight, 1e-6))
    hidden = run("o", qkv[:, :1024].contiguous(), GemmCall(residual=hidden))
    gated = run("gate_up", hidden, GemmCall(norm_weight, 1e-6, activation="silu"))
    return run("down", gated.repeat(1, 3), GemmCall(residual=hidden))


def _exact(
    weights: dict[str, torch.Tensor], factors: dict[str, LoraFactors], hidden: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    def run(name: str, x: torch.Tensor) -> torch.Tensor:
        one = factors[name]
        out = x @ weights[name].double().T
        add_lora(out, x, slots, dataclasses.replace(one, a=one.a.double(), b=one.b.double()))
        return out

    def normed(x: torch.Tensor) -> torch.Tensor:
        weight = torch.linspace(0.5, 1.5, x.shape[1], device=x.device)
        return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6) * weight.to(torch.bfloat16).double()

    hidden = hidden.double()
    hidden = hidden + run("o", run("qkv", normed(hidden))[:, :1024])
    gate, up = run("gate_up", normed(hidden)).chunk(2, dim=1)
    return hidden + run("down", (torch.nn.functional.silu(gate) * up).repeat(1, 3))


@pytest.mark.parametrize("rows", [1, 2, 3, 64, 80])
def test_gemms_with_adapters_are_right_and_the_same_when_captured(rows: int) -> None:
    from minisgl_backend.kernels.linear.kernels import GemmDevice, PlainKernels
    from minisgl_backend.kernels.lora.gpu import TritonLora
    from minisgl_backend.kernels.triton_ops import TritonOps

    torch.manual_seed(rows)
    device, dtype = torch.device("cuda"), torch.bfloat16
    lora, kernels = TritonLora(device, dtype), PlainKernels(GemmDevice(TritonOps(device), device))
    weights, factors = {}, {}
    for name, (sizes, size_in) in CALLS.items():
        weights[name] = torch.randn(sum(sizes), size_in, device=device).to(dtype) * size_in**-0.5
        layout = LoraLayout(sizes, size_in, 16)
        factors[name] = LoraFactors.within(torch.zeros(4, layout.size, dtype=dtype, device=device), layout)
        factors[name].a.normal_(0, size_in**-0.5)
        factors[name].b.normal_(0, 0.25)
        factors[name].a[-1], factors[name].b[-1] = torch.nan, torch.nan
    hidden = torch.randn(rows, 5120, device=device).to(dtype)
    slots = (torch.arange(rows, device=device) % 4).int()
    slots[0] = 1
    exact = _exact(weights, factors, hidden, slots)
    found = [_chain(lora, kernels, weights, factors, hidden.clone(), slots)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _chain(lora, kernels, weights, factors, hidden.clone(), slots)
    for _ in range(3):
        graph.replay()
        found.append(captured.clone())
    for one in found:
        torch.testing.assert_close(one.double(), exact, rtol=3e-2, atol=6e-2)
        assert torch.equal(one, found[1]) or one is found[0]


@pytest.mark.parametrize("options", [{}, {"cuda_graph_max_bs": 0}], ids=["graphs", "launched"])
def test_greedy_tokens_are_those_of_merged_weights(options: dict[str, Any], tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_checkpoint("qwen3-tied-sharded", base, head_dim=64)
    models = {name: reference_model(base) for name in (None, "a", "b")}
    adapters = {
        name: save_for(tmp_path / name, models[None], "_proj$", seed=seed) for seed, name in ((1, "a"), (2, "b"))
    }
    for name, folder in adapters.items():
        merge(models[name], folder)
    asked = [(name, [7 + 3 * index] * (3 + 5 * index)) for index, name in enumerate((None, "a", "b", "a", None, "b"))]
    text = ",".join(f"{name}={folder}" for name, folder in adapters.items())
    with LLM(str(base), adapters=text, dtype="float32", num_pages=64, **options) as llm:
        params = [{"temperature": 0.0, "max_tokens": 16, **({"lora_name": name} if name else {})} for name, _ in asked]
        found = llm.generate([prompt for _, prompt in asked], params)
    for (name, prompt), answer in zip(asked, found, strict=True):
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(16):
                ids.append(int(models[name](torch.tensor([ids])).logits[0, -1].argmax()))
        tokens = answer.completions[0].token_ids
        assert tokens == ids[len(prompt) :][: len(tokens)]
