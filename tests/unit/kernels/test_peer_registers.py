"""That all programs of a sum over ranks fit on the GPU at the same time, as the compiler makes them: without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", minversion="3.3", reason="how a kernel is compiled for another machine has changed")

SHAPES = [(2, 5120), (2, 8192), (2, 16384), (4, 4096), (4, 5120), (4, 8192), (8, 8192)]  # ranks and numbers
COMPILES = """
import json, os, re, subprocess, sys, tempfile
from pathlib import Path
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from minisgl_backend.kernels.collectives import all_reduce_norm as peer_reduce
from minisgl_backend.kernels.collectives.two_shot_norm import _two_shot_kernel

types = dict.fromkeys(["partial_ptr", "residual_ptr", "weight_ptr", "out_ptr"], "*bf16")
types |= {"addresses_ptr": "*i64", "turns_ptr": "*i32", "stop": "i64", "rows": "i32", "eps": "fp32", "ahead": "i32",
          "lag": "i32"}
found = []
for size, hidden, ahead in json.loads(sys.argv[1]):
    kernel = peer_reduce._reduce_norm_kernel if ahead is not None else _two_shot_kernel
    constants = dict(RANK=0, SIZE=size, HIDDEN=hidden, PADDED=triton.next_power_of_2(hidden), WORD=tl.int16,
                     EMPTY=-(1 << 15), PDL=False)
    constants |= (dict(MAX_ROWS=300, SEND=True, RECEIVE=True, AHEAD=ahead) if ahead is not None else
                  dict(LINES=512, TURN=132, SENDS=True, SUMS=True, RECEIVES=True))
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    options = dict(peer_reduce.launch_options(size, hidden))
    binary = compile(ASTSource(fn=kernel, signature=signature, constexprs=places), target=GPUTarget("cuda", 90, 32),
                     options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        said = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers = int(re.search(r"REG:(\\d+)", said)[1])
    found.append([-(-registers // 8) * 8 * 32 * options["num_warps"], binary.metadata.shared])
print(json.dumps(found))
"""


def test_all_programs_run_at_the_same_time() -> None:
    """Else one that waits could keep away another whose part somebody waits for."""
    from minisgl_backend.kernels.collectives.all_reduce_norm import REGISTERS, programs_each

    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    kernels = [(size, hidden, ahead) for size, hidden in SHAPES for ahead in (0, 1, None)]  # None: in two shots
    command = [sys.executable, "-W", "ignore", "-c", COMPILES, json.dumps(kernels)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    for kernel, (registers, shared) in zip(kernels, json.loads(done.stdout), strict=True):
        assert programs_each(*kernel[:2]) * registers <= REGISTERS, kernel
        assert programs_each(*kernel[:2]) * shared <= 48 << 10, kernel
    assert programs_each(2, 5120) == 2, "where there is room for two"
