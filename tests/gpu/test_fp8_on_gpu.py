"""FP8 weights on a GPU against their torch reference: every way of multiplying, and the demo model's answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.fp8.reference import FP8, Fp8Weight, dequantize, quantize_outputs
from minisgl_backend.kernels.linear.kernels import GemmDevice, LinearKernels
from minisgl_backend.kernels.moe.call import MixtureCall, Picked
from minisgl_backend.kernels.torch_ops import TorchOps
from tests.mixtures import by_gpu, by_torch, experts_of

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with FP8"
)


def kernels() -> Any:
    from minisgl_backend.kernels.triton_ops import TritonOps

    device = torch.device("cuda")
    return LinearKernels("fp8", GemmDevice(TritonOps(device), device))


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def by_reference(x: torch.Tensor, weight: Fp8Weight, call: GemmCall) -> torch.Tensor:
    """Of one row, which keeps 16 bits, by plain numbers."""
    if len(x) > 1:
        return LinearKernels("fp8", GemmDevice(TorchOps())).linear(x, weight, call)
    plain = dequantize(weight.numbers, weight.scale, weight.block)
    float_call = call._replace(
        **{
            name: given.float()
            for name in ("norm_weight", "bias", "residual")
            if (given := getattr(call, name)) is not None
        }
    )
    return LinearKernels("plain", GemmDevice(TorchOps())).linear(x.float(), plain, float_call)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["plain", "norm residual", "gated norm", "bias"])
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 33, 64, 65, 300, 2048])
def test_linear(rows: int, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, 5120, device="cuda").to(dtype)
    weight, scale = quantize_outputs(torch.randn(2048, 5120, device="cuda").to(dtype) / 72)
    options: dict[str, Any] = {"activation": "silu" if "gated" in kind else None}
    if "norm" in kind:
        options |= {"norm_weight": (torch.rand(5120, device="cuda") + 0.5).to(dtype), "eps": 1e-6}
    if "bias" in kind:
        options["bias"] = torch.randn(2048, device="cuda").to(dtype)
    residual = torch.randn(rows, 2048, device="cuda").to(dtype) if "residual" in kind else None
    expected = by_reference(x, Fp8Weight(weight, scale), GemmCall(residual=residual, **options))
    found = kernels().linear(
        x, Fp8Weight(weight, scale), GemmCall(residual=None if residual is None else residual.clone(), **options)
    )
    assert relative(found, expected) < 1e-2


@pytest.mark.parametrize("rows", [1, 8, 40])
@pytest.mark.parametrize(("size_out", "size_in"), [(2880, 2880), (104, 600), (5120, 17408), (7168, 1024)])
def test_linear_of_other_sizes(rows: int, size_out: int, size_in: int) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, size_in, device="cuda").bfloat16()
    weight, scale = quantize_outputs(torch.randn(size_out, size_in, device="cuda").bfloat16() / size_in**0.5)
    expected = by_reference(x.float(), Fp8Weight(weight, scale), GemmCall())
    assert relative(kernels().linear(x, Fp8Weight(weight, scale)), expected) < 3e-3


def in_blocks(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [..., outputs, inputs] -> FP8, and scales that differ from block to block."""
    outputs, inputs = weight.shape[-2:]
    shape = (*weight.shape[:-2], -(-outputs // block[0]), -(-inputs // block[1]))
    scale = torch.rand(*shape, device="cuda") / 2000 + 1e-4
    whole = dequantize(torch.ones_like(weight).to(FP8), scale, block)
    return (weight / whole).clamp(-448, 448).to(FP8), scale


@pytest.mark.parametrize("sizes", [(2048, 5120, 128), (1000, 2056, 128), (768, 1216, 64)])
@pytest.mark.parametrize("kind", ["plain", "norm residual", "gated norm"])
@pytest.mark.parametrize("rows", [1, 9, 64, 65, 300, 2048])
def test_linear_in_blocks(rows: int, kind: str, sizes: tuple[int, int, int]) -> None:
    """Also of sizes that are no multiples of blocks."""
    torch.manual_seed(rows)
    size_out, size_in, block = sizes
    x = torch.randn(rows, size_in, device="cuda").bfloat16()
    weight = Fp8Weight(
        *in_blocks(torch.randn(size_out, size_in, device="cuda") / 72, (block, block)), block=(block, block)
    )
    options: dict[str, Any] = {"activation": "silu" if "gated" in kind else None}
    if "norm" in kind:
        options |= {"norm_weight": (torch.rand(size_in, device="cuda") + 0.5).bfloat16(), "eps": 1e-6}
    residual = torch.randn(rows, size_out, device="cuda").bfloat16() if "residual" in kind else None
    expected = by_reference(x, weight, GemmCall(residual=residual, **options))
    found = kernels().linear(x, weight, GemmCall(residual=None if residual is None else residual.clone(), **options))
    assert relative(found, expected) < 1e-2


@pytest.mark.parametrize("sizes", [(7168, 5120), (5120, 17408), (5120, 2048), (2048, 4096), (640, 896)])
def test_every_number_of_rows_in_whole_blocks(sizes: tuple[int, int]) -> None:
    """Of Qwen3-14B and Qwen3-30B-A3B, and with seven blocks of inputs."""
    torch.manual_seed(1)
    weight = Fp8Weight(*in_blocks(torch.randn(*sizes, device="cuda") / 72, (128, 128)), block=(128, 128))
    ours, reference = kernels(), LinearKernels("fp8", GemmDevice(TorchOps()))
    x = torch.randn(1000, sizes[1], device="cuda").bfloat16()
    whole = reference.linear(x, weight)
    for rows in (*range(65, 133), 257, 402, 511, 513, 1000):
        assert relative(ours.linear(x[:rows], weight), whole[:rows]) < 1e-2, rows


@pytest.mark.parametrize("rows", [1, 64, 300])
def test_linear_with_a_given_scale_of_odd_sizes(rows: int) -> None:
    torch.manual_seed(rows)
    x, x_scale = torch.randn(rows, 1003, device="cuda").bfloat16(), torch.tensor(0.01, device="cuda")
    weight, scale = quantize_outputs(torch.randn(777, 1003, device="cuda").bfloat16() / 72)
    expected = by_reference(x, Fp8Weight(weight, scale, x_scale), GemmCall())
    assert relative(kernels().linear(x, Fp8Weight(weight, scale, x_scale)), expected) < 1e-2


@pytest.mark.parametrize("tokens", [1, 7, 64, 500, 3000])
def test_experts_in_blocks(tokens: int) -> None:
    """Of 192 inputs, where a rank has one and a half blocks."""
    torch.manual_seed(tokens)
    experts, k, hidden, size, blocks = 32, 4, 512, 192, ((64, 128), (128, 64))
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    ids = torch.stack([torch.randperm(experts, device="cuda")[:k] for _ in range(tokens)])
    shares = torch.rand(tokens, k, device="cuda")
    gate_up = in_blocks(torch.randn(experts, 2 * size, hidden, device="cuda") * 0.05, blocks[0])
    down = in_blocks(torch.randn(experts, hidden, size, device="cuda") * 0.05, blocks[1])
    weights = (Fp8Weight(*one, block=block) for one, block in zip((gate_up, down), blocks, strict=True))
    given = x, experts_of(*weights), MixtureCall(Picked(ids, shares)), "fp8"
    assert relative(by_gpu(*given), by_torch(*given)) < 2e-2


@pytest.mark.parametrize("tokens", [1, 7, 64, 500, 3000])
def test_experts(tokens: int) -> None:
    torch.manual_seed(tokens)
    experts, k, hidden, size = 32, 4, 512, 192
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    ids = torch.stack([torch.randperm(experts, device="cuda")[:k] for _ in range(tokens)])
    shares = torch.rand(tokens, k, device="cuda")
    gate_up = quantize_outputs(torch.randn(experts, 2 * size, hidden, device="cuda").bfloat16() * 0.05)
    down = quantize_outputs(torch.randn(experts, hidden, size, device="cuda").bfloat16() * 0.05)
    given = x, experts_of(Fp8Weight(*gate_up), Fp8Weight(*down)), MixtureCall(Picked(ids, shares)), "fp8"
    assert relative(by_gpu(*given), by_torch(*given)) < 2e-2


@pytest.mark.parametrize("kind", ["channels", "blocks"])
@pytest.mark.parametrize("tokens", [1, 2, 7, 33, 64, 200, 3000])
def test_experts_with_their_router(tokens: int, kind: str) -> None:
    """In Qwen3-30B-A3B's sizes, against plain numbers: of one token, and of few with a scale for each output,
    activations keep their format; else they do not, which shows as noise."""
    torch.manual_seed(tokens)
    experts, k, hidden, size = 16, 4, 2048, 768
    weights = []
    for shape in ((experts, 2 * size, hidden), (experts, hidden, size)):
        weight, block = torch.randn(shape, device="cuda") * 0.03, (128, 128) if kind == "blocks" else None
        weights.append(
            Fp8Weight(*(quantize_outputs(weight) if block is None else in_blocks(weight, block)), None, block)
        )
    plain = [dequantize(one.numbers, one.scale, one.block) for one in weights]
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    router = (torch.randn(experts, hidden, device="cuda") * 0.05).bfloat16()
    norm_weight = (torch.rand(hidden, device="cuda") + 0.5).bfloat16()
    call = MixtureCall(router=router, norm_weight=norm_weight, eps=1e-6, residual=torch.zeros_like(x))
    found = by_gpu(x, experts_of(*weights, k), call, "fp8")
    exact = call._replace(router=router.float(), norm_weight=norm_weight.float(), residual=torch.zeros_like(x).float())
    expected = by_torch(x.float(), experts_of(*plain, k), exact)
    # By token, since one whose last choices are nearly equal may take another expert.
    errors = (found.float() - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.median() < (1e-2 if tokens <= (1 if kind == "blocks" else 16) else 6e-2)
    assert (errors < 0.1).float().mean() >= 0.5


def test_the_demo_model_answers() -> None:
    from minisgl_backend import LLM

    with LLM("demo", quantization="fp8") as llm:
        (answer,) = llm.chat([[{"role": "user", "content": "What is 17 + 25?"}]], max_tokens=32, temperature=0)
    assert "42" in answer.text
