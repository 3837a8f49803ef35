"""The adapters of one model on one rank: slots beside its linear layers, and which of their factors go where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from minisgl_backend.adapters.served import ServedAdapter
from minisgl_backend.adapters.tensors import AdapterTensors, Factors, module_names
from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.lora.choose import choose_lora
from minisgl_backend.kernels.lora.reference import LoraFactors, LoraLayout
from minisgl_backend.layers.embedding import EmbeddingAdapters
from minisgl_backend.layers.lora import AdaptedWeight, LoraSite
from minisgl_backend.weights.loader import Read, TensorReads, plan_reads
from minisgl_backend.weights.method import LinearSpec
from minisgl_backend.weights.names import TensorNames
from minisgl_backend.weights.parts import WeightPart

_BASE_BYTES = 8 << 30
_ROWS_AT_ONCE = 8192  # of weights, while they are compared


class _Place(NamedTuple):
    layer: AdaptedWeight
    output: int  # which of its outputs


class _Placed(NamedTuple):
    """What an adapter has for one output of a layer."""

    place: _Place
    read: Read
    factors: Factors


class AdapterSlots:
    """All factors of a slot are one piece of memory, in the order of the model's layers: an adapter is made ready once,
    on the host, and put into a slot by one copy. Slots count from 1; adapters have numbers that none has again."""

    def __init__(
        self,
        model: nn.Module,
        names: TensorNames,
        adapters: Mapping[str, AdapterTensors],
        num_slots: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        rank: int = 0,
    ) -> None:
        """Makes room beside each layer that one of the adapters (by name) changes, and for adapters to come of up to
        `rank` beside all, and fills the slots with the first. names: of the model's checkpoints; dtype: of
        the model. Raises ConfigError where a module is no linear layer of this model, or its factors do not fit."""
        self._names = names
        self._places: dict[str, _Place] = {}  # by the outputs' names here
        parts = []
        for layer in model.modules():
            if not isinstance(layer, AdaptedWeight):
                continue
            for index, (output, rows) in enumerate(layer.lora_spec.rows()):
                self._places[output.name] = _Place(layer, index)
                target = torch.empty(rows.stop - rows.start, 1, device="meta")
                parts.append(output.part("weight", (output.size, 1), target))
        self._reads = _reads(parts, names)  # by the modules' names in checkpoints
        self._kernels = choose_lora(device, dtype)
        self._ranks = self._largest_ranks(adapters.values(), rank)
        self._layouts = {layer: self._layout(layer) for layer in self._ranks}
        size = sum(layout.size for layout in self._layouts.values())
        self._slots = torch.zeros(num_slots, size, dtype=self._kernels.dtype, device=device)
        for layer, factors in self._factors(self._slots).items():
            layer.adapt(LoraSite(factors, self._kernels))
        ready = {adapter.digest: self.ready(adapter) for adapter in adapters.values()}
        # By number, those that the host has: what `load` copies.
        self._adapters = {number: ready[one.digest] for number, one in enumerate(adapters.values())}
        numbered = enumerate(adapters.items())
        self.served = tuple(ServedAdapter(name, number, one.digest) for number, (name, one) in numbered)
        for number in range(min(num_slots, len(adapters))):
            self.load(number + 1, number)
        for count in self._kernels.row_counts:  # kernels are compiled now, not in the first step that needs them
            for layer in {layout: layer for layer, layout in self._layouts.items()}.values():
                layer.try_adapters(torch.ones(count, dtype=torch.int32, device=device))

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def device(self) -> torch.device:
        return self._slots.device

    @property
    def bytes_per_slot(self) -> int:
        return self._slots[0].nbytes

    @property
    def most_file_bytes(self) -> int:
        """Of a file with an adapter as large as a slot, in any number format, and weights of the base beside it."""
        specs = [(place.layer.lora_spec, place.output) for place in self._places.values()]
        numbers = sum(spec.input_size + spec.outputs[output].size for spec, output in specs)
        rank = max(self._ranks.values(), default=0)
        return 8 * numbers * rank + _BASE_BYTES

    def load(self, slot: int, adapter: int) -> None:
        """The slot is this adapter's from now on, in stream order."""
        self._slots[slot - 1].copy_(self._adapters[adapter], non_blocking=True)

    def ready(self, adapter: AdapterTensors) -> torch.Tensor:
        """One slot's numbers, on the host; changes nothing, so that any thread may call it. Raises ConfigError where
        the adapter does not fit this model, or the room beside it."""
        self._check_base(adapter)
        on_gpu = self._slots.device.type == "cuda"
        memory = torch.zeros(1, self._slots.shape[1], dtype=self._slots.dtype, pin_memory=on_gpu)
        factors_of = self._factors(memory)
        for place, read, factors in self._placed(adapter):
            room = self._ranks.get(place.layer, 0)
            if len(factors.a) > room:
                name = read.part.name.removesuffix(".weight")
                raise ConfigError(
                    f"{adapter.source} has rank {len(factors.a)} for {name}; there is room for {room or 'none'}; "
                    "allowed: a server that is started with a max_lora_rank as large"
                )
            rows = read.part.ordered(_outputs(read, factors.b))
            inputs = _local_inputs(factors.a, place.layer.lora_spec)
            factors_of[place.layer].fill(0, place.output, inputs, rows.float() * factors.scale)
        return memory[0]

    def size_of(self, module: str) -> tuple[int, int]:
        """Inputs and outputs of a module, by its name in checkpoints. Raises ConfigError."""
        reads = next((self._reads[name] for name in module_names(self._names, module) if name in self._reads), None)
        if reads is None:
            raise ConfigError(f"{module} is no linear layer that this model computes with adapters")
        return self._place(reads.reads[0].part).layer.lora_spec.input_size, reads.shape[0]

    def keep(self, number: int, ready: torch.Tensor) -> None:
        """The host has an adapter more, as `ready` made it."""
        self._adapters[number] = ready

    def drop(self, number: int) -> None:
        """The host has it no more; it is in no slot. An unknown number is ignored."""
        self._adapters.pop(number, None)

    def _check_base(self, adapter: AdapterTensors) -> None:
        """Raises ConfigError unless what the adapter has of the base is this model's."""
        for module, stored in adapter.base.items():
            reads = self._find(adapter, module)
            layer = self._place(reads.reads[0].part).layer
            weight = stored.T if isinstance(layer, EmbeddingAdapters) else stored
            if tuple(weight.shape) != (reads.shape[0], layer.lora_spec.input_size):
                raise ConfigError(
                    f"{adapter.source}: {module}.base_layer.weight has shape {tuple(weight.shape)}; this model's has "
                    f"{reads.shape[0]} outputs: tokens were added when it was trained"
                )
            for read in reads.reads:
                layer, output = self._place(read.part)
                rows = [rows for _, rows in layer.lora_spec.rows()][output]
                theirs = read.part.ordered(_outputs(read, weight))
                if not _equal(layer, rows, _local_inputs(theirs, layer.lora_spec)):
                    raise ConfigError(
                        f"{adapter.source}: {module}.base_layer.weight differs from this model's, as if it had been "
                        "trained beside the adapter; allowed: the base's, or none (save_embedding_layers=False)"
                    )

    def _largest_ranks(self, adapters: Iterable[AdapterTensors], rank: int) -> dict[AdaptedWeight, int]:
        """By layer, at least `rank` of each unless that is 0."""
        ranks: dict[AdaptedWeight, int] = {}
        multiple = self._kernels.rank_multiple
        needs = [(place.layer, len(factors.a)) for one in adapters for place, _, factors in self._placed(one)]
        needs += [(place.layer, rank) for place in self._places.values() if rank]
        for layer, size in needs:
            ranks[layer] = max(ranks.get(layer, 0), -(-size // multiple) * multiple)
        return ranks

    def _layout(self, layer: AdaptedWeight) -> LoraLayout:
        spec = layer.lora_spec
        return LoraLayout(tuple(output.local for output in spec.outputs), spec.local_inputs, self._ranks[layer])

    def _factors(self, memory: torch.Tensor) -> dict[AdaptedWeight, LoraFactors]:
        """memory: [slots, numbers of a slot]."""
        found, start = {}, 0
        for layer, layout in self._layouts.items():
            found[layer] = LoraFactors.within(memory[:, start : start + layout.size], layout)
            start += layout.size
        return found

    def _placed(self, adapter: AdapterTensors) -> Iterator[_Placed]:
        """Raises ConfigError where a module is no linear layer of this model, of another size, or there twice."""
        found: dict[_Place, str] = {}
        for module, factors in adapter.by_module.items():
            for read in self._read(adapter, module, factors).reads:
                place = self._place(read.part)
                if (other := found.setdefault(place, module)) != module:
                    raise ConfigError(
                        f"{adapter.source}: {other} and {module} are the same module here; allowed: one of them"
                    )
                yield _Placed(place, read, factors)

    def _place(self, part: WeightPart) -> _Place:
        return self._places[part.name.removesuffix(".weight")]

    def _find(self, adapter: AdapterTensors, module: str) -> TensorReads:
        reads = next((self._reads[name] for name in module_names(self._names, module) if name in self._reads), None)
        if reads is None:
            leaves = ", ".join(sorted({name.rpartition(".")[2] for name in self._reads}))
            raise ConfigError(
                f"{adapter.source}: {module} is no linear layer that this model computes with adapters; allowed: "
                f"{leaves} of its layers"
            )
        return reads

    def _read(self, adapter: AdapterTensors, module: str, factors: Factors) -> TensorReads:
        reads = self._find(adapter, module)
        size_in, size_out = self._place(reads.reads[0].part).layer.lora_spec.input_size, reads.shape[0]
        if (factors.a.shape[1], len(factors.b)) != (size_in, size_out):
            raise ConfigError(
                f"{adapter.source}: {module} has lora_A for {factors.a.shape[1]} inputs and lora_B for "
                f"{len(factors.b)} outputs; this model's has {size_in} and {size_out}: it is of another base"
            )
        return reads


def _outputs(read: Read, weight: torch.Tensor) -> torch.Tensor:
    """Of a weight's outputs in the file those that a read takes."""
    rows = weight[read.index[0]]
    return rows if read.outputs is None else read.outputs.of(rows, 0)


def _equal(layer: AdaptedWeight, rows: slice, theirs: torch.Tensor) -> bool:
    """Whether these outputs of a weight are the numbers `theirs`; False for formats that do not tell theirs."""
    try:
        own = layer.numbers()[rows]
    except NotImplementedError:
        return False
    parts = zip(own.split(_ROWS_AT_ONCE), theirs.split(_ROWS_AT_ONCE), strict=True)
    return all(torch.equal(one, other.to(one.device, one.dtype)) for one, other in parts)


def _local_inputs(a: torch.Tensor, spec: LinearSpec) -> torch.Tensor:
    return a[:, spec.input_start : spec.input_start + spec.local_inputs]


def _reads(parts: list[WeightPart], names: TensorNames) -> Mapping[str, TensorReads]:
    """B has a weight's outputs as its rows, whichever way round checkpoints store the weight."""
    turned = tuple(replace(one, transposed=False, either_way=False, one_row=False) for one in names.stored)
    plans = (plan_reads(parts, replace(names, stored=turned), found) for found in ((), None))
    return {name.removesuffix(".weight"): reads for plan in plans for name, reads in plan.items()}
