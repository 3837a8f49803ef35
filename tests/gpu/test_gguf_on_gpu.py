"""GGUF's blocks on a GPU against their plain numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="pip install gguf")

from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.gguf.packed import PACKED, PackedBlocks, dequantized, packed
from minisgl_backend.kernels.linear.kernels import GemmDevice
from minisgl_backend.kernels.linear.plain import reference
from minisgl_backend.kernels.torch_ops import TorchOps
from tests.tiny_gguf import random_blocks
from tests.unit.kernels.int4_weights import relative

BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs a GPU with bfloat16"
)


def blocks(kind: str, size_out: int, size_in: int) -> PackedBlocks:
    random = np.random.default_rng(size_in)
    return packed(kind, torch.from_numpy(random_blocks(kind, (size_out, size_in), random)).cuda())


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("cut", [(64, 8, 2, 3), (128, 16, 4, 3), (256, 64, 8, 2), (128, 128, 8, 2)])
def test_tiles(cut: tuple[int, int, int, int], kind: str) -> None:
    from minisgl_backend.kernels.linear.int4 import many_rows
    from minisgl_backend.kernels.triton_ops import TritonOps

    torch.manual_seed(0)
    tile, tile_rows, warps, stages = cut
    device = GemmDevice(TritonOps(torch.device("cuda")), torch.device("cuda"))
    for size_in, rows, gated in ((2048, tile_rows, True), (1024 if kind.endswith("_K") else 1120, 3, False)):
        weight = blocks(kind, 1088, size_in)
        x = torch.randn(rows, size_in, device="cuda").to(BF16)
        residual = None if gated else torch.randn(rows, 1088, device="cuda").to(BF16)
        call = GemmCall(residual=residual, activation="silu" if gated else None)
        plain = call._replace(residual=None if residual is None else residual.float())
        expected = reference.linear(GemmDevice(TorchOps()), x.float(), dequantized(weight, torch.float32), plain)
        shape = many_rows.ManyShape(tile, tile_rows, warps, stages, 2)
        found = [many_rows.linear(x, weight, device.workspace, call, shape, 33) for _ in range(3)]
        assert relative(found[0], expected) < 1e-2
        assert all(torch.equal(found[0], other) for other in found[1:])
