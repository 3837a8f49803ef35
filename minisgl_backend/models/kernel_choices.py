"""Which kernels a model's GEMMs use, on a device that need not exist here.

A model's layers and weights run on tensors without data (torch's `meta` device), and what their kernels' choosers
choose is noted instead of run: so fusions with norms, residuals and all-reduces are those of the real layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from minisgl_backend.attention.base import AttentionSpec
from minisgl_backend.attention.layer import AttentionLayer
from minisgl_backend.attention.pass_attention import EagerPiece, PassAttention
from minisgl_backend.kernels.candidate import PLAIN, Chooser, Key
from minisgl_backend.kernels.collectives.choose import MOST_COPY_BYTES, MOST_COPY_RANKS, most_rows
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.linear.call import BARE, GemmCall, LinearKey
from minisgl_backend.kernels.linear.choose import LinearChooser
from minisgl_backend.kernels.linear.int4.reference import Int4Weight
from minisgl_backend.kernels.linear.int4.repacked import fitting_layouts
from minisgl_backend.kernels.linear.int4.served import layouts_on
from minisgl_backend.kernels.linear.kernels import GemmDevice
from minisgl_backend.kernels.moe.call import Experts, MixtureCall
from minisgl_backend.kernels.moe.choose import ExpertsKey
from minisgl_backend.kernels.moe.mixtures import ExpertsKernels, MixtureKernels
from minisgl_backend.kernels.ops import QKNormRope
from minisgl_backend.kernels.select import DeviceKernels
from minisgl_backend.kernels.torch_ops import TorchOps
from minisgl_backend.kv.pool import KVPool
from minisgl_backend.layers.context import ForwardContext
from minisgl_backend.layers.model_input import ModelInput
from minisgl_backend.layers.weights import LayerContext
from minisgl_backend.models.build import attention_spec
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.decoder import CausalLM
from minisgl_backend.tensor_parallel import OVERLAP_ROWS, AllReduce, TensorParallel
from minisgl_backend.weights.dequantized import DequantizedLinearMethod
from minisgl_backend.weights.experts.method import ExpertsMethod, ExpertsSpec
from minisgl_backend.weights.formats import QuantizationConfig
from minisgl_backend.weights.method import LinearMethod, Multiplies
from minisgl_backend.weights.methods import WeightMethods

META = torch.device("meta")
ROWS = (1, 8, 64, 256, 4096)  # of a step: three decode batches and two with prompts
MOST_LOGITS = 256  # most rows of a step that need logits: a prompt needs one
_PAGE_SIZE = 64


@dataclass(frozen=True)
class Choice:
    """A kernel, and why it is chosen."""

    kernel: str
    why: str


@dataclass(frozen=True)
class Weight:
    """A weight and the GEMM that is requested of it, the same in several layers."""

    path: str  # within its layer: self_attn.qkv_proj
    shape: str
    weight_format: str
    inside: str  # what is fused with the GEMM: norm, residual, activation; output into another tensor


@dataclass
class _Notes:
    """Records the GEMMs that are requested of a model's weights, in a pass of `rows` rows."""

    facts: DeviceFacts
    dtype: torch.dtype
    rows: int = 0
    path: str = ""  # of the weight that is multiplied with
    choices: dict[Weight, dict[int, Choice]] = field(default_factory=dict)

    def linear(
        self, chooser: LinearChooser, key: LinearKey, device: GemmDevice, x: torch.Tensor, weight: Any, call: GemmCall
    ) -> torch.Tensor:
        """In place of the kernel that is chosen."""
        parts = ("norm", key.norm), ("bias", key.bias), (key.activation, key.activation), ("residual", key.residual)
        inside = [str(name) for name, is_there in (*parts, ("elsewhere", key.into)) if is_there]
        shape = f"{key.size_out} x {key.size_in}"
        noted = Weight(_in_layer(self.path), shape, chooser.weight_format, " ".join(inside))
        self.choices.setdefault(noted, {})[self.rows] = _listed(chooser, key)
        if call.out is not None:
            return call.out
        return x.new_empty(len(x), key.size_out // 2 if key.activation else key.size_out)

    def experts(self, path: str, chooser: Chooser[ExpertsKey], key: ExpertsKey, inside: Sequence[str]) -> None:
        shape = f"{key.experts_per_token} of {key.num_experts} x 3 x {key.intermediate_size} x {key.hidden_size}"
        weight = Weight(_in_layer(path), shape, chooser.weight_format, " ".join(inside))
        self.choices.setdefault(weight, {})[self.rows] = _listed(chooser, key)


def _listed(chooser: Chooser[Key], key: Key) -> Choice:
    row = chooser.candidate(key)
    rivals = chooser.contenders(key)[1:]
    return Choice(
        row.kernel, row.why + (f"; or {' or '.join(rivals)}, where measured faster at start" if rivals else "")
    )


def _in_layer(path: str) -> str:
    """model.layers.3.mlp.down_proj -> mlp.down_proj."""
    _, _, within = path.partition("model.layers.")
    return within.partition(".")[2] or path


class _Recording(LinearChooser):
    """What it chooses is noted and not run."""

    def __init__(self, weight_format: str, facts: DeviceFacts, notes: _Notes) -> None:
        super().__init__(weight_format, facts)
        self.run = lambda key: partial(notes.linear, self, key)

    @property
    def only(self) -> None:
        return None


@dataclass(frozen=True)
class _At:
    """A weight's kernels; what they choose is that weight's."""

    kernels: Multiplies
    path: str
    notes: _Notes

    def linear(self, x: torch.Tensor, weight: Any, call: GemmCall = BARE) -> torch.Tensor:
        self.notes.path = self.path
        return self.kernels.linear(x, weight, call)

    direct = linear

    def prepare(self, weights: Sequence[Any], rows: Sequence[int], longest: int = 0) -> None:
        """Nothing is measured."""


@dataclass(frozen=True)
class _InLayout:
    """Stands for a weight in the layout of a library, if memory is large enough for it."""

    layout: str
    kernels: tuple[str, ...] = ()

    def linear(self, x: torch.Tensor, kernel: str) -> torch.Tensor:
        raise NotImplementedError


def _noted(method: LinearMethod, notes: _Notes) -> None:
    """Has a weight's GEMMs noted under the names of its outputs."""
    if isinstance(method, DequantizedLinearMethod):
        method.process_weights_after_loading()
        return
    first, *others = [output.name for output in method.spec.outputs]
    path = "+".join([first, *(name.rpartition(".")[2] for name in others)])
    operand = method.operand
    if isinstance(operand, Int4Weight):
        fitting = (name for name in layouts_on(notes.facts) if name in fitting_layouts(operand))
        if (layout := next(fitting, None)) is not None:
            operand = replace(operand, repacked=_InLayout(layout))
    method.multiply_by(_At(method.kernels, path, notes), operand)


class _NotedMixtures(ExpertsKernels[Any]):
    """What it chooses is noted and not run."""

    def __init__(self, path: str, weight_format: str, notes: _Notes, kernels: MixtureKernels) -> None:
        super().__init__(weight_format, kernels)
        self._path, self._notes = path, notes

    def __call__(self, x: torch.Tensor, experts: Experts[Any], call: MixtureCall) -> torch.Tensor:
        parts = ("router", call.picked is None), ("norm", call.norm_weight is not None)
        inside = [name for name, is_there in (*parts, ("residual", call.residual is not None)) if is_there]
        self._notes.experts(self._path, self.chooser, ExpertsKey.of(x, experts, call), inside)
        return x.new_empty(len(x), experts.hidden_size)


class _NotingMethods(WeightMethods):
    def __init__(self, formats: QuantizationConfig, notes: _Notes) -> None:
        gemms = GemmDevice(TorchOps(), META, notes.facts, partial(_Recording, notes=notes))
        super().__init__(formats, DeviceKernels(gemms), dtype=notes.dtype, device=META)
        self._notes = notes

    def experts(self, spec: ExpertsSpec) -> ExpertsMethod:
        method, scheme = super().experts(spec), self._config.scheme_of(spec.name)
        weight_format = PLAIN if scheme is None else scheme.format
        method.kernels = _NotedMixtures(spec.name, weight_format, self._notes, self.kernels.mixtures)
        return method


class _PretendedRanks(TensorParallel):
    """Rank 0 of simulated ranks: on GPUs of one machine, which share memory, or on CPUs."""

    def __init__(self, size: int, hidden_size: int, dtype: torch.dtype, *, on_gpu: bool) -> None:
        super().__init__(0, size, None, META)
        self._most = most_rows(size, hidden_size, dtype) if on_gpu else 0
        most_copied = MOST_COPY_BYTES // (hidden_size * dtype.itemsize)
        self._most_copied = most_copied if on_gpu and size <= MOST_COPY_RANKS else 0

    def all_reduce_for(self, num_rows: int, *, captured: bool) -> AllReduce:
        if num_rows < OVERLAP_ROWS:
            return AllReduce.FUSED_IN_NORM if num_rows <= self._most else AllReduce.NCCL
        return AllReduce.COPY_ENGINE if self.micro_batches(num_rows)[0] <= self._most_copied else AllReduce.NCCL

    def send_ahead(self, partial: torch.Tensor, all_reduce: AllReduce) -> None:
        return None

    def sum_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, sent: object = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return residual, torch.empty_like(residual)

    def logits_columns(self, num_rows: int, start: int, count: int) -> torch.Tensor | None:
        return torch.empty(num_rows, count, device=META) if self._most else None

    def collect_logits(self, num_rows: int) -> torch.Tensor:
        return torch.empty(num_rows, 0, device=META)


class _NoAttention(PassAttention):
    """Skips attention, which has no weights of its own."""

    def attend(self, layer: AttentionLayer, q: torch.Tensor) -> torch.Tensor:
        return q if layer.latent is None else q.new_empty(*q.shape[:2], layer.latent.v_dim)

    def run(self, piece: EagerPiece, x: torch.Tensor, slots: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return x.new_empty(len(x), *piece.shape_out)

    def fuses_rope(self, layer: AttentionLayer) -> bool:
        return True

    def attend_with_rope(self, layer: AttentionLayer, qkv: torch.Tensor, rotation: QKNormRope) -> torch.Tensor:
        return qkv.new_empty(len(qkv), layer.num_q_heads, layer.head_dim)


def kernel_choices(
    config: ModelConfig,
    facts: DeviceFacts,
    dtype: torch.dtype,
    *,
    tp_size: int = 1,
    quantization: QuantizationConfig | None = None,
    rows: Sequence[int] = ROWS,
) -> dict[Weight, dict[int, Choice]]:
    """For each weight and requested GEMM, in the order of a forward pass: the kernel by the number of rows of a step.

    A weight may have several entries: for example, the first layer's norm cannot be fused with a preceding all-reduce.
    quantization: formats of the weights; None: the checkpoint's.
    """
    config.check_tensor_parallel(tp_size)
    notes, ops = _Notes(facts, dtype), TorchOps()
    tp = (
        TensorParallel.single()
        if tp_size == 1
        else _PretendedRanks(tp_size, config.hidden_size, dtype, on_gpu=facts.kind == "cuda")
    )
    methods = _NotingMethods(quantization or config.quantization, notes)
    model = CausalLM(config, LayerContext(device=META, dtype=dtype, ops=ops, tp=tp, methods=methods), _PAGE_SIZE)
    for module in list(model.modules()):
        if isinstance(module, LinearMethod):
            _noted(module, notes)
    model.derive_weights()
    spec = attention_spec(
        config,
        AttentionSpec(page_size=_PAGE_SIZE, max_seq_len=_PAGE_SIZE, max_rows=1, dtype=dtype, device=META),
        tp_size=tp_size,
    )
    model.bind_attention(spec, KVPool(spec.places, _PAGE_SIZE, 1, META))
    for notes.rows in sorted(rows, reverse=True):  # the largest requests everything except logits, in order
        ints = partial(torch.empty, (notes.rows,), dtype=torch.int64, device=META)
        hidden = model(
            ModelInput(ints(), ints()), ForwardContext(slots=(ints(),), attention=_NoAttention(), is_warm_up=True)
        )
        if notes.rows <= MOST_LOGITS:
            model.decode_logits(hidden)
    return notes.choices


def table(choices: dict[Weight, dict[int, Choice]], rows: Sequence[int] = ROWS) -> str:
    """Aligned text, one line per weight; numbers in brackets refer to the reasons below."""
    paths = list(dict.fromkeys(weight.path for weight in choices))
    weights = sorted(choices, key=lambda weight: paths.index(weight.path))
    found = [choices[weight].get(count) for weight in weights for count in rows]
    numbers = {choice: number for number, choice in enumerate(dict.fromkeys(filter(None, found)), 1)}
    cells = [["weight", "outputs x inputs", "format", "inside", *map(str, rows)]]
    for weight in weights:
        chosen = [choices[weight].get(count) for count in rows]
        kernels = ["" if one is None else f"{one.kernel} [{numbers[one]}]" for one in chosen]
        cells.append([weight.path, weight.shape, weight.weight_format, weight.inside or "-", *kernels])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([*text, "", *(f"[{number}] {choice.kernel}: {choice.why}" for choice, number in numbers.items())])
