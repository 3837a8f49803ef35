"""Weights in the blocks of a GGUF file on GPUs: the same numbers and scales, laid out anew while they are loaded.

A tensor in other blocks, or in such that tensor parallelism would cut, is in bfloat16.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from minisgl_backend.kernels.linear.gguf.packed import (
    PACKED,
    PackedBlocks,
    PackedWeight,
    dequantized,
    merged,
    packed,
)
from minisgl_backend.kernels.linear.kernels import LinearKernels
from minisgl_backend.weights.method import LinearMethod, LinearOutput, LinearSpec
from minisgl_backend.weights.parts import StoredRows, WeightPart
from minisgl_backend.weights.plain import linear_part

_NOWHERE = torch.device("meta")


class PackedLinearMethod(LinearMethod):
    _shared: PackedLinearMethod | None

    def __init__(
        self,
        spec: LinearSpec,
        kernels: LinearKernels[PackedWeight],
        dtype: torch.dtype,
        device: torch.device,
        shared: PackedLinearMethod | None = None,
    ) -> None:
        """shared: whose weight this one's rows are, which it owns and loads (tied embeddings)."""
        super().__init__(spec)
        self._dtype, self._device, self._kernels = dtype, device, kernels
        self.__dict__["_shared"] = shared  # a plain attribute, and no module of its own
        self._found: dict[int, PackedBlocks | torch.Tensor] = {}  # by index of the output, until all are there
        self.kept_bytes: Counter[str] = Counter()  # of its own numbers by their type in the file; "": plain
        self.make_bias(dtype, device)
        self.multiply_by(kernels, PackedWeight(spec.shape))

    def output_rows(self, spec: LinearSpec) -> PackedLinearMethod:
        """A weight whose rows are those of this one from `start` on."""
        return PackedLinearMethod(spec, self._kernels, self._dtype, self._device, shared=self)

    def parts_of(self, output: LinearOutput, rows: slice, index: int) -> list[WeightPart]:
        if self._shared is not None:
            return []
        target = torch.empty((output.local, self.spec.local_inputs), dtype=self._dtype, device=_NOWHERE)
        part = linear_part(self.spec, output, target)
        return [replace(part, keep=partial(self._keep, index), keep_types=PACKED)]

    def _keep(self, index: int, found: StoredRows | torch.Tensor) -> None:
        if isinstance(found, StoredRows):
            blocks = self._found[index] = packed(found.type, found.data.to(self._device))
            self.kept_bytes[found.type] += blocks.kind.nbytes
        else:
            numbers = self._found[index] = found.to(self._device, self._dtype)
            self.kept_bytes[""] += numbers.nbytes

    def process_weights_after_loading(self) -> None:
        """All outputs are there: those of one layout become one."""
        if self._shared is None:
            pieces = merged([self._found.pop(index) for index in range(len(self.spec.outputs))])
            self.stored = nn.ParameterList(
                nn.Parameter(tensor, requires_grad=False)
                for piece in pieces
                for tensor in ([piece] if isinstance(piece, torch.Tensor) else piece.tensors)
            )
        else:
            (output,), (piece,) = self.spec.outputs, self._shared.operand.pieces
            rows = slice(output.start, output.start + output.local)
            pieces = (piece[rows] if isinstance(piece, torch.Tensor) else piece.rows(rows),)
        self.operand.fill(pieces)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Some rows as numbers: ids int [count] -> [count, inputs]."""
        from minisgl_backend.kernels.linear.gguf.gpu import rows_of  # needs Triton

        return rows_of(self._kernels.device, self.operand, ids)

    def dequantized(self) -> torch.Tensor:
        return torch.cat(
            [
                piece if isinstance(piece, torch.Tensor) else dequantized(piece, self._dtype)
                for piece in self.operand.pieces
            ]
        )
