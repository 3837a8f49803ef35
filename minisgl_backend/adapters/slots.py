"""The adapters of one model on one rank: slots beside its linear layers, and which of their factors go where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from minisgl_backend.adapters.tensors import AdapterTensors, Factors
from minisgl_backend.errors import ConfigError
from minisgl_backend.layers.linear import AdaptedLinear
from minisgl_backend.layers.lora import LoraSite
from minisgl_backend.weights.loader import TensorReads, plan_reads
from minisgl_backend.weights.method import LinearSpec
from minisgl_backend.weights.names import TensorNames
from minisgl_backend.weights.parts import WeightPart

# What names begin with where the model was trained within another class than it is served as.
_WRAPPERS = (("model.language_model.", "model."), ("language_model.model.", "model."), ("", "model."))


class _Place(NamedTuple):
    layer: AdaptedLinear
    output: int  # which of its outputs


class AdapterSlots:
    """Makes room beside the layers that adapters change, and fills it. Slots count from 1."""

    def __init__(
        self, model: nn.Module, names: TensorNames, num_slots: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """names: of the model's checkpoints; dtype: of the model."""
        self.num_slots, self._names = num_slots, names
        self._dtype, self._device = dtype, device
        self._places: dict[str, _Place] = {}  # by the outputs' names here
        parts = []
        for layer in model.modules():
            if not isinstance(layer, AdaptedLinear):
                continue
            for index, (output, rows) in enumerate(layer.method.spec.rows()):
                self._places[output.name] = _Place(layer, index)
                target = torch.empty(rows.stop - rows.start, 1, device="meta")
                parts.append(output.part("weight", (output.size, 1), target))
        self._reads = _reads(parts, names)  # by the modules' names in checkpoints

    def attach(self, adapters: Iterable[AdapterTensors]) -> int:
        """Makes room for them beside each layer that one of them changes. Returns its bytes. Raises ConfigError where a
        module is no linear layer of this model, or its factors do not fit it."""
        adapters, ranks = list(adapters), dict[AdaptedLinear, int]()
        for adapter in adapters:
            for module, factors in adapter.by_module.items():
                for read in self._read(adapter, module, factors).reads:
                    layer = self._place(read.part).layer
                    ranks[layer] = max(ranks.get(layer, 0), len(factors.a))
        for layer, rank in ranks.items():
            spec, num_slots = layer.method.spec, self.num_slots
            layer.adapt(LoraSite(spec, num_slots=num_slots, rank=rank, dtype=self._dtype, device=self._device))
        return sum(layer.lora.factors.nbytes for layer in ranks if layer.lora is not None)

    def fill(self, slot: int, adapter: AdapterTensors) -> None:
        """The slot is this adapter's from now on; for one of those that were attached."""
        for place in self._places.values():
            if place.layer.lora is not None and place.output == 0:
                place.layer.lora.factors.clear(slot)
        for module, factors in adapter.by_module.items():
            for read in self._read(adapter, module, factors).reads:
                layer, output = self._place(read.part)
                rows = factors.b[read.index[0]]
                rows = read.part.ordered(rows if read.outputs is None else read.outputs.of(rows, 0))
                assert layer.lora is not None, "it was attached"
                layer.lora.factors.fill(
                    slot, output, _local_inputs(factors.a, layer.method.spec), rows.float() * factors.scale
                )

    def _place(self, part: WeightPart) -> _Place:
        return self._places[part.name.removesuffix(".weight")]

    def _read(self, adapter: AdapterTensors, module: str, factors: Factors) -> TensorReads:
        reads = next((self._reads[name] for name in self._candidates(module) if name in self._reads), None)
        if reads is None:
            leaves = ", ".join(sorted({name.rpartition(".")[2] for name in self._reads}))
            raise ConfigError(
                f"{adapter.folder}: {module} is no linear layer that this model computes with adapters; allowed: "
                f"{leaves} of its layers"
            )
        size_in, size_out = self._place(reads.reads[0].part).layer.method.spec.input_size, reads.shape[0]
        if (factors.a.shape[1], len(factors.b)) != (size_in, size_out):
            raise ConfigError(
                f"{adapter.folder}: {module} has lora_A for {factors.a.shape[1]} inputs and lora_B for "
                f"{len(factors.b)} outputs; this model's has {size_in} and {size_out}: it is of another base"
            )
        return reads

    def _candidates(self, module: str) -> Iterable[str]:
        yield self._names.here(f"{module}.").removesuffix(".")
        for theirs, ours in _WRAPPERS:
            if module.startswith(theirs):
                yield ours + module.removeprefix(theirs)


def _local_inputs(a: torch.Tensor, spec: LinearSpec) -> torch.Tensor:
    return a[:, spec.input_start : spec.input_start + spec.local_inputs]


def _reads(parts: list[WeightPart], names: TensorNames) -> Mapping[str, TensorReads]:
    """B has a weight's outputs as its rows, whichever way round checkpoints store the weight."""
    turned = tuple(replace(one, transposed=False, either_way=False, one_row=False) for one in names.stored)
    plans = (plan_reads(parts, replace(names, stored=turned), found) for found in ((), None))
    return {name.removesuffix(".weight"): reads for plan in plans for name, reads in plan.items()}
