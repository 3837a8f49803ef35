"""Kernels of 4-bit weights against their torch reference, in Triton's interpreter; tests/gpu runs them compiled.

And compiled for Hopper, where the interpreter does not see what the compiler refuses, nor the assembly.
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
from minisgl_backend.kernels.linear.int4.reference import dequantize, pack, unpack
from minisgl_backend.kernels.linear.kernels import GemmDevice, LinearKernels
from minisgl_backend.kernels.moe.call import MixtureCall
from minisgl_backend.kernels.torch_ops import TorchOps
from tests.mixtures import TORCH, by_torch, experts_of, interpreted
from tests.unit.kernels.int4_weights import random_weight, relative

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels compiled", allow_module_level=True)
pytest.importorskip("triton", reason="pip install triton; tests/conftest.py turns its interpreter on")

from minisgl_backend.kernels.linear.int4 import few_rows as linear_int4
from minisgl_backend.kernels.linear.int4 import many_rows
from minisgl_backend.kernels.linear.int4.dequantized import dequantize_rows
from minisgl_backend.kernels.linear.workspace import LinearWorkspace
from minisgl_backend.kernels.moe import int4 as moe_int4
from minisgl_backend.kernels.moe.gemms import MixtureShape
from minisgl_backend.kernels.moe.int4 import Int4Cut

CPU = torch.device("cpu")


@pytest.mark.parametrize("plane", [16, 32])
def test_the_layout(plane: int) -> None:
    numbers = torch.randint(0, 16, (2, 5, 500), dtype=torch.uint8)
    words = pack(numbers, plane)
    assert torch.equal(unpack(words, 500, plane), numbers)
    for i in (17, 300, 499):
        block, inside = divmod(i, 8 * plane)
        number, pair = inside // plane, inside % plane // 2
        word = int(words[1, 3, block * plane + 2 * pair + number // 4])
        assert word >> (4 * (number % 4) + 16 * (i % 2)) & 15 == numbers[1, 3, i]


# Inputs, group, zero points, rows, how it is cut, what follows.
LINEAR: dict[str, tuple[int, int, bool, int, dict[str, Any], str]] = {
    "early, padded": (600, 32, True, 3, {"early": 1}, "gated"),
    "x first, one group": (600, -1, False, 5, {"x_first": True}, "bias"),
    "scaled, two row tiles": (512, 128, True, 20, {"scaled": True, "step": 16}, "residual"),
    "all at once": (512, 64, False, 1, {"x_first": True, "scaled": True, "early": 2}, "gated"),
    "small groups": (128, 16, True, 1, {}, ""),
}


@pytest.mark.parametrize("case", LINEAR.values(), ids=LINEAR)
def test_linear(case: tuple[int, int, bool, int, dict[str, Any], str]) -> None:
    """With the inputs split over programs where one takes all rows."""
    size_in, group, zeros, rows, cut, epilogue = case
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, size_in), random_weight(50, size_in, group=group, zeros=zeros)
    options: dict[str, Any] = {"activation": "silu" if epilogue == "gated" else None}
    if epilogue == "bias":
        options["bias"] = torch.randn(50)
    if epilogue == "residual":
        options["residual"] = torch.randn(rows, 50)
    workspace = LinearWorkspace(CPU, max_out=256, max_split=4)
    shape = linear_int4.Int4Shape(32, 16, 2, 4, 2, **cut)
    found = linear_int4.linear(x, weight, workspace, GemmCall(**options), shape=shape)
    assert relative(found, LinearKernels("int4", GemmDevice(TorchOps())).linear(x, weight, GemmCall(**options))) < 1e-5
    assert int(workspace.counters.abs().sum()) == 0


@pytest.mark.parametrize("case", list(LINEAR.values())[:4], ids=list(LINEAR)[:4])
@pytest.mark.parametrize(("programs", "count"), [(3, 2), (7, 4)])
def test_tiles_cut_between_programs(
    programs: int, count: int, case: tuple[int, int, bool, int, dict[str, Any], str]
) -> None:
    """Whole tiles, parts of one, and of several."""
    size_in, group, zeros, rows, _, epilogue = case
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, size_in), random_weight(100, size_in, group=group, zeros=zeros)
    call = GemmCall(
        bias=torch.randn(100) if epilogue == "bias" else None,
        residual=torch.randn(rows, 100) if epilogue == "residual" else None,
        activation="silu" if epilogue == "gated" else None,
    )
    workspace = LinearWorkspace(CPU, max_out=256, max_split=4)
    shape = many_rows.ManyShape(32, 16, 4, 2, count, least=1)
    found = many_rows.linear(x, weight, workspace, call, shape, programs)
    assert relative(found, LinearKernels("int4", GemmDevice(TorchOps())).linear(x, weight, call)) < 1e-5
    assert int(workspace.counters.abs().sum()) == 0


def test_rows_are_dequantized() -> None:
    weight = random_weight(70, 300, group=32, zeros=True)
    found = dequantize_rows(weight, slice(32, 70), torch.empty(38, 300))
    assert torch.equal(found, dequantize(weight, torch.float32)[32:])


@pytest.mark.parametrize(("tokens", "group", "zeros"), [(1, 32, False), (9, 64, True)])
def test_experts(tokens: int, group: int, zeros: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ids, sorted; and by a router, with plans of both kinds."""
    torch.manual_seed(tokens)
    num_experts, k, hidden, size = 3, 2, 128, 24
    gate_up = random_weight(num_experts, 2 * size, hidden, group=group, zeros=zeros)
    down = random_weight(num_experts, hidden, size, group=-1 if group < 0 else 16, zeros=zeros)
    x, residual, router, norm = (
        torch.randn(tokens, hidden),
        torch.randn(tokens, hidden),
        torch.randn(num_experts, hidden),
        torch.rand(hidden) + 0.5,
    )
    experts = experts_of(gate_up, down, k)
    call = MixtureCall(router=router, norm_weight=norm, eps=1e-6, residual=residual)
    normed, picked = TORCH.picked(x, experts, call)
    sorted_call = MixtureCall(picked, residual=residual)
    expected, kernels = by_torch(normed, experts, sorted_call, "int4"), interpreted(256, 4)
    shape = MixtureShape(16, Int4Cut(16, 2, 2), Int4Cut(16, 2, 2))
    monkeypatch.setattr(moe_int4, "moe_shape", lambda *args: shape)
    assert relative(moe_int4.mixture(kernels, normed, experts, sorted_call), expected) < 1e-5
    other = MixtureShape(16, Int4Cut(16, 4, 2, x_first=True), Int4Cut(32, 4, 2, scaled=True))
    for name in ("ONE", "FEW"):
        monkeypatch.setattr(moe_int4, name, other)
    assert relative(moe_int4.mixture_of_few(kernels, x, experts, call), expected) < 1e-5


COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from minisgl_backend.kernels.linear.int4 import few_rows as linear
from minisgl_backend.kernels.linear.int4 import many_rows as many
from minisgl_backend.kernels.moe import int4 as moe

TYPES = dict(words_ptr="*i32", zeros_ptr="*u8", partial_ptr="*fp32", pair_weights_ptr="*fp32", counters_ptr="*i32",
             order_ptr="*i32", expert_ptr="*i32", first_ptr="*i32", end_ptr="*i32", rows="i32", x_stride="i32")

def compiled(kernel, num_warps, num_stages, dtype="bf16", **constants):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else TYPES.get(name, "*" + dtype) for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names)
               if signature[name].startswith("*") or "stride" in name}
    source = ASTSource(fn=kernel, signature=signature, attrs=aligned,
                       constexprs={(names.index(name),): value for name, value in constants.items()})
    options = {"num_warps": num_warps, "num_stages": num_stages}
    found = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert found.metadata.shared <= 227 << 10, found.metadata.shared
    return found

common = dict(WORDS=640, GROUP=128, PLANE=32, STEP=32, TOGETHER=4, ZEROS=True, MIDDLE=8, ASM=True)
shape = linear.int4_shape(1, 17408, 5120, True)
found = compiled(linear._linear_kernel, shape.num_warps, shape.num_stages, SIZE_OUT=17408, SIZE_IN=5120, PART=640,
                 SPLIT=1, ROWS=shape.rows, TILE_OUT=shape.tile_out, X_FIRST=shape.x_first, SCALED=shape.scaled,
                 EARLY=shape.early, BIAS=False, RESIDUAL=False, GATED=True, ACTIVATION="silu", PDL=True, **common)
assert found.asm["ptx"].count("lop3.b32") >= 8
TYPES |= dict(low_ptr="*i32")
for fields in (0, 5):
    TYPES |= dict(scales_ptr="*i32") if fields else {}
    shape = many.many_shape(64, 34816 * 5120)
    _, constants = many._launch(shape, 64, 17408, 5120, 32 if fields else 128, 32, 132, True, False)
    found = compiled(many._many_kernel, WORDS=640, FIELDS=fields, FIELD_STRIDE=34816, EIGHT=False, ZEROS=not fields,
                     BIAS=False, RESIDUAL=False, ACTIVATION="silu", ASM=True, **constants)
    assert found.asm["ptx"].count("wgmma.mma_async") >= 32
del TYPES["scales_ptr"]
cut = moe.moe_shape(128 * 64, 128).down
compiled(moe._experts_kernel, cut.num_warps, cut.num_stages, "fp16", K=8, PLAN="sorted", SIZE_OUT=5120, SIZE_IN=5120,
         GROUPS=40, ROWS=64, TILE_OUT=cut.tile_out, X_FIRST=cut.x_first, SCALED=cut.scaled, GATED=False,
         ACTIVATION=None, PDL=True, **common)
print("compiled")
"""


def test_they_compile_for_hopper(tmp_path: Path) -> None:
    """In shapes of Qwen3-14B, within the shared memory of a program."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "compiled", done.stderr[-2000:]
