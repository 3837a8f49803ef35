"""Weights that a checkpoint has in another format and that are computed with in the model's own, made once they are
loaded: MLA's kv_b_proj, parts of which are multiplied apart from one another, and formats without a kernel on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minisgl_backend.kernels.linear.call import BARE, GemmCall
from minisgl_backend.kernels.linear.kernels import PlainKernels
from minisgl_backend.weights.method import LinearMethod, LinearOutput
from minisgl_backend.weights.parts import WeightPart
from minisgl_backend.weights.plain import PlainLinearMethod


class DequantizedLinearMethod(LinearMethod):
    """Loads by another method, which is given up when `process_weights_after_loading` has its plain numbers."""

    def __init__(self, stored: LinearMethod, kernels: PlainKernels, dtype: torch.dtype) -> None:
        super().__init__(stored.spec)
        self._plain, self._dtype = kernels, dtype
        self.stored: LinearMethod | None = stored  # whose parts are those of this weight
        self.operand = self.added_bias = None
        self.multiply = lambda x, _, call: self._loaded().apply_weights(x, call)
        self.plain: PlainLinearMethod | None = None  # a module of the model: its kernels are prepared by themselves

    def process_weights_after_loading(self) -> None:
        stored = self.stored
        if stored is None:
            return
        stored.process_weights_after_loading()
        weight = stored.dequantized().to(self._dtype)
        plain = PlainLinearMethod(self.spec, self._plain, self._dtype, weight.device, shared=weight)
        if plain.bias is not None and stored.bias is not None:
            plain.bias.data.copy_(stored.bias)
        self.stored, self.plain = None, plain

    def apply_weights(self, x: torch.Tensor, call: GemmCall = BARE) -> torch.Tensor:
        return self._loaded().apply_weights(x, call)

    def apply_into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._loaded().apply_into(x, out)

    def dequantized(self) -> torch.Tensor:
        return self._loaded().dequantized()

    def prepare(self, alike: Sequence[LinearMethod], rows: Sequence[int], longest: int = 0) -> None:
        """`plain` is prepared by itself."""

    def parts_of(self, output: LinearOutput, rows: slice, index: int) -> list[WeightPart]:
        return []

    def fill_with_noise(self, generator: torch.Generator) -> None:
        """`stored` is filled by itself."""

    def _loaded(self) -> PlainLinearMethod:
        assert self.plain is not None, "process_weights_after_loading comes first"
        return self.plain
