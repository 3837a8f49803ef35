"""`PlainKernels` on a GPU: the Triton language where it beats a chain of library calls, cuBLAS elsewhere.

linear/choose.py says which kernel a GEMM takes. cuBLAS algorithms are measured at start, for the row counts of decode
steps and for some of prompts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from minisgl_backend.kernels import elementwise as fused
from minisgl_backend.kernels.candidate import PLAIN
from minisgl_backend.kernels.linear import small_rows
from minisgl_backend.kernels.linear.call import BARE, GemmCall
from minisgl_backend.kernels.linear.choose import LinearKey, linear_chooser
from minisgl_backend.kernels.linear.measured import KernelTuner
from minisgl_backend.kernels.linear.plain.reference import TorchPlainKernels
from minisgl_backend.kernels.linear.tiling import long_shape
from minisgl_backend.kernels.linear.tuned import TunedLinear, prompt_rows
from minisgl_backend.kernels.triton_ops import TritonOps


class TritonPlainKernels(TorchPlainKernels):
    """See `PlainKernels`. One object per device: it owns the workspace of split-K GEMMs."""

    ops: TritonOps
    kernel_tuner: KernelTuner

    def __init__(self, ops: TritonOps, device: torch.device) -> None:
        super().__init__(ops)
        self._linear_kernel = linear_chooser(PLAIN, ops.facts).kernel
        self.workspace = small_rows.LinearWorkspace(device)
        choices = _cache_folder() / "minisgl" / "gemms.json"
        self._tuned = TunedLinear(device, choices)
        self.kernel_tuner = KernelTuner(self._tuned.stream, ops.facts, choices)

    def prepare_linear(self, weights: Sequence[torch.Tensor], rows: Sequence[int], longest: int = 0) -> None:
        self._tuned.tune(weights, [*rows, *prompt_rows(longest)])

    def linear(self, x: torch.Tensor, weight: torch.Tensor, call: GemmCall = BARE) -> torch.Tensor:
        size_out, size_in = weight.shape
        norm_weight, eps, bias, residual, activation = call
        kernel = self._linear_kernel(LinearKey.of(x, size_out, call))
        if kernel == "small_rows":
            return small_rows.linear(x, weight, self.workspace, call, pdl=self.ops.pdl(x))
        if kernel == "long_rows":
            shape = long_shape(size_out, size_in, self.ops.facts.multiprocessors)
            return small_rows.linear(x, weight, self.workspace, shape=shape, pdl=self.ops.pdl(x))
        if norm_weight is not None:
            x = self.ops.rms_norm(x, norm_weight, eps)
        if kernel == "cublaslt" and (out := self._tuned.linear(x, weight, residual)) is not None:
            return out if activation is None else fused.activate_mul(out, activation, self.ops.pdl(x))
        if residual is not None:
            # In place: otherwise torch would copy the residual first, with one more kernel.
            out = residual.addmm_(x, weight.t())
            return out if bias is None else out.add_(bias)
        out = F.linear(x, weight, bias)
        return out if activation is None else fused.activate_mul(out, activation, self.ops.pdl(x))

    def linear_into(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        (rows, size_in), size_out = x.shape, weight.shape[0]
        kernel = self._linear_kernel(
            LinearKey(rows, size_out, size_in, x.dtype, unit_stride=x.stride(1) == 1, into=True)
        )
        if kernel == "small_rows":
            if rows == 1:
                small_rows.linear(x, weight, self.workspace, pdl=self.ops.pdl(x), out=out)
            else:
                out.copy_(self.linear(x, weight))  # these kernels write contiguous rows
        elif kernel != "cublaslt" or not self._tuned.linear_into(x, weight, out):
            torch.mm(x, weight.t(), out=out)


def _cache_folder() -> Path:
    """Folder of Triton's compiled kernels: one variable moves all caches, one deletion empties them."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or os.path.expanduser("~/.triton/cache"))
