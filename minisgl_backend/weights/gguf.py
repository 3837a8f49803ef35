"""The format `gguf`: weights in the blocks of a GGUF file; here on a CPU, as they lie there and mapped.

A tensor that is in no blocks of GGUF_BLOCKS, or whose blocks tensor parallelism would cut, is in bfloat16.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from minisgl_backend.kernels.candidate import PLAIN
from minisgl_backend.kernels.cpu.blocks import rows_of
from minisgl_backend.kernels.linear.blocks import GROUP, BlockRows, BlockWeight
from minisgl_backend.kernels.linear.kernels import LinearKernels
from minisgl_backend.kernels.moe.mixtures import ExpertsKernels
from minisgl_backend.number_formats import GGUF_BLOCKS
from minisgl_backend.process.memory import in_words
from minisgl_backend.weights.experts.method import ExpertsMethod, ExpertsSpec, experts_part
from minisgl_backend.weights.experts.plain import PlainExpertsMethod
from minisgl_backend.weights.gguf_packed import PackedLinearMethod
from minisgl_backend.weights.method import LinearMethod, LinearOutput, LinearSpec, MethodFactory
from minisgl_backend.weights.parts import StoredRows, WeightPart
from minisgl_backend.weights.plain import PlainLinearMethod, linear_part

log = logging.getLogger(__name__)
_NOWHERE = torch.device("meta")


class BlockLinearMethod(LinearMethod):
    _shared: BlockLinearMethod | None

    def __init__(
        self,
        spec: LinearSpec,
        kernels: LinearKernels[BlockWeight],
        dtype: torch.dtype,
        device: torch.device,
        shared: BlockLinearMethod | None = None,
    ) -> None:
        """shared: whose weight this one's rows are, which it owns and loads (tied embeddings)."""
        super().__init__(spec)
        self._dtype, self._kernels = dtype, kernels
        self.__dict__["_shared"] = shared  # a plain attribute, and no module of its own
        self._types: dict[int, str] = {}  # by index of the output
        self.make_bias(dtype, device)
        self.multiply_by(kernels, BlockWeight(spec.shape))

    def output_rows(self, spec: LinearSpec) -> BlockLinearMethod:
        """A weight whose rows are those of this one from `start` on."""
        return BlockLinearMethod(spec, self._kernels, self._dtype, torch.device("cpu"), shared=self)

    def parts_of(self, output: LinearOutput, rows: slice, index: int) -> list[WeightPart]:
        if self._shared is not None:
            return []
        target = torch.empty((output.local, self.spec.local_inputs), dtype=self._dtype, device=_NOWHERE)
        return [replace(linear_part(self.spec, output, target), keep=partial(self._keep, index))]

    def _keep(self, index: int, found: StoredRows | torch.Tensor) -> None:
        self._types[index], rows = _kept(found, self._dtype)
        self.register_parameter(f"rows_{index}", nn.Parameter(rows, requires_grad=False))

    def process_weights_after_loading(self) -> None:
        """All outputs are there, unless only shapes are asked for: what kernels are given follows."""
        source = self._shared or self
        if not source._types:
            return
        pieces = source.pieces()
        if self._shared is not None:
            (output,) = self.spec.outputs
            pieces = [one.rows(output.start, output.local) for one in pieces]
        self.operand.fill(pieces)

    def pieces(self) -> list[BlockRows]:
        """Those of each output, once they are loaded."""
        types = [self._types[index] for index in range(len(self.spec.outputs))]
        data = [getattr(self, f"rows_{index}").data for index in range(len(types))]
        return [_rows(kind, rows) for kind, rows in zip(types, data, strict=True)]

    @property
    def kept_bytes(self) -> Counter[str]:
        """Bytes of its own rows by their type; "": plain."""
        found: Counter[str] = Counter()
        for index, kind in self._types.items():
            found[kind] += getattr(self, f"rows_{index}").nbytes
        return found

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Some rows as numbers: ids int [count] -> [count, inputs]."""
        if ids.is_meta:  # a pass by shapes alone, without weights
            return torch.empty((len(ids), self.spec.local_inputs), dtype=self._dtype, device=ids.device)
        return rows_of(self._kernels.device, self.operand, ids)

    def dequantized(self) -> torch.Tensor:
        device = self._kernels.device
        return torch.cat([rows_of(device, one, torch.arange(one.shape[0])) for one in self.operand.apart()])


class BlockExpertsMethod(ExpertsMethod):
    """Each expert is two weights."""

    def __init__(self, spec: ExpertsSpec, kernels: ExpertsKernels[list[BlockWeight]], dtype: torch.dtype) -> None:
        super().__init__(spec, kernels)
        self._dtype = dtype
        self._found: dict[tuple[str, int], tuple[str, torch.Tensor]] = {}  # by kind and expert
        self.stored = nn.ParameterList()
        gate_up, down = (2 * spec.local, spec.hidden_size), (spec.hidden_size, spec.local)
        self._weights = tuple([BlockWeight(shape) for _ in range(spec.num_experts)] for shape in (gate_up, down))
        self.multiply_by(*self._weights)

    def weight_parts(self) -> list[WeightPart]:
        count, hidden, local = self.spec.num_experts, self.spec.hidden_size, self.spec.local
        kinds = {"gate_proj": (local, hidden), "up_proj": (local, hidden), "down_proj": (hidden, local)}
        return [
            replace(
                experts_part(self.spec, kind, torch.empty((count, *shape), dtype=self._dtype, device=_NOWHERE)),
                keep=partial(self._keep, kind),
            )
            for kind, shape in kinds.items()
        ]

    def _keep(self, kind: str, found: StoredRows | torch.Tensor, expert: int) -> None:
        type_, rows = _kept(found, self._dtype)
        self.stored.append(nn.Parameter(rows, requires_grad=False))
        self._found[kind, expert] = type_, rows

    def process_weights_after_loading(self) -> None:
        if not self._found:  # only shapes are asked for
            return
        for kinds, weights in zip((("gate_proj", "up_proj"), ("down_proj",)), self._weights, strict=True):
            for expert, weight in enumerate(weights):
                weight.fill([_rows(*self._found[kind, expert]) for kind in kinds])

    @property
    def kept_bytes(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for kind, rows in self._found.values():
            found[kind] += rows.nbytes
        return found


def _kept(found: StoredRows | torch.Tensor, dtype: torch.dtype) -> tuple[str, torch.Tensor]:
    """The type, "" for plain, and the rows."""
    return (found.type, found.data) if isinstance(found, StoredRows) else ("", found.to(dtype))


def _rows(kind: str, data: torch.Tensor) -> BlockRows:
    return BlockRows(GGUF_BLOCKS.get(kind), data)


class GGUFFactory(MethodFactory):
    weight_format = "gguf"

    def linear(self, spec: LinearSpec) -> LinearMethod:
        if spec.local_inputs % GROUP:  # no blocks have such rows
            return PlainLinearMethod(spec, self.kernels.plain, self.dtype, self.device)
        if self.kernels.on_gpu:
            self.kernels.gemms.scratch  # noqa: B018  made before anything is captured
            return PackedLinearMethod(spec, self.gemms, self.dtype, self.device)
        return BlockLinearMethod(spec, self.gemms, self.dtype, self.device)

    def experts(self, spec: ExpertsSpec) -> ExpertsMethod:
        if spec.bias or spec.hidden_size % GROUP or spec.local % GROUP:
            return PlainExpertsMethod(spec, ExpertsKernels(PLAIN, self.kernels.mixtures), self.dtype, self.device)
        return BlockExpertsMethod(spec, self.mixtures, self.dtype)


def log_kept(model: nn.Module) -> None:
    """Says how much of a model's weights lies in blocks of which type, and how much does not."""
    total: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, (BlockLinearMethod, BlockExpertsMethod, PackedLinearMethod)):
            total.update(module.kept_bytes)
    if total:
        kinds = ", ".join(f"{kind or 'bfloat16'} {in_words(size)}" for kind, size in sorted(total.items()))
        log.info("weights in blocks of the file (on a CPU as they lie there, mapped), and others: %s", kinds)
