"""A GEMM runs what a row of the table names, by few files between a layer and its kernel."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

import minisgl_backend
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.choose import LinearChooser
from minisgl_backend.kernels.linear.kernels import GemmDevice, PlainKernels
from minisgl_backend.kernels.select import DeviceKernels
from minisgl_backend.kernels.torch_ops import TorchOps
from minisgl_backend.layers.linear import RowParallelLinear
from minisgl_backend.layers.weights import LayerContext
from minisgl_backend.tensor_parallel import TensorParallel
from minisgl_backend.weights.int4 import Int4Factory
from minisgl_backend.weights.schemes.int4 import Int4Scheme
from tests.toys import linear_kernel

CPU = torch.device("cpu")


def test_a_kernel_is_a_file_and_a_row() -> None:
    kernels = PlainKernels(GemmDevice(TorchOps(), chooser=partial(LinearChooser, table=linear_kernel.WITH_ROW)))
    x, weight, bias = torch.randn(3, 64), torch.randn(8, 64), torch.randn(8)
    assert torch.equal(kernels.linear(x[:1], weight), (x[:1].double() @ weight.double().t()).float())
    assert kernels.chooser.contenders(kernels_key := linear_kernel.LinearKey(1, 8, 64, x.dtype)) == ()
    assert kernels.chooser.candidate(kernels_key) is linear_kernel.ROW
    for rows, call in ((3, GemmCall()), (1, GemmCall(bias=bias))):
        expected = torch.nn.functional.linear(x[:rows], weight, call.bias)
        torch.testing.assert_close(kernels.linear(x[:rows], weight, call), expected)


def files_entered(call: Callable[[], object]) -> set[str]:
    """Of the package."""
    root, found = str(Path(minisgl_backend.__file__).parent), set()

    def entered(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            found.add(frame.f_code.co_filename.removeprefix(root))

    sys.setprofile(entered)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def test_files_between_a_layer_and_its_4_bit_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from minisgl_backend.kernels.linear.int4 import few_rows
    from minisgl_backend.kernels.triton_ops import TritonOps

    launches: list[Any] = []
    monkeypatch.setattr(few_rows, "_linear_kernel", {(1, 1, 1): lambda *args, **constants: launches.append(constants)})
    kernels = DeviceKernels(GemmDevice(TritonOps(CPU, facts=DeviceFacts.named("h200")), CPU))
    scheme = Int4Scheme(layout="awq", group=128, symmetric=False)
    methods: Any = SimpleNamespace(linear=Int4Factory(kernels, torch.bfloat16, CPU, scheme).linear)
    context = LayerContext(
        device=CPU, dtype=torch.bfloat16, ops=kernels.ops, tp=TensorParallel.single(), methods=methods
    )
    layer = RowParallelLinear(256, 64, "o_proj", False, context)
    x, residual = torch.randn(8, 256).bfloat16(), torch.randn(8, 64).bfloat16()
    layer.part(x, residual)  # what is chosen once
    files = files_entered(lambda: layer.part(x, residual))
    assert len(launches) == 2
    kernel = "/kernels/linear/int4/few_rows.py"
    assert files == {"/layers/linear.py", "/kernels/linear/kernels.py", kernel}
