"""Kernels of GGUF's blocks against their plain numbers, in Triton's interpreter; tests/gpu runs them compiled."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="pip install gguf")
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels compiled", allow_module_level=True)
pytest.importorskip("triton", reason="pip install triton; tests/conftest.py turns its interpreter on")

import gguf

from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.gguf import gpu
from minisgl_backend.kernels.linear.gguf.packed import PACKED, PackedBlocks, dequantized, packed
from minisgl_backend.kernels.linear.int4 import many_rows
from minisgl_backend.kernels.linear.kernels import GemmDevice
from minisgl_backend.kernels.linear.plain import reference
from minisgl_backend.kernels.linear.workspace import LinearWorkspace
from minisgl_backend.kernels.torch_ops import TorchOps
from tests.tiny_gguf import random_blocks
from tests.unit.kernels.int4_weights import relative


def stored(kind: str, size_in: int = 512) -> np.ndarray:
    return random_blocks(kind, (70, size_in), np.random.default_rng(size_in))


def blocks(kind: str, size_in: int = 512) -> PackedBlocks:
    return packed(kind, torch.from_numpy(stored(kind, size_in)))


@pytest.mark.parametrize(("kind", "size_in"), [*((kind, 512) for kind in PACKED), ("Q4_0", 288), ("Q5_0", 288)])
def test_the_layout_has_the_files_numbers(kind: str, size_in: int) -> None:
    """But for scales, which are in bfloat16."""
    data = stored(kind, size_in)
    expected = torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType[kind]))
    weight = blocks(kind, size_in)
    assert relative(dequantized(weight, torch.float32), expected) < 3e-3
    some = dequantized(weight.rows(slice(10, 30)), torch.float32)
    assert torch.equal(some, dequantized(weight, torch.float32)[10:30])
    if size_in == 512:
        assert weight.kind.nbytes == pytest.approx(PACKED[kind] * data.nbytes)


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize(("rows", "programs"), [(3, 3), (20, 2)])
def test_linear(rows: int, programs: int, kind: str) -> None:
    torch.manual_seed(rows)
    weight, x = blocks(kind, 512 if kind.endswith("K") else 544), torch.randn(rows, 512 if kind.endswith("K") else 544)
    call = GemmCall(residual=torch.randn(rows, 70)) if rows > 16 else GemmCall(activation="silu")
    device, workspace = GemmDevice(TorchOps()), LinearWorkspace(torch.device("cpu"), max_out=256, max_split=4)
    expected = reference.linear(device, x, dequantized(weight, torch.float32), call._replace(residual=None))
    expected = expected if call.residual is None else expected + call.residual
    shape = many_rows.ManyShape(32, 16, 4, 2, least=1)
    assert relative(many_rows.linear(x, weight, workspace, call, shape, programs), expected) < 1e-5
    assert int(workspace.counters.abs().sum()) == 0


@pytest.mark.parametrize("kind", PACKED)
def test_some_rows_become_numbers(kind: str) -> None:
    weight = blocks(kind)
    expected = dequantized(weight, torch.float32)
    assert relative(gpu.dequantize_rows(weight, slice(32, 70), torch.empty(38, 512)), expected[32:]) < 1e-6
    ids = torch.tensor([69, 3, 3, 0])
    found = gpu.rows_of(GemmDevice(TorchOps()), gpu.PackedWeight((70, 512), (weight,)), ids)
    assert relative(found, expected[ids]) < 6e-3
