"""Kernels of FP8 weights against their torch reference, in Triton's interpreter; tests/gpu runs them compiled.

And compiled for Hopper, where the interpreter does not see what the compiler refuses.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.fp8.reference import FP8, Fp8Weight, dequantize, quantize_outputs
from minisgl_backend.kernels.linear.kernels import GemmDevice, LinearKernels
from minisgl_backend.kernels.moe.call import EarlyRouter, MixtureCall
from minisgl_backend.kernels.torch_ops import TorchOps
from tests.mixtures import TORCH, by_torch, experts_of, interpreted

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels compiled", allow_module_level=True)
pytest.importorskip("triton", reason="pip install triton; tests/conftest.py turns its interpreter on")

import triton.language as tl

from minisgl_backend.kernels.elementwise import activate_mul
from minisgl_backend.kernels.linear import int8
from minisgl_backend.kernels.linear.call import LinearKey
from minisgl_backend.kernels.linear.fp8 import cublaslt as fp8_cublaslt
from minisgl_backend.kernels.linear.fp8 import few_rows as linear_fp8
from minisgl_backend.kernels.linear.fp8 import libraries as fp8_libraries
from minisgl_backend.kernels.linear.fp8 import many_rows, one_row
from minisgl_backend.kernels.linear.fp8.quantize import (
    QuantizedRows,
    quantize_activated,
    quantize_for,
    quantize_groups,
    quantize_tokens,
)
from minisgl_backend.kernels.linear.workspace import LinearWorkspace
from minisgl_backend.kernels.moe import early_router, few_quantized, fp8_library
from minisgl_backend.kernels.moe import few_tokens as moe_few_tokens
from minisgl_backend.kernels.moe import fp8 as moe_fp8
from minisgl_backend.kernels.moe import one_token as moe_one_token
from minisgl_backend.kernels.moe.few_plan import SLOTS
from minisgl_backend.kernels.moe.gemms import GemmShape, MixtureShape
from minisgl_backend.kernels.shared_memory import LARGEST
from minisgl_backend.kernels.triton_ops import TritonOps

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def right_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter loses the carry of a mantissa that is rounded up to the next power of two."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    convert = builder.create_fp_to_fp

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.float8e4nv:
            return convert(self, src, dst_type, rounding_mode)
        rounded = torch.from_numpy(src.data.copy()).to(torch.float8_e4m3fn).view(torch.uint8)
        return interpreter.TensorHandle(rounded.numpy(), dst_type.scalar)

    monkeypatch.setattr(builder, "create_fp_to_fp", create_fp_to_fp)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def in_blocks(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [..., outputs, inputs] -> FP8, and scales that differ from block to block."""
    outputs, inputs = weight.shape[-2:]
    scale = torch.rand(*weight.shape[:-2], -(-outputs // block[0]), -(-inputs // block[1])) / 2000 + 1e-4
    whole = dequantize(torch.ones_like(weight).to(FP8), scale, block)
    return (weight / whole).clamp(-448, 448).to(FP8), scale


@pytest.mark.parametrize("kind", ["residual", "gated norm", "bias"])
def test_kernels_that_contend_give_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for sgl-kernel."""
    facts = replace(DeviceFacts.named("h200"), dependent_launch=False)
    ours = LinearKernels("fp8", GemmDevice(TritonOps(CPU, facts=facts), CPU))
    monkeypatch.setitem(sys.modules, "sgl_kernel", SimpleNamespace(fp8_scaled_mm=scaled_mm))
    torch.manual_seed(0)
    x, (weight, scale) = torch.randn(40, 128), quantize_outputs(torch.randn(96, 128) / 11)
    operands: dict[str, Any] = dict.fromkeys(("norm_weight", "bias", "residual", "activation")) | {"eps": 1e-6}
    operands |= {"activation": "silu", "norm_weight": torch.rand(128) + 0.5} if "norm" in kind else {}
    operands |= {"bias": torch.randn(96)} if kind == "bias" else {}
    for kernel in (*ours.chooser.contenders(LinearKey(40, 96, 128, torch.bfloat16)), "fp8_many_rows"):
        if kind == "residual":
            operands["residual"] = torch.ones(40, 96)
        found = ours.multiply(kernel, x, Fp8Weight(weight, scale), GemmCall(**operands))
        if kind == "residual":
            operands["residual"] = torch.ones(40, 96)
        assert (
            relative(
                found,
                LinearKernels("fp8", GemmDevice(TorchOps())).linear(x, Fp8Weight(weight, scale), GemmCall(**operands)),
            )
            < 1e-5
        ), kernel


def scaled_mm(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, bias: Any
) -> torch.Tensor:
    """x [rows, size_in], weight [size_in, size_out], scales [rows, 1] and [size_out, 1]."""
    out = (x.float() * x_scale) @ (weight.float() * scale.t())
    return (out if bias is None else out + bias.float()).to(dtype)


def test_scales_of_blocks_are_copied_only_where_some_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor] = []

    def scaled_mm(x: Any, weight: Any, x_scale: Any, how: Any, scale: torch.Tensor, *rest: Any, **options: Any) -> Any:
        given.append(scale.t())
        return x

    monkeypatch.setattr("torch.nn.functional.scaled_mm", scaled_mm, raising=False)
    monkeypatch.setattr("torch.nn.functional.ScalingType", MagicMock(), raising=False)
    x = torch.ones(16, 512).to(FP8)
    aligned, short = torch.ones(4, 4), torch.ones(4, 3)
    for scale in (aligned, short):
        fp8_libraries.torch_blocks(x, torch.ones(16, 4), x, scale)
    assert given[0].data_ptr() == aligned.data_ptr()
    assert [tuple(scale.shape) for scale in given] == [(4, 4)] * 2


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        (1, "plain"), (17, "norm"), (1, "bias residual"), (17, "gated norm"), (1, "gated bias"), (3, "static norm"),
        (3, "blocks"), (17, "blocks norm residual"), (1, "blocks gated norm"), (3, "small blocks bias"),
    ],
)  # fmt: skip
def test_linear(kind: str, rows: int) -> None:
    """With the inputs split over programs."""
    torch.manual_seed(rows)
    x, weight_32 = torch.randn(rows, 600), torch.randn(90, 600) / 20
    weight, scale = quantize_outputs(weight_32)
    options: dict[str, Any] = {"activation": "silu" if "gated" in kind else None}
    block = None
    if "norm" in kind:
        options |= {"norm_weight": torch.rand(600) + 0.5, "eps": 1e-6}
    if "blocks" in kind:
        block = (16, 32) if "small" in kind else (32, 64)
        weight, scale = in_blocks(weight_32, block)
    x_scale = torch.tensor(0.01) if "static" in kind else None
    if "bias" in kind:
        options["bias"] = torch.randn(90)
    if "residual" in kind:
        options["residual"] = torch.randn(rows, 90)
    workspace = LinearWorkspace(CPU, max_out=256, max_split=4)
    given = x, Fp8Weight(weight, scale, x_scale, block)
    found = linear_fp8.linear(*given, workspace, GemmCall(**options))
    assert relative(found, LinearKernels("fp8", GemmDevice(TorchOps())).linear(*given, GemmCall(**options))) < 2e-3
    assert int(workspace.counters.abs().sum()) == 0


@pytest.mark.parametrize("kind", ["plain", "gated norm", "blocks residual", "blocks gated norm", "small blocks bias"])
@pytest.mark.parametrize("size_in", [600, 5100])
def test_one_row_keeps_its_format(kind: str, size_in: int) -> None:
    """Against plain numbers; inputs of one step, and of several."""
    torch.manual_seed(size_in)
    x, weight_32 = torch.randn(1, size_in), torch.randn(90, size_in) / 20
    block = None if "blocks" not in kind else (16, 32) if "small" in kind else (32, 64)
    weight, scale = quantize_outputs(weight_32) if block is None else in_blocks(weight_32, block)
    options: dict[str, Any] = {"activation": "silu" if "gated" in kind else None}
    if "norm" in kind:
        options |= {"norm_weight": torch.rand(size_in) + 0.5, "eps": 1e-6}
    if "bias" in kind:
        options["bias"] = torch.randn(90)
    if "residual" in kind:
        options["residual"] = torch.randn(1, 90)
    found = one_row.linear(x, Fp8Weight(weight, scale, None, block), GemmCall(**options))
    plain = LinearKernels("plain", GemmDevice(TorchOps()))
    assert relative(found, plain.linear(x, dequantize(weight, scale, block), GemmCall(**options))) < 1e-5


@pytest.mark.parametrize("kind", ["channels bias", "blocks residual", "small blocks"])
def test_many_rows(kind: str) -> None:
    """Sizes that are no multiples of tiles."""
    torch.manual_seed(5)
    rows, size_in = 75, 201
    x, weight_32 = torch.randn(rows, size_in), torch.randn(90, size_in) / 20
    block = None if "channels" in kind else (16, 32) if "small" in kind else (64, 64)
    weight, scale = quantize_outputs(weight_32) if block is None else in_blocks(weight_32, block)
    numbers, x_scale = quantize_tokens(x) if block is None else quantize_groups(x, block[1])
    options: dict[str, Any] = {
        "bias": torch.randn(90) if "bias" in kind else None,
        "residual": torch.randn(rows, 90) if "residual" in kind else None,
    }
    found = many_rows.linear(
        numbers, x_scale, Fp8Weight(weight, scale, block=block), torch.float32, **options,
        shape=many_rows.ManyRowsShape(32, 32, 32, 4, 2),
    )  # fmt: skip
    expected = LinearKernels("fp8", GemmDevice(TorchOps())).linear(
        x, Fp8Weight(weight, scale, block=block), GemmCall(**options)
    )
    assert relative(found, expected) < 2e-3


def test_tokens_are_quantized_as_by_torch() -> None:
    x = torch.randn(3, 100)
    x[1] = 0
    for norm in (None, torch.rand(100)):
        normed = x if norm is None else TorchOps().rms_norm(x, norm, 1e-6)
        numbers, scales = quantize_tokens(x, norm, 1e-6)
        assert relative(numbers.float() * scales[:, None], normed) < 4e-2
        torch.testing.assert_close(scales, normed.abs().amax(1).clamp_min(1e-10) / 448, rtol=1e-5, atol=0)

        grouped, by_group = (one[:3] for one in quantize_groups(x, 32, norm, 1e-6, multiple=4))
        assert by_group.shape == (3, 4)
        assert relative(grouped.float() * by_group.repeat_interleave(32, 1)[:, :100], normed) < 4e-2


@pytest.mark.parametrize("kind", ["channels", "static", "blocks", "small blocks"])
@pytest.mark.parametrize("rows", [3, 70])
def test_activated_rows_are_quantized_as_by_two_kernels(rows: int, kind: str) -> None:
    """For the next GEMM, which gives what it gives of rows in 16 bits; also of a size of several parts of a row."""
    torch.manual_seed(rows)
    size = 1200
    gate_up, weight_32 = torch.randn(rows, 2 * size).bfloat16(), torch.randn(64, size) / 30
    block = None if "blocks" not in kind else (16, 32) if "small" in kind else (32, 64)
    weight = Fp8Weight(
        *(quantize_outputs(weight_32) if block is None else in_blocks(weight_32, block)),
        torch.tensor(0.02) if kind == "static" else None,
        block,
    )
    rows_16 = activate_mul(gate_up)
    found, expected = quantize_activated(gate_up, "silu", weight), quantize_for(weight, rows_16, GemmCall())
    assert (found.shape, found.dtype, len(found)) == (rows_16.shape, torch.bfloat16, rows)
    for one, other in zip(found.padded_to(1), expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=0)
    workspace = LinearWorkspace(CPU, max_out=256, max_split=4)
    torch.testing.assert_close(
        linear_fp8.linear(found, weight, workspace), linear_fp8.linear(rows_16, weight, workspace), rtol=0, atol=0
    )


def test_a_gated_gemm_leaves_its_result_as_the_next_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = replace(DeviceFacts.named("h200"), dependent_launch=False)
    device = GemmDevice(TritonOps(CPU, facts=facts), CPU)
    device.workspace = LinearWorkspace(CPU, max_out=256, max_split=4)
    ours = LinearKernels("fp8", device)
    monkeypatch.setitem(sys.modules, "sgl_kernel", SimpleNamespace(fp8_scaled_mm=scaled_mm))
    torch.manual_seed(0)
    x, residual = torch.randn(70, 128), torch.randn(70, 128)
    up, down = (Fp8Weight(*quantize_outputs(torch.randn(shape) / 11)) for shape in ((192, 128), (128, 96)))
    for kernel in ("sgl_scaled_mm", "scaled_mm", "fp8_many_rows", "fp8_few_rows"):
        gated = ours.multiply(kernel, x[:40], up, GemmCall(activation="silu", feeds=down))
        assert isinstance(gated, QuantizedRows) == (kernel != "fp8_few_rows")
        apart = ours.multiply(kernel, x[:40], up, GemmCall(activation="silu"))
        for other in ("sgl_scaled_mm", "scaled_mm", "fp8_many_rows", "fp8_few_rows"):
            found, expected = (
                ours.multiply(other, one, down, GemmCall(residual=residual[:40].clone())) for one in (gated, apart)
            )
            assert relative(found, expected) < 1e-6, (kernel, other)


class FakeScaledGemm:
    def __init__(self, rows: int, size_out: int, size_in: int, dtype: torch.dtype, in_blocks: bool) -> None:
        self.rows, self.size_out, self.block = rows, size_out, (128, 128) if in_blocks else None

    def add_to(self, out: torch.Tensor, weight: Any, x: Any) -> None:
        (numbers, scale), (rows, x_scale) = weight, x
        if len(out) == 96:
            raise RuntimeError("cuBLASLt has no algorithm")
        assert (len(rows), len(out), len(numbers)) == (self.rows, self.rows, self.size_out)
        wide = x_scale[:, None] if self.block is None else x_scale.repeat_interleave(128, 1)
        out += (rows.float() * wide) @ dequantize(numbers, scale, self.block).t()


@pytest.mark.parametrize("kind", ["residual", "blocks residual", "bias residual"])
@pytest.mark.parametrize("rows", [64, 70, 96])
def test_by_cublaslt_with_the_residual_inside(rows: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were padded for blocks, and those without an algorithm, are torch's."""
    facts = replace(DeviceFacts.named("h200"), dependent_launch=False)
    device = GemmDevice(TritonOps(CPU, facts=facts), CPU)
    device.tuned = SimpleNamespace(library=lambda: SimpleNamespace(scaled_gemm=FakeScaledGemm))
    monkeypatch.setattr(fp8_cublaslt, "ALIGNMENT", 1)
    shape = many_rows.ManyRowsShape(32, 64, 64, 4, 2)
    monkeypatch.setattr(fp8_cublaslt, "torch_scaled_mm", lambda *given: many_rows.linear(*given, shape=shape))
    torch.manual_seed(rows)
    block = (128, 128) if "blocks" in kind else None
    weight_32 = torch.randn(256, 512) / 20
    weight = Fp8Weight(*(quantize_outputs(weight_32) if block is None else in_blocks(weight_32, block)), None, block)
    bias = torch.randn(256) if "bias" in kind else None
    x, call = torch.randn(rows, 512), GemmCall(residual=torch.randn(rows, 256), bias=bias)
    expected = LinearKernels("fp8", GemmDevice(TorchOps())).linear(
        x, weight, call._replace(residual=call.residual.clone())
    )
    assert relative(fp8_cublaslt.run(device, x, weight, call), expected) < 1e-5


@pytest.mark.parametrize(
    ("tile_pairs", "kind"),
    [
        (16, "channels"),
        (16, "blocks"),
        (64, "static"),
        (64, "blocks"),
        (64, "blocks of tiles"),
        (16, "int8"),
        (64, "int8"),
    ],
)
def test_experts(tile_pairs: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights as the left operand of the matrix units, and with pairs."""
    torch.manual_seed(1)
    experts, k, hidden, size, tokens = 4, 2, 96, 40, 7
    gate_up, down = torch.randn(experts, 2 * size, hidden) / 10, torch.randn(experts, hidden, size) / 6
    tile_out, tile_in = (8, 16) if "tiles" in kind else (32, 32)
    blocks = ((8, 32), (16, 16)) if "blocks" in kind else (None, None)
    x_scales = torch.tensor([0.01, 0.02]) if kind == "static" else (None, None)
    x, residual = torch.randn(tokens, hidden), torch.randn(tokens, hidden)
    call = MixtureCall(TORCH.route(torch.randn(tokens, experts), k, True), residual=residual)
    cut = GemmShape(tile_out, tile_in, 4, 2)
    monkeypatch.setattr(moe_fp8, "fp8_shape", lambda *args: MixtureShape(tile_pairs, cut, cut))
    if kind == "int8":
        weights = [int8.Int8Weight(*quantize_int8(weight)) for weight in (gate_up, down)]
        given = x, experts_of(*weights), call
        assert relative(moe_fp8.mixture_int8(interpreted(), *given), by_torch(*given, "int8")) < 1e-5
        return
    weights = [
        Fp8Weight(*(quantize_outputs(weight) if block is None else in_blocks(weight, block)), x_scale, block)
        for weight, block, x_scale in zip((gate_up, down), blocks, x_scales, strict=True)
    ]
    given = x, experts_of(*weights), call
    assert relative(moe_fp8.mixture(interpreted(), *given), by_torch(*given, "fp8")) < 2e-3


@pytest.mark.parametrize("kind", ["channels", "blocks"])
@pytest.mark.parametrize("num_tokens", [1, 3, 11])
def test_experts_of_a_few_tokens(num_tokens: int, kind: str) -> None:
    """Activations keep their format; also with the router beside o_proj, for one token."""
    torch.manual_seed(num_tokens)
    experts, k, hidden, size, size_in = 6, 2, 96, 80, 64
    shapes = (experts, 2 * size, hidden), (experts, hidden, size), (hidden, size_in)
    blocks = ((16, 32), (16, 16), (32, 16)) if kind == "blocks" else (None, None, None)
    weights = []
    for shape, block in zip(shapes, blocks, strict=True):
        weight = torch.randn(shape) / 8 * torch.rand(shape[-2], 1) * 3
        weights.append(
            Fp8Weight(*(quantize_outputs(weight) if block is None else in_blocks(weight, block)), None, block)
        )
    plain = [dequantize(one.numbers, one.scale, one.block) for one in weights]
    x, router = torch.randn(num_tokens, hidden), torch.randn(experts, hidden) * 0.3
    norm = {"norm_weight": torch.rand(hidden) + 0.5, "eps": 1e-6}
    call = MixtureCall(router=router, residual=torch.randn(num_tokens, hidden), **norm)
    mixture = (moe_one_token if num_tokens == 1 else moe_few_tokens).mixture
    found = mixture(interpreted(), x, experts_of(*weights[:2], k), call)
    assert relative(found, by_torch(x, experts_of(*plain[:2], k), call)) < 1e-5
    if num_tokens == 1:
        attended, residual = torch.randn(1, size_in), torch.randn(1, hidden)
        call = MixtureCall(residual=residual, early=EarlyRouter.of(router, norm["norm_weight"], weights[2]), **norm)
        found = early_router.mixture(interpreted(), attended, experts_of(*weights[:2], k), call)
        states = residual + attended @ plain[2].T
        call = MixtureCall(router=router, residual=states, **norm)
        assert relative(found, by_torch(states, experts_of(*plain[:2], k), call)) < 1e-5


@pytest.mark.parametrize(("num_tokens", "normed"), [(3, True), (3, False), (34, True)])
def test_experts_whose_router_plans_gemms_in_fp8(num_tokens: int, normed: bool) -> None:
    """Sizes are no whole tiles; of 34 tokens, an expert has more than one tile."""
    torch.manual_seed(3)
    experts, k, hidden, size = 4, 2, 160, 144
    weights = [
        Fp8Weight(*in_blocks(torch.randn(shape) / 8, block), None, block)
        for shape, block in (((experts, 2 * size, hidden), (16, 64)), ((experts, hidden, size), (32, 128)))
    ]
    x, router = torch.randn(num_tokens, hidden), torch.randn(experts, hidden) * 0.3
    call = MixtureCall(router=router, residual=torch.randn(num_tokens, hidden))
    if normed:
        call = call._replace(norm_weight=torch.rand(hidden) + 0.5, eps=1e-6)
    given = interpreted(), x, experts_of(*weights, k), call
    for shape in (
        few_quantized.few_shape(LARGEST),
        MixtureShape(SLOTS, GemmShape(32, 64, 4, 3), GemmShape(128, 32, 4, 3)),
    ):
        assert relative(few_quantized.in_tiles(*given, shape), moe_few_tokens.mixture(*given)) < 4e-2
    # In groups as large as a block of the weight, numbers are those of pairs sorted by expert.
    shape = MixtureShape(SLOTS, GemmShape(128, 64, 4, 3), GemmShape(64, 128, 4, 3))
    assert relative(few_quantized.in_tiles(*given, shape), moe_fp8.mixture(*given)) < 1e-4


@pytest.mark.parametrize("num_tokens", [1, 290])
def test_experts_by_sgl_kernel(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its grouped GEMM by torch: what goes to it, and what comes of it. An expert has no tokens."""
    torch.manual_seed(num_tokens)
    experts, k, hidden, size = 5, 2, 384, 128
    shapes = ((experts, 2 * size, hidden), (experts, hidden, size))
    weights = [Fp8Weight(*in_blocks(torch.randn(shape) / 8, (128, 128)), None, (128, 128)) for shape in shapes]

    def multiply(out, x, weight, x_scale, scale, x_stride, weight_stride, out_stride, sizes, offsets, workspace):  # type: ignore[no-untyped-def]
        assert {tuple(row[1:]) for row in sizes.tolist()} == {(out.shape[1], x.shape[1])}
        for strides, of in ((x_stride, x), (weight_stride, x), (out_stride, out)):
            assert strides.tolist() == [of.shape[1]] * experts
        wide = dequantize(weight.transpose(1, 2), scale.transpose(1, 2), (128, 128))
        for expert, (rows, first) in enumerate(zip(sizes[:, 0].tolist(), offsets.tolist(), strict=True)):
            part = slice(first, first + rows)
            out[part] = (x[part].float() * x_scale[part].repeat_interleave(128, 1)) @ wide[expert].T

    monkeypatch.setitem(sys.modules, "sgl_kernel", SimpleNamespace(es_fp8_blockwise_scaled_grouped_mm=multiply))
    picked = TORCH.route(torch.randn(num_tokens, experts).index_fill(1, torch.tensor([2]), -9.0), k, True)
    given = (
        torch.randn(num_tokens, hidden), experts_of(*weights),
        MixtureCall(picked, residual=torch.randn(num_tokens, hidden)),
    )  # fmt: skip
    assert relative(fp8_library.mixture(interpreted(), *given), by_torch(*given, "fp8")) < 2e-3


def quantize_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[experts, outputs, inputs], with a scale for each output."""
    numbers, scales = int8.quantize_tokens(weight.flatten(0, 1))
    return numbers.view(weight.shape), scales.view(weight.shape[:2])


COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from minisgl_backend.kernels.linear.fp8 import few_rows as linear
from minisgl_backend.kernels.linear.fp8 import many_rows
from minisgl_backend.kernels.linear.fp8 import quantize
from minisgl_backend.kernels.linear.fp8 import one_row
from minisgl_backend.kernels.moe import few_quantized
from minisgl_backend.kernels.moe import fp8 as moe

TYPES = dict(weight_ptr="*fp8e4nv", scale_ptr="*fp32", x_scale_ptr="*fp32", partial_ptr="*fp32",
             pair_weight_ptr="*fp32", counters_ptr="*i32", order_ptr="*i32", expert_ptr="*i32", first_ptr="*i32",
             end_ptr="*i32", tiles_ptr="*i64", out_scale_ptr="*fp32", rows="i32", x_rows="i32", out_rows="i32",
             x_stride="i32", eps="fp32",
             given_ptr="*fp32")

def compiled(kernel, num_warps, num_stages, x="*bf16", out="*bf16", weight="*fp8e4nv", **constants):
    types = TYPES | {"x_ptr": x, "out_ptr": out, "weight_ptr": weight}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "*bf16") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names)
               if signature[name].startswith("*") or "stride" in name}
    source = ASTSource(fn=kernel, signature=signature, attrs=aligned,
                       constexprs={(names.index(name),): value for name, value in constants.items()})
    options = {"num_warps": num_warps, "num_stages": num_stages}
    found = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert found.metadata.shared <= 227 << 10, found.metadata.shared

for pdl in (True,):
    compiled(quantize._quantize_kernel, 8, 3, out="*fp8e4nv", SIZE=5120, WIDTH=8192, ACTIVATION=None, NORM=True,
             GIVEN=False, LARGEST=448.0, LEAST=1e-10, PDL=pdl)
    compiled(quantize._quantize_kernel, 8, 3, out="*fp8e4nv", SIZE=17408, WIDTH=2048, ACTIVATION="silu", NORM=False,
             GIVEN=False, LARGEST=448.0, LEAST=1e-10, PDL=pdl)
    compiled(quantize._quantize_groups_kernel, 8, 3, out="*fp8e4nv", SIZE=5120, WIDTH=8192, GROUP=128,
             ACTIVATION=None, NORM=True, LARGEST=448.0, LEAST=1e-10, PDL=pdl)
    for gated, rows, block in ((False, 1, 0), (True, 64, 0), (True, 64, 128)):
        shape = linear.linear_shape(rows, 5120, 5120, gated, block_in=block or None)
        compiled(linear._linear_kernel, 4, shape.num_stages, x="*fp8e4nv", SIZE_OUT=5120, SIZE_IN=5120,
                 PART=5120 // shape.split, SPLIT=shape.split, ROWS=max(16, rows), TILE_OUT=shape.tile_out,
                 TILE_IN=shape.tile_in, BLOCK_OUT=block, BLOCK_IN=block, BIAS=False, RESIDUAL=not gated, GATED=gated,
                 ACTIVATION="silu" if gated else None, IMPRECISE=128, PDL=pdl)
for gated, size_in, block in ((False, 17408, 0), (True, 5120, 0), (False, 2048, 128)):
    shape = one_row.row_shape(size_in, gated, block)
    compiled(one_row._one_row_kernel, shape.num_warps, 3, SIZE_OUT=5120, SIZE_IN=size_in, TILE_OUT=shape.tile_out,
             TILE_IN=shape.tile_in, SCALED=True, BLOCK_OUT=block, BLOCK_IN=block, NORM=gated, BIAS=False,
             RESIDUAL=not gated, GATED=gated, ACTIVATION="silu" if gated else None, PDL=True)
for block in (128,):
    shape = many_rows.many_rows_shape(4096, block or None)
    compiled(many_rows._many_rows_kernel, shape.num_warps, shape.num_stages, x="*fp8e4nv", SIZE_OUT=5120, SIZE_IN=5120,
             TILE_ROWS=shape.tile_rows, TILE_OUT=shape.tile_out, TILE_IN=shape.tile_in, TOGETHER=8, BLOCK_OUT=block,
             BLOCK_IN=block, BIAS=False, RESIDUAL=True)
for pairs, block, number in ((8, 128, "*fp8e4nv"), (100, 128, "*fp8e4nv"), (8, 0, "*i8")):
    shape = moe.fp8_shape(128 * pairs, 128, 227 << 10)
    for gated, (tile_out, tile_in, num_warps, num_stages) in ((True, shape.gate_up), (False, shape.down)):
        kernel = moe._few_pairs_kernel if shape.tile_pairs < moe.MANY_PAIRS else moe._many_pairs_kernel
        compiled(kernel, num_warps, num_stages, x=number, weight=number, K=8, SIZE_OUT=768, SIZE_IN=2048,
                 TILE_PAIRS=shape.tile_pairs, TILE_OUT=tile_out, TILE_IN=tile_in, BLOCK_OUT=block, BLOCK_IN=block,
                 GATED=gated, ACTIVATION="silu" if gated else None, PDL=False)
shape = few_quantized.few_shape(227 << 10)
for cut, out in ((shape.gate_up, "*fp8e4nv"), (shape.down, "*bf16")):
    gated = out != "*bf16"
    compiled(few_quantized._few_quantized_kernel, cut.num_warps, cut.num_stages, x="*fp8e4nv", out=out, K=8,
             SIZE_OUT=768 if gated else 2048, SIZE_IN=2048 if gated else 768, SLOTS=16, PACKED=True,
             TILE_OUT=cut.tile_out, TILE_IN=cut.tile_in, GROUP=128, BLOCK_OUT=128, BLOCK_IN=128, GATED=gated,
             ACTIVATION="silu" if gated else None, LARGEST=448.0, LEAST=1e-10, PDL=True)
print("compiled")
"""


def test_they_compile_for_hopper(tmp_path: Path) -> None:
    """In the shapes of Qwen3-14B and Qwen3-30B-A3B, within the shared memory of a program."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "compiled", done.stderr[-2000:]
