"""Kernels of experts in MXFP4 against their torch reference, in Triton's interpreter; tests/gpu runs them compiled.

And compiled for Hopper, where the interpreter does not see what the compiler refuses.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.kernels import GemmDevice, PlainKernels
from minisgl_backend.kernels.moe.mxfp4_torch import Mxfp4Kernels, Weight, dequantize
from minisgl_backend.kernels.moe.reference import TorchMixtureKernels
from minisgl_backend.kernels.torch_ops import TorchOps

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels compiled", allow_module_level=True)
pytest.importorskip("triton", reason="pip install triton; tests/conftest.py turns its interpreter on")

from minisgl_backend.kernels.linear.workspace import LinearWorkspace
from minisgl_backend.kernels.moe import mxfp4, mxfp4_one_token

EXPERTS, HIDDEN, SIZE, K = 5, 160, 96, 2
PLAIN = TorchMixtureKernels(PlainKernels(GemmDevice(TorchOps())))


def weight(rows: int, columns: int) -> Weight:
    blocks = torch.randint(0, 256, (EXPERTS, rows, columns // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(120, 126, (EXPERTS, rows, columns // 32), dtype=torch.uint8)


@pytest.fixture
def layer() -> tuple[Weight, Weight, dict[str, Any]]:
    torch.manual_seed(0)
    biases = (torch.randn(EXPERTS, 2 * SIZE), torch.randn(EXPERTS, HIDDEN))
    more = {"norm_weight": torch.rand(HIDDEN) + 0.5, "eps": 1e-6, "router_bias": torch.randn(EXPERTS)}
    return weight(2 * SIZE, HIDDEN), weight(HIDDEN, SIZE), {**more, "biases": biases, "activation": "swiglu_oai"}


def test_the_reference_is_the_plain_one_with_these_weights(layer: tuple[Weight, Weight, dict[str, Any]]) -> None:
    """Whose rows of gate and up do not take turns."""
    gate_up, down, more = layer
    x, router = torch.randn(7, HIDDEN), torch.randn(EXPERTS, HIDDEN) * 0.3
    inner, outer = more["biases"]
    plain = torch.cat([(full := dequantize(*gate_up, torch.float32))[:, ::2], full[:, 1::2]], 1)
    biases = (torch.cat([inner[:, ::2], inner[:, 1::2]], 1), outer)
    expected = PLAIN.mixture(
        x, router, plain, dequantize(*down, torch.float32), K, True, **{**more, "biases": biases, "residual": x}
    )
    found = Mxfp4Kernels(PLAIN).mixture(x, router, gate_up, down, K, True, residual=x, **more)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("num_tokens", "complete"), [(1, True), (3, False), (11, True), (40, False), (40, True)])
def test_mixture(num_tokens: int, complete: bool, layer: tuple[Weight, Weight, dict[str, Any]]) -> None:
    """Of one token, of a few by both plans, and grouped. `complete`: with norm, biases and residual."""
    gate_up, down, more = layer
    x, router = torch.randn(num_tokens, HIDDEN), torch.randn(EXPERTS, HIDDEN) * 0.3
    more = {**more, "residual": torch.randn(num_tokens, HIDDEN)} if complete else {}
    expected = Mxfp4Kernels(PLAIN).mixture(x, router, gate_up, down, K, True, **more)
    packed = mxfp4.pack(*gate_up), mxfp4.pack(*down)
    if num_tokens == 1:
        cut = mxfp4_one_token.OneTokenShape(64, 4, 1)  # in two steps
        found = mxfp4_one_token.mixture(x, router, *packed, K, True, shapes=(cut, cut), **more)
    elif num_tokens < 40:
        workspace = LinearWorkspace(torch.device("cpu"), max_out=128, max_split=8)
        found = mxfp4.mixture_of_few(x, router, *packed, K, True, workspace, **more)
    else:
        normed = PLAIN.ops.rms_norm(x, more["norm_weight"], 1e-6) if complete else x
        ids, shares = PLAIN.route(PLAIN.plain.linear(normed, router, GemmCall(bias=more.get("router_bias"))), K, True)
        biases, activation = more.get("biases"), more.get("activation", "silu")
        cut = mxfp4.GemmShape(32, 128, 4, 2)
        shape = mxfp4.Mxfp4Shape(64, cut, cut) if complete else None  # with arranged inputs, as of many tokens
        found = mxfp4.moe(normed, ids, shares, *packed, more.get("residual"), activation, biases, shape=shape)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)


COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from minisgl_backend.kernels.moe import mxfp4, mxfp4_gemm, mxfp4_one_token as one

TYPES = dict(weight_ptr="*i16", scale_ptr="*u8", weight_scale_ptr="*u8", pair_weight_ptr="*fp32", order_ptr="*i32",
             expert_ptr="*i32", first_ptr="*i32", end_ptr="*i32", pair_weights_ptr="*fp32", tiles_ptr="*i64",
             x_stride="i32")

def compiled(kernel, num_warps, num_stages, words="*i16", **constants):
    names = kernel.arg_names
    types = TYPES | {"weight_ptr": words}
    signature = {name: "constexpr" if name in constants else types.get(name, "*bf16") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names)
               if signature[name].startswith("*") or "stride" in name}
    source = ASTSource(fn=kernel, signature=signature, attrs=aligned,
                       constexprs={(names.index(name),): value for name, value in constants.items()})
    found = compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=num_warps, num_stages=num_stages))
    assert found.metadata.shared <= 227 << 10, found.metadata.shared
    return found

common = dict(K=4, SIZE_IN=2880, SCALES=96, BIAS=True, MACHINE=True, PDL=True)
cut = mxfp4.few_shape(8).gate_up
found = compiled(mxfp4_gemm.few_kernel, cut.num_warps, cut.num_stages, SIZE_OUT=5760, PAIRS=16, TILE_OUT=cut.tile_out,
                 TILE_IN=cut.tile_in, GATED=True, ACTIVATION="swiglu_oai", PACKED=True, **common)
# Weights come from memory to the registers of the matrix units without an exchange between threads, and both they
# and their scales are fetched ahead.
loop = found.asm["ttgir"].split("scf.for")[1].split("scf.yield")[0]
assert "wgmma" in found.asm["ptx"] and "tt.load" not in loop and "convert_layout" not in loop, loop
ranked = dict(EXPERTS=32, EXPERTS_PADDED=32, SIZE_OUT=2880, SIZE_IN=2880, SCALES=96, BIAS=True, PDL=True)
cut = one.GATE_UP
compiled(one._gate_up_kernel, cut.num_warps, 3, "*i32", BLOCKS=cut.blocks, TILE_OUT=cut.tile_out, PROGRAMS=400,
         ACTIVATION="swiglu_oai", WARPS=cut.num_warps, **ranked)
print("compiled")
"""


def test_they_compile_for_hopper(tmp_path: Path) -> None:
    """In the shapes of gpt-oss."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "compiled", done.stderr[-3000:]
