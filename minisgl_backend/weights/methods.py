"""From a module's path to the method of its weight."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.ops import Ops
from minisgl_backend.kernels.select import DeviceKernels, select_kernels
from minisgl_backend.lazy_import import load_attribute
from minisgl_backend.number_formats import WEIGHT_FORMATS
from minisgl_backend.weights.dequantized import DequantizedLinearMethod
from minisgl_backend.weights.experts.method import ExpertsMethod, ExpertsSpec
from minisgl_backend.weights.formats import QuantizationConfig, WeightScheme
from minisgl_backend.weights.method import LinearMethod, LinearSpec, MethodFactory
from minisgl_backend.weights.plain import PlainFactory, PlainLinearMethod


class WeightMethods:
    """The methods of one model's weights on one device. Formats that no module has are not imported."""

    def __init__(
        self, config: QuantizationConfig, kernels: DeviceKernels, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """dtype: of the model. kernels: of weights in it."""
        self._config, self._kernels, self._dtype, self._device = config, kernels, dtype, device
        self._factories: dict[WeightScheme | None, MethodFactory] = {None: PlainFactory(kernels, dtype, device)}

    @classmethod
    def all_plain(cls, ops: Ops, *, dtype: torch.dtype, device: torch.device) -> WeightMethods:
        """Of a model without any other format."""
        return cls(QuantizationConfig(), select_kernels(ops, device), dtype=dtype, device=device)

    @property
    def kernels(self) -> DeviceKernels:
        """Of tensors in the model's number format."""
        return self._kernels

    def linear(self, spec: LinearSpec) -> LinearMethod:
        """By the paths of its outputs. Raises ConfigError where these are to have several formats in one weight."""
        schemes = {self._config.scheme_of(output.name): output.name for output in spec.outputs}
        if len(schemes) > 1:
            found = ", ".join(f"{path} is {scheme or 'plain'}" for scheme, path in schemes.items())
            raise ConfigError(f"quantization: {found}; allowed: one format for layers that are multiplied together")
        return self._factory(next(iter(schemes))).linear(spec)

    def alike(self, names: Sequence[str]) -> list[int]:
        """Paths of outputs, as runs that `linear` can have in one weight: how many each has."""
        return [len(list(run)) for _, run in groupby(names, self._config.scheme_of)]

    def linear_as_numbers(self, spec: LinearSpec) -> LinearMethod:
        """`linear` of a weight that is computed with, too, and so is never converted while it loads: `dequantized` of
        the method is there once it is loaded. Raises ConfigError where the checkpoint's format has none."""
        scheme = self._config.scheme_of(spec.outputs[0].name)
        if scheme is None or scheme.parameters is None:
            return self.plain_linear(spec)
        method = self._factory(scheme).linear(spec)
        if type(method).dequantized is LinearMethod.dequantized:
            raise ConfigError(
                f"quantization: {spec.outputs[0].name} is {scheme}; allowed for it: plain, FP8, INT8 or 4 bits"
            )
        if isinstance(method, DequantizedLinearMethod):
            return method
        return DequantizedLinearMethod(method, self._kernels.plain, self._dtype)

    def experts(self, spec: ExpertsSpec) -> ExpertsMethod:
        return self._factory(self._config.scheme_of(spec.name)).experts(spec)

    def vocabulary(self, spec: LinearSpec) -> LinearMethod | None:
        """Of an embedding or LM head in a format that has these, too; None: it is plain."""
        scheme = self._config.scheme_of(spec.outputs[0].name)
        if scheme is None or not WEIGHT_FORMATS[scheme.format].vocabulary:
            return None
        method = self._factory(scheme).linear(spec)
        return None if isinstance(method, PlainLinearMethod) else method

    def plain_linear(
        self, spec: LinearSpec, shared: torch.Tensor | None = None, dtype: torch.dtype | None = None
    ) -> PlainLinearMethod:
        """Of what is plain in every model: LM head, router. shared: see `PlainLinearMethod`. dtype: where it is not
        the model's."""
        return PlainLinearMethod(spec, self._kernels.plain, dtype or self._dtype, self._device, shared)

    def _factory(self, scheme: WeightScheme | None) -> MethodFactory:
        if scheme is not None and scheme not in self._factories:
            made = load_attribute(WEIGHT_FORMATS[scheme.format].factory)
            self._factories[scheme] = made(self._kernels, self._dtype, self._device, scheme.parameters)
        return self._factories[scheme]
