"""Experts in MXFP4 on a GPU against their torch reference, in the shapes of gpt-oss-20b and of its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backend.kernels.moe.call import MixtureCall
from minisgl_backend.kernels.moe.mixtures import ExpertsKernels
from minisgl_backend.kernels.moe.mxfp4.weight import Mxfp4Weight
from tests.mixtures import by_torch, experts_of, on_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a Hopper GPU"
    ),
]
EXPERTS, HIDDEN, K = 32, 2880, 4
LOW, HIGH = 118, 123  # scales of weights of a plausible size


def weight(rows: int, columns: int) -> Mxfp4Weight:
    shape = (EXPERTS, rows, columns // 32)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, device="cuda")
    return Mxfp4Weight(blocks, torch.randint(LOW, HIGH, shape, dtype=torch.uint8, device="cuda"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2880, 1440, 704])
def test_mixture(size: int, dtype: torch.dtype) -> None:
    """Every way of multiplying. Each token's experts stand far above the others: no rounding changes who is picked."""
    from minisgl_backend.kernels.moe.mxfp4.grouped import pack

    torch.manual_seed(size)
    kernels: ExpertsKernels[Mxfp4Weight] = ExpertsKernels("mxfp4", on_gpu())
    gate_up, down = weight(2 * size, HIDDEN), weight(HIDDEN, size)
    more: dict[str, Any] = {
        name: torch.randn(EXPERTS, rows, device="cuda").to(dtype)
        for name, rows in (("gate_up_bias", 2 * size), ("down_bias", HIDDEN))
    }
    more["activation"] = "swiglu_oai"
    experts, packed = experts_of(gate_up, down, K, **more), experts_of(pack(*gate_up), pack(*down), K, **more)
    router = torch.linalg.qr(torch.randn(HIDDEN, EXPERTS, device="cuda")).Q.t().contiguous()
    for tokens in (1, 2, 3, 8, 9, 17, 64, 65, 300, 3000):
        levels = torch.zeros(tokens, EXPERTS, device="cuda")
        for line in levels:
            line[torch.randperm(EXPERTS, device="cuda")[:K]] = torch.linspace(10, 20, K, device="cuda")
        x, residual = (levels @ router).to(dtype), torch.randn(tokens, HIDDEN, device="cuda").to(dtype)
        call = MixtureCall(
            router=router.to(dtype), router_bias=torch.rand(EXPERTS, device="cuda").to(dtype),
            norm_weight=torch.rand(HIDDEN, device="cuda").to(dtype) + 0.5, eps=1e-6, residual=residual,
        )  # fmt: skip
        expected = by_torch(x, experts, call, "mxfp4").double()
        for _ in range(2):  # each launch may overlap the one before
            found = kernels(x, packed, call).double()
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
