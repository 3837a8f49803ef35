"""Experts in MXFP4 on a GPU against their torch reference, in the shapes of gpt-oss-20b and of its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backend.kernels.linear.kernels import GemmDevice, PlainKernels
from minisgl_backend.kernels.moe.mxfp4_torch import Mxfp4Kernels, Weight
from minisgl_backend.kernels.torch_ops import TorchOps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a Hopper GPU"
    ),
]
EXPERTS, HIDDEN, K = 32, 2880, 4
LOW, HIGH = 118, 123  # scales of weights of a plausible size


def weight(rows: int, columns: int) -> Weight:
    shape = (EXPERTS, rows, columns // 32)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, device="cuda")
    return blocks, torch.randint(LOW, HIGH, shape, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2880, 1440, 704])
def test_mixture(size: int, dtype: torch.dtype) -> None:
    """Every way of multiplying. Each token's experts stand far above the others: no rounding changes who is picked."""
    from minisgl_backend.kernels.moe.mxfp4_gpu import TritonMxfp4Kernels
    from minisgl_backend.kernels.triton_ops import TritonOps

    device = torch.device("cuda")
    torch.manual_seed(size)
    kernels = TritonMxfp4Kernels(PlainKernels(GemmDevice(TritonOps(device), device)))
    gate_up, down = weight(2 * size, HIDDEN), weight(HIDDEN, size)
    packed = kernels.pack(*gate_up), kernels.pack(*down)
    router = torch.linalg.qr(torch.randn(HIDDEN, EXPERTS, device="cuda")).Q.t().contiguous()
    biases = tuple(torch.randn(EXPERTS, rows, device="cuda").to(dtype) for rows in (2 * size, HIDDEN))
    for tokens in (1, 2, 3, 8, 9, 17, 64, 65, 300, 3000):
        levels = torch.zeros(tokens, EXPERTS, device="cuda")
        for line in levels:
            line[torch.randperm(EXPERTS, device="cuda")[:K]] = torch.linspace(10, 20, K, device="cuda")
        x, residual = (levels @ router).to(dtype), torch.randn(tokens, HIDDEN, device="cuda").to(dtype)
        more: dict[str, Any] = {"norm_weight": torch.rand(HIDDEN, device="cuda").to(dtype) + 0.5, "eps": 1e-6}
        more |= {"activation": "swiglu_oai", "biases": biases, "residual": residual}
        more["router_bias"] = torch.rand(EXPERTS, device="cuda").to(dtype)
        reference = Mxfp4Kernels(PlainKernels(GemmDevice(TorchOps())))
        expected = reference.mixture(x, router.to(dtype), gate_up, down, K, True, **more).double()
        for _ in range(2):  # each launch may overlap the one before
            found = kernels.mixture(x, router.to(dtype), *packed, K, True, **more).double()
            assert (found - expected).norm() / expected.norm() < 2e-2, tokens


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-4), (torch.bfloat16, 5e-2)])
def test_logits(dtype: torch.dtype, tolerance: float, tmp_path: Path) -> None:
    """Of a small gpt-oss, against transformers with the dequantized weights: a prompt, and tokens one by one."""
    from tests.parity.checkpoints import reference_model, save_checkpoint
    from tests.parity.paged import PagedModel
    from tests.parity.quantized import write_mxfp4

    source, quantized, plain = (tmp_path / kind for kind in ("source", "quantized", "plain"))
    save_checkpoint("gpt_oss", source)
    write_mxfp4(source, quantized, plain)
    paged = PagedModel(quantized, page_size=16, device="cuda", dtype=dtype)
    got = [paged.step({2: [3 + 7 * i % 310 for i in range(130)]}, {})[2]]
    got += [paged.step({}, {2: 20 + 5 * i})[2] for i in range(8)]
    with torch.inference_mode():
        expected = reference_model(plain)(torch.tensor([paged.tokens[2]])).logits[0]
    difference = (torch.cat(got).float().cpu() - expected).abs().amax(1) / expected.abs().amax()
    assert difference.median() <= tolerance, difference  # rounded numbers may pick another expert now and then
