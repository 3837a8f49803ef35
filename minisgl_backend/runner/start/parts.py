"""What a runner is made of, built in order: model, spec, attention, table, sampling, proposer, second layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import torch

from minisgl_backend.adapters.slots import AdapterSlots
from minisgl_backend.attention.base import AttentionSpec
from minisgl_backend.attention.pair import AttentionPair
from minisgl_backend.attention.registry import create_attention
from minisgl_backend.kv.layout import ONE, KVScales
from minisgl_backend.kv.pool import KVPool, LayerPlace, places_after
from minisgl_backend.lazy_import import load_attribute
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.load_config import LoadConfig
from minisgl_backend.process.progress import Progress, no_progress
from minisgl_backend.runner.model_pass import Model
from minisgl_backend.runner.model_runner import Captures, ModelRunner
from minisgl_backend.runner.proposers.context import ProposerContext
from minisgl_backend.runner.proposers.proposer import DeviceProposer
from minisgl_backend.runner.row_state import RowState
from minisgl_backend.runner.row_table import RowTable
from minisgl_backend.runner.start.adapters import load_adapters, read_merged
from minisgl_backend.runner.start.draft import proposer_class, target_spec
from minisgl_backend.runner.start.encoder import make_vectors
from minisgl_backend.runner.start.runtime_config import RuntimeConfig
from minisgl_backend.runner.start.states import StateRoom, least_states
from minisgl_backend.runner.vectors import Vectors
from minisgl_backend.sampling.metadata import SamplingRows
from minisgl_backend.tensor_parallel import TensorParallel
from minisgl_backend.weights.kv_scales import read_kv_scales

# What builds a model, by `ModelConfig.implementation`: a function of its config, its folder and a LoadConfig. By names,
# since one of them imports transformers, which no family needs.
BUILDERS: Mapping[str, str] = MappingProxyType(
    {
        "native": "minisgl_backend.models.build:build_model",
        "transformers": "minisgl_backend.models.fallback.build:build_fallback",
    }
)


def no_phase(_: str) -> None:
    """Reports nothing."""


@dataclass(frozen=True)
class StartProgress:
    """Progress that a start reports: bytes of weights read, graphs captured, names of phases that have ended."""

    weights: Progress = no_progress
    graphs: Progress = no_progress
    phase_ended: Callable[[str], None] = no_phase


@dataclass(frozen=True, kw_only=True)
class Start:
    """The start of one rank: what is known before anything is loaded."""

    runtime: RuntimeConfig
    model: ModelConfig
    device: torch.device
    tp: TensorParallel
    progress: StartProgress
    free_at_start: int  # bytes of the device

    @property
    def shares_memory(self) -> bool:
        """GPUs can only open each other's memory on one machine; over several, all sums use NCCL."""
        return not self.runtime.config.disable_pynccl and self.runtime.config.nodes == 1

    @property
    def load(self) -> LoadConfig:
        """How the model is loaded."""
        runtime, config, draft = self.runtime, self.runtime.config, self.runtime.draft
        return LoadConfig(
            dtype=getattr(torch, runtime.dtype),
            device=self.device,
            max_seq_len=runtime.max_seq_len,
            tp=self.tp,
            quantization=config.quantization,
            dummy_weights=config.dummy_weights,
            trust_remote_code=config.trust_remote_code,
            on_progress=self.progress.weights,
            uses_draft_layer=draft is not None and draft.model.tensor_names.within in self.model.draft_prefixes,
        )


@dataclass(frozen=True, kw_only=True)
class Parts:
    """All of a runner that does not depend on its number of pages."""

    start: Start
    model: Model
    spec: AttentionSpec  # of the model
    attention: AttentionPair
    rows: RowState
    proposer: DeviceProposer | None
    vectors: Vectors | None = None  # of a model that sees
    adapters: AdapterSlots | None = None

    @cached_property
    def places(self) -> tuple[LayerPlace, ...]:
        """The places in the pool of all layers, the proposer's included."""
        return (*self.spec.places, *places_after(self.spec.places, self.proposer.places if self.proposer else ()))

    @cached_property
    def scales(self) -> Sequence[KVScales]:
        """Of the FP8 cache, by place, as the checkpoint says them; others are 1."""
        config, own = self.start.model, list[KVScales]()
        if any(group.kv.is_fp8 for group in self.spec.groups) and not self.start.runtime.config.dummy_weights:
            scales = read_kv_scales(config.num_layers, self.start.runtime.model_dir, config.tensor_names)
            own = [
                scale for scale, layer in zip(scales, config.layers, strict=True) if layer.mixer.attention is not None
            ]
        return [*own, *[ONE] * (len(self.places) - len(own))]

    def runner(self, num_pages: int, captures: Captures = Captures(), states: StateRoom | None = None) -> ModelRunner:
        """A runner with a pool of so many pages, and of states; None: as few as there can be."""
        start = self.start
        states = states or least_states(start.runtime, start.model)
        return ModelRunner(
            model=self.model,
            attention=self.attention,
            pool=KVPool(self.places, self.spec.page_size, num_pages, self.spec.device, self.scales),
            rows=self.rows,
            tp=self.start.tp,
            proposer=self.proposer,
            vectors=self.vectors,
            adapters=self.adapters,
            states=None if states is None else states.pool(start.runtime, self.spec.device),
            captures=captures,
        )


def load_parts(start: Start) -> Parts:
    """Builds them in their order, which follows memory use: weights first."""
    runtime, device = start.runtime, start.device
    load = replace(start.load, merge=read_merged(runtime, start.tp))
    model = load_attribute(BUILDERS[start.model.implementation])(start.model, runtime.model_dir, load)
    adapters = load_adapters(runtime, start.model, model, device, start.tp)
    spec = target_spec(runtime, start.model, device)
    attention = create_attention(runtime.prefill_backend, runtime.decode_backend, spec, runtime.decode_by_batch)
    table = RowTable(
        max_running=runtime.most_decode_entries,
        max_seq_len=runtime.max_seq_len,
        page_size=runtime.page_size,
        device=device,
        columns=spec.columns,
    )
    vocab_size, eos_token_ids = start.model.vocab_size, start.model.eos_token_ids
    rows = RowState.of(table, SamplingRows(table.max_rows, vocab_size, eos_token_ids, runtime.max_seq_len, device))
    proposer = _proposer(start, model, rows)
    vectors = make_vectors(start.runtime, start.model, model, start.tp, device) if sees(start) else None
    return Parts(
        start=start,
        model=model,
        spec=spec,
        attention=attention,
        rows=rows,
        proposer=proposer,
        vectors=vectors,
        adapters=adapters,
    )


def sees(start: Start) -> bool:
    """Whether it encodes images."""
    return start.model.encoder is not None


def _proposer(start: Start, model: Model, rows: RowState) -> DeviceProposer | None:
    kind = proposer_class(start.runtime.config.speculation)
    if kind is None:
        return None
    own = replace(start.load, tp=start.tp.without_shared_memory(), quantization=None, uses_draft_layer=False)
    context = ProposerContext(runtime=start.runtime, rows=rows, target=model, load=own)
    return kind(context)  # type: ignore[arg-type]  # which classes of the table take
