"""Kernels of small GEMMs, norms and activations against their torch references.

In Triton's interpreter: no GPU needed. tests/gpu runs them compiled. In small shapes here, since the interpreter
executes one program after the other.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.kernels import GemmDevice, PlainKernels
from minisgl_backend.kernels.linear.workspace import LinearWorkspace
from minisgl_backend.kernels.torch_ops import TorchOps

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels compiled", allow_module_level=True)
pytest.importorskip("triton", reason="pip install triton; tests/conftest.py turns its interpreter on")

from minisgl_backend.kernels import elementwise as fused
from minisgl_backend.kernels.linear.plain import small_rows as small_linear
from minisgl_backend.kernels.linear.plain import tiling

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_rows", [1, 2, 5, 17])
@pytest.mark.parametrize("split", [1, 3])
def test_small_linear(num_rows, split):
    torch.manual_seed(num_rows)
    x, weight = torch.randn(num_rows, 160), torch.randn(60, 160) / math.sqrt(160)
    norm, bias, residual = torch.randn(160), torch.randn(60), torch.randn(num_rows, 60)
    workspace = LinearWorkspace(CPU, max_out=128, max_split=4)
    shapes = [tiling.LinearShape(16, 32, split, 4, 2)]
    if num_rows <= tiling.MAX_VECTOR_ROWS:
        shapes.append(tiling.LinearShape(8, 64, 1, 4, 1, vector=True))
    if num_rows <= tiling.MAX_SLICED_ROWS:
        shapes.append(tiling.LinearShape(16, 32, split, 4, 1, slices=8 // min(split, 2)))
    reference = PlainKernels(GemmDevice(TorchOps()))
    for shape in shapes:
        for wish in ({}, {"bias": bias, "residual": residual}, {"norm_weight": norm, "eps": 1e-6}):
            expected = reference.linear(
                x, weight, GemmCall(**{k: v.clone() if k == "residual" else v for k, v in wish.items()})
            )
            out = small_linear.linear(x, weight, workspace, GemmCall(**wish), shape=shape)
            torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
        call = GemmCall(norm, 1e-6, activation="silu")
        gated = small_linear.linear(x, weight, workspace, call, shape=shape)
        expected = reference.linear(x, weight, call)
        torch.testing.assert_close(gated, expected, atol=1e-4, rtol=1e-4)
    assert int(workspace.counters.abs().sum()) == 0


@pytest.mark.parametrize("early", [1, 3, 9])
@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("gated", [False, True])
def test_weights_that_are_loaded_before_the_inputs(early, split, gated):
    """As many tiles as a part has, fewer, and more; the last one is not whole."""
    torch.manual_seed(early)
    x, weight, norm = torch.randn(5, 300), torch.randn(40, 300) / 17, torch.rand(300) + 0.5
    workspace = LinearWorkspace(CPU, max_out=128, max_split=4)
    shape = tiling.LinearShape(16, 64, split, 4, 3, early=early)
    for wish in ({}, {"norm_weight": norm, "eps": 1e-6}):
        call = GemmCall(activation="silu" if gated else None, **wish)
        expected = PlainKernels(GemmDevice(TorchOps())).linear(x, weight, call)
        found = small_linear.linear(x, weight, workspace, call, shape=shape)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert int(workspace.counters.abs().sum()) == 0


@pytest.mark.parametrize(("size_out", "size_in"), [(5120, 5120), (5120, 12800), (2048, 14336), (20480, 20480)])
def test_long_gemms_are_tiled_so_that_two_programs_fit_a_multiprocessor(size_out, size_in):
    shape = tiling.long_shape(size_out, size_in)
    assert shape.split == 1 or shape.split * size_out // shape.tile_out <= 2 * 132
    numbers = shape.tile_out + 16
    assert 2 * shape.tile_in * (shape.num_stages * numbers + shape.early * shape.tile_out) <= 227 << 9


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("num_rows", [3, 16, 17, 32, 64])
@pytest.mark.parametrize(("size_out", "size_in"), [(3072, 1024), (12800, 5120), (17408, 5120), (5120, 12800)])
def test_stages_of_a_small_gemm_fit_a_multiprocessor(num_rows, size_out, size_in, gated):
    shape = tiling.linear_shape(num_rows, size_out, size_in, gated)
    if shape.slices == 1:
        numbers = shape.tile_out * (2 if gated else 1) + max(16, num_rows)
        assert 2 * shape.num_stages * shape.tile_in * numbers <= 227 << 10


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("size_out", "size_in"), [(4096, 1024), (1024, 2048), (1024, 3072), (5120, 2048), (2048, 4096)]
)
def test_a_gemm_without_a_loop_holds_its_inputs_and_fits_a_small_gpu(size_out, size_in, gated):
    """99 KiB of shared memory for a block have GPUs of compute capability 8.6, 8.9 and 12."""
    for num_rows in range(2, tiling.MAX_SLICED_ROWS + 1):
        shape = tiling.linear_shape(num_rows, size_out, size_in, gated)
        if shape.slices > 1:
            assert shape.slices * shape.tile_in * shape.split >= size_in
            numbers = shape.tile_out * (2 if gated else 1) + 16
            assert 2 * shape.slices * shape.tile_in * numbers <= 99 << 10


def test_one_row_of_many_inputs():
    for size_in in (8192, 12800, 17408):
        assert tiling.linear_shape(1, 5120, size_in).tile_in == 4096
        assert tiling.linear_shape(1, 5120, size_in, gated=True).tile_in == 2048


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("gated", [False, True])
def test_small_linear_with_activations_whose_norm_weight_overflows_float16(split, gated):
    """In float16, whose largest number is 65,504: 9,000 times 8 is more."""
    torch.manual_seed(0)
    x = torch.randn(5, 128).half()
    x[2, 7] = 9000
    norm = torch.ones(128).half()
    norm[7] = 8
    weight = (torch.randn(64, 128) * 0.1).half()
    workspace = LinearWorkspace(CPU, max_out=128, max_split=4)
    normed = x.float() * torch.rsqrt(x.float().square().mean(1, keepdim=True) + 1e-6) * norm.float()
    expected = normed @ weight.float().T
    if gated:
        expected = torch.nn.functional.silu(expected[:, :32]) * expected[:, 32:]
    for slices in (1, 4):
        shape = tiling.LinearShape(16, 32, split, 4, 2, slices=slices)
        out = small_linear.linear(
            x, weight, workspace, GemmCall(norm, 1e-6, activation="silu" if gated else None), shape=shape
        )
        torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)


def test_norm_and_activation():
    x, weight = torch.randn(5, 96), torch.randn(96)
    torch.testing.assert_close(fused.rms_norm(x, weight, 1e-6), TorchOps().rms_norm(x, weight, 1e-6))
    gate_up = torch.randn(5, 3000)
    expected = F.silu(gate_up[:, :1500]) * gate_up[:, 1500:]
    torch.testing.assert_close(fused.activate_mul(gate_up), expected)
