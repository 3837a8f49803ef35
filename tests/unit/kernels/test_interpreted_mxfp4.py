"""Kernels of experts in MXFP4 against their torch reference, in Triton's interpreter; tests/gpu runs them compiled.

And compiled for Hopper, where the interpreter does not see what the compiler refuses.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backend.kernels.moe.call import Experts, MixtureCall
from minisgl_backend.kernels.moe.mxfp4.weight import Mxfp4Weight, dequantize
from tests.mixtures import TORCH, by_torch, experts_of, interpreted

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels compiled", allow_module_level=True)
pytest.importorskip("triton", reason="pip install triton; tests/conftest.py turns its interpreter on")

from minisgl_backend.kernels.moe.gemms import GemmShape, MixtureShape
from minisgl_backend.kernels.moe.mxfp4 import grouped, one_token

EXPERTS, HIDDEN, SIZE, K = 5, 160, 96, 2


def weight(rows: int, columns: int) -> Mxfp4Weight:
    blocks = torch.randint(0, 256, (EXPERTS, rows, columns // 32, 16), dtype=torch.uint8)
    return Mxfp4Weight(blocks, torch.randint(120, 126, (EXPERTS, rows, columns // 32), dtype=torch.uint8))


@pytest.fixture
def layer() -> tuple[Experts, dict[str, Any]]:
    torch.manual_seed(0)
    biases = {"gate_up_bias": torch.randn(EXPERTS, 2 * SIZE), "down_bias": torch.randn(EXPERTS, HIDDEN)}
    more = {"norm_weight": torch.rand(HIDDEN) + 0.5, "eps": 1e-6, "router_bias": torch.randn(EXPERTS)}
    weights = weight(2 * SIZE, HIDDEN), weight(HIDDEN, SIZE)
    return experts_of(*weights, K, activation="swiglu_oai", **biases), more


def test_the_reference_is_the_plain_one_with_these_weights(layer: tuple[Experts, dict[str, Any]]) -> None:
    """Whose rows of gate and up do not take turns."""
    experts, more = layer
    x, inner = torch.randn(7, HIDDEN), experts.gate_up_bias
    call = MixtureCall(router=torch.randn(EXPERTS, HIDDEN) * 0.3, residual=x, **more)
    gate_up, down = (dequantize(*one, torch.float32) for one in (experts.gate_up, experts.down))
    plain = replace(
        experts,
        gate_up=torch.cat([gate_up[:, ::2], gate_up[:, 1::2]], 1),
        down=down,
        gate_up_bias=torch.cat([inner[:, ::2], inner[:, 1::2]], 1),
    )
    found = by_torch(x, experts, call, "mxfp4")
    torch.testing.assert_close(found, by_torch(x, plain, call), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("num_tokens", "complete"), [(1, True), (3, False), (11, True), (40, False), (40, True)])
def test_mixture(
    num_tokens: int, complete: bool, layer: tuple[Experts, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one token, of a few by both plans, and grouped. `complete`: with norm, biases and residual."""
    experts, more = layer
    if not complete:
        experts, more = replace(experts, gate_up_bias=None, down_bias=None, activation="silu"), {}
    x, residual = torch.randn(num_tokens, HIDDEN), torch.randn(num_tokens, HIDDEN) if complete else None
    call = MixtureCall(router=torch.randn(EXPERTS, HIDDEN) * 0.3, residual=residual, **more)
    expected = by_torch(x, experts, call, "mxfp4")
    packed = replace(experts, gate_up=grouped.pack(*experts.gate_up), down=grouped.pack(*experts.down))
    if num_tokens == 1:
        cut = one_token.OneTokenShape(64, 4, 1)  # in two steps
        found = one_token.in_tiles(x, packed, call, cut, cut)
    elif num_tokens < 40:
        found = grouped.mixture_of_few(interpreted(), x, packed, call)
    else:
        if complete:  # in tiles of many pairs
            cut = GemmShape(32, 128, 4, 2)
            monkeypatch.setattr(grouped, "grouped_shape", lambda *args: MixtureShape(64, cut, cut))
        normed, picked = TORCH.picked(x, packed, call)
        found = grouped.mixture(interpreted(), normed, packed, MixtureCall(picked, residual=residual))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)


COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from minisgl_backend.kernels.moe.mxfp4 import gemm, grouped, one_token as one

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
cut = grouped.few_shape(8).gate_up
found = compiled(gemm.few_kernel, cut.num_warps, cut.num_stages, SIZE_OUT=5760, PAIRS=16, TILE_OUT=cut.tile_out,
                 TILE_IN=cut.tile_in, GATED=True, ACTIVATION="swiglu_oai", PACKED=True, **common)
# Weights come from memory to the registers of the matrix units, and both they
# and their scales are fetched ahead.
loop = found.asm["ttgir"].split("scf.for")[1].split("scf.yield")[0]
assert "wgmma" in found.asm["ptx"] and "tt.load" not in loop, loop
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
