"""The interface of all attention backends, and its inputs.

Metadata is prepared once per step (`plan_*`), never per layer; prefill and decode are separate. A backend that
`supports_graphs` has three more methods: `allocate_graph` once, `plan_capture` before a batch size is captured,
`plan_replay` before each replay, which is on the critical path and must neither synchronise nor allocate. `plan_prompt`
is for captured passes of a single prompt.

Keys and values are read here and written by `Ops.rope_store`, except where `decode_with_rope` stores the new token's
itself; both find the pool in the `AttentionLayer`. `kv.layout` describes its layout and dtype.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from minisgl_backend.arrays import Int32Array
from minisgl_backend.attention.layer import AttentionLayer, LatentHeads, LatentProjection
from minisgl_backend.attention.needs import MHA, MLA
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.ops import QKNormRope
from minisgl_backend.kernels.recurrent.calls import ChunkBatch, WindowBatch
from minisgl_backend.kv.groups import CacheGroup, ColumnLayout
from minisgl_backend.kv.layout import CacheLayout, LayerKV, PageLayout
from minisgl_backend.kv.pool import LayerPlace

Inputs = TypeVar("Inputs", bound="PagedInputs")
Plan = Any  # a backend's metadata for one step; opaque to callers

# Tokens, including cached ones, up to which the attention of a single prompt is inside a captured pass. For longer ones
# kernels split a sequence's keys over more multiprocessors, but a graph has one grid for all lengths.
PROMPT_GRAPH_CONTEXT = 8192


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers with the same attention: one backend serves them, with one plan per step. Sizes are those of one rank."""

    layers: tuple[int, ...] = ()  # which of the model's layers with attention, counted without others
    num_q_heads: int
    kv: CacheLayout
    window: int | None = None  # tokens that a query sees, including itself; None: all up to itself
    chunk: int | None = None  # chunk size in tokens; a query sees its own chunk, up to itself; None: no chunks
    scale: float | None = None  # of the scores; None: 1 / sqrt(head_dim)
    soft_cap: float | None = None  # scores become soft_cap * tanh(scores / soft_cap)
    sinks: bool = False  # each query head has a logit that takes part in the softmax and has no value
    latent: LatentHeads | None = None  # head sizes for MLA; None: the cache has keys and values
    cache_group: int = 0  # that of all these layers (`kv.groups`)

    @property
    def kind(self) -> str:
        """In `attention.registry.KINDS`."""
        return MHA if self.latent is None else MLA

    @property
    def sees_all(self) -> bool:
        """Whether a query sees all earlier tokens."""
        return self.window is None and self.chunk is None

    @property
    def num_kv_heads(self) -> int:
        return self.kv.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.kv.head_dim

    @property
    def q_head_dim(self) -> int:
        """Size of a query head as attention's input."""
        return self.head_dim if self.latent is None else self.latent.qk_dim

    @property
    def v_head_dim(self) -> int:
        """Of what it returns."""
        return self.head_dim if self.latent is None else self.latent.v_dim

    @property
    def softmax_scale(self) -> float:
        return self.scale if self.scale is not None else 1.0 / math.sqrt(self.head_dim)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Attention of a model's layers on one rank; every layer is in one group. Constant while the engine runs."""

    groups: tuple[LayerGroup, ...] = ()
    page_size: int  # tokens
    max_seq_len: int  # tokens
    max_rows: int  # rows of the page table, including the padding row
    dtype: torch.dtype  # of queries and of attention's output
    device: torch.device
    cache_groups: tuple[CacheGroup, ...] = (CacheGroup(),)  # of the model
    # What other layers keep with whole pages, in their order. With any there is one cache group, of all tokens.
    page_states: tuple[PageLayout, ...] = ()
    max_drafts: int = 0  # of a row in a step
    flashinfer_tensor_cores: bool | None = None  # whether FlashInfer decodes with tensor cores; None: as measured

    @cached_property
    def group_of_layer(self) -> tuple[int, ...]:
        """The index in `groups`, by layer."""
        by_layer = {layer: index for index, group in enumerate(self.groups) for layer in group.layers}
        return tuple(by_layer[layer] for layer in range(len(by_layer)))

    @cached_property
    def places(self) -> tuple[LayerPlace, ...]:
        """By layer: its place in a page of the pool; those of `page_states` follow."""
        seen = [0] * len(self.cache_groups)
        places = []
        for index in self.group_of_layer:
            group = self.groups[index]
            places.append(LayerPlace(group.kv, seen[group.cache_group], self.cache_groups[group.cache_group].split))
            seen[group.cache_group] += 1
        states = (LayerPlace(layout, max(seen) + index) for index, layout in enumerate(self.page_states))
        return (*places, *states)

    @cached_property
    def columns(self) -> ColumnLayout:
        """Which pages a column of a row has."""
        return ColumnLayout(self.cache_groups)

    def layer(
        self,
        index: int,
        kv: LayerKV,
        sinks: torch.Tensor | None = None,
        latent: LatentProjection | None = None,
    ) -> AttentionLayer:
        """The `AttentionLayer` of one layer. sinks (float32 [num_q_heads]) and latent: where its group has them."""
        number = self.group_of_layer[index]
        group = self.groups[number]
        return AttentionLayer(
            index=index, group=number, cache_group=group.cache_group, num_q_heads=group.num_q_heads,
            num_kv_heads=group.num_kv_heads, head_dim=group.head_dim, window=group.window, chunk=group.chunk,
            scale=group.softmax_scale, soft_cap=group.soft_cap, sinks=sinks, kv=kv, latent=latent,
        )  # fmt: skip

    @cached_property
    def max_pages_per_row(self) -> int:
        return self.columns.kernel_pages_for(self.max_seq_len, self.page_size)


@dataclass(frozen=True)
class TokenPages:
    """The tokens of a step, those of a row one after the other, and the pages of their rows."""

    rows: torch.Tensor  # int32 [num_tokens]
    ends: torch.Tensor  # int32 [num_tokens]; tokens of the row up to this one, which is the last of them
    page_table: torch.Tensor  # int32 [max_rows, max_pages_per_row]; live, shared by all steps


@dataclass(frozen=True, kw_only=True)
class PagedInputs:
    """Where the tokens of sequences are in the pool."""

    page_table: torch.Tensor  # int32 [max_rows, max_pages_per_row], device; live, shared by all steps
    page_tables: tuple[torch.Tensor, ...] = ()  # by cache group, where there are several; `page_table` is one of them

    def of(self: Inputs, cache_group: int) -> Inputs:
        """The same inputs with the page table of this group."""
        return replace(self, page_table=self.page_tables[cache_group]) if self.page_tables else self


@dataclass(frozen=True, kw_only=True)
class PrefillInputs(PagedInputs):
    """The prefill part of one step: ragged queries of sequences that may have cached tokens before them.

    Sequence i has query tokens cu_seqlens_q[i] to cu_seqlens_q[i+1]; they are the last of its kv_lens[i] tokens
    (causal, aligned at the end), whose keys and values are already in the pool when `prefill` runs.
    """

    cu_seqlens_q: torch.Tensor  # int32 [num_seqs + 1], device
    kv_lens: torch.Tensor  # int32 [num_seqs], device; cached and new tokens
    rows: torch.Tensor  # int32 [num_seqs], device; rows of page_table
    cu_seqlens_q_host: Int32Array
    kv_lens_host: Int32Array
    rows_host: Int32Array
    chunks: ChunkBatch | None = None  # the same tokens, of a model with states
    causal: bool = True  # False: a query sees all kv_lens tokens, those behind it, too; a window bounds those before it
    # Where some tokens see later ones: the queries in pieces (`attention.pieces`), which together are all of them.
    pieces: tuple[Any, ...] = ()
    whole_windowless: bool = False  # layers without a window have no pieces: all tokens are causal there

    def expanded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of every token its row and the tokens up to it; int32 [num_tokens] each, on the device."""
        count, starts = int(self.cu_seqlens_q_host[-1]), self.cu_seqlens_q
        sequences = torch.repeat_interleave(starts.diff(), output_size=count)
        token = torch.arange(1, count + 1, dtype=torch.int32, device=starts.device)
        return self.rows[sequences], (self.kv_lens - starts[1:])[sequences] + token

    @property
    def max_q_len(self) -> int:
        """Query tokens of the sequence that has the most."""
        return int((self.cu_seqlens_q_host[1:] - self.cu_seqlens_q_host[:-1]).max())


@dataclass(frozen=True, kw_only=True)
class PromptInputs(PagedInputs):
    """A single prompt, in buffers on the device that are filled before each replay of a captured pass. Its query tokens
    are the last of its kv_lens tokens, as in PrefillInputs; tables have one row, for PROMPT_GRAPH_CONTEXT tokens."""

    num_tokens: int  # largest number of query tokens
    cu_seqlens_q: torch.Tensor  # int32 [2]; 0 and the number of query tokens
    kv_lens: torch.Tensor  # int32 [1]; at most PROMPT_GRAPH_CONTEXT


class RowStates(NamedTuple):
    """Where the state of each row is, on the device; live, shared by all steps."""

    slot: torch.Tensor  # int32 [max_rows]
    border: torch.Tensor  # int32 [max_rows]: tokens that it stands for


@dataclass(frozen=True, kw_only=True)
class DecodeInputs(PagedInputs):
    """The decode part of one step: one query token per sequence, the last of its kv_lens tokens.

    For graph replay the batch is padded: padding entries have the padding row (max_rows - 1, whose pages are all the
    padding page) and kv_lens 1.
    """

    kv_lens: torch.Tensor  # int32 [batch], device
    rows: torch.Tensor  # int32 [batch], device; with drafts a row has several entries, one after the other
    kv_lens_host: Int32Array
    rows_host: Int32Array
    # Some entries see keys of others: all keys are stored before attention, and `decode_with_rope` cannot be used.
    has_drafts: bool = False
    states: RowStates | None = None  # of a model with states

    @property
    def window(self) -> WindowBatch | None:
        """These entries, of a model with states."""
        if self.states is None:
            return None
        pdl = DeviceFacts.of(self.rows.device).dependent_launch
        return WindowBatch(self.rows, self.kv_lens, *self.states, self.has_drafts, pdl)

    @property
    def batch_size(self) -> int:
        return len(self.kv_lens_host)


class AttentionBackend(ABC):
    """Kernels for one group of a spec's layers.

    The constructor raises ConfigError for what it cannot serve: at start, never later.
    """

    supports_graphs: ClassVar[bool] = False  # whether decode runs under CUDA graphs

    def __init__(self, spec: AttentionSpec, group: LayerGroup) -> None:
        self.spec = spec
        self.group = group

    @classmethod
    def for_groups(cls, spec: AttentionSpec, groups: Sequence[LayerGroup]) -> list[AttentionBackend]:
        """One backend for each of these groups. They do not run concurrently, so large workspaces are shared."""
        return [cls(spec, group) for group in groups]

    @abstractmethod
    def plan_prefill(self, inputs: PrefillInputs) -> Plan:
        """Prepares the metadata of one step's prefill part. Host work and uploads belong here."""

    @abstractmethod
    def prefill(self, layer: AttentionLayer, q: torch.Tensor, plan: Plan) -> torch.Tensor:
        """q [num_tokens, num_q_heads, q_head_dim] -> attention output [num_tokens, num_q_heads, v_head_dim], causal."""

    def prefill_into(self, layer: AttentionLayer, q: torch.Tensor, plan: Plan, out: torch.Tensor) -> None:
        """`prefill` with its result in `out`."""
        out.copy_(self.prefill(layer, q, plan))

    @abstractmethod
    def plan_decode(self, inputs: DecodeInputs) -> Plan:
        """Prepares the metadata of one step's decode part, without a graph."""

    @abstractmethod
    def decode(self, layer: AttentionLayer, q: torch.Tensor, plan: Plan) -> torch.Tensor:
        """q [batch, num_q_heads, q_head_dim] -> attention output [batch, num_q_heads, v_head_dim]. Never plans, never
        syncs."""

    def decode_into(self, layer: AttentionLayer, q: torch.Tensor, plan: Plan, out: torch.Tensor) -> None:
        """`decode` with its result in `out`."""
        out.copy_(self.decode(layer, q, plan))

    def decode_batches(self, max_batch: int) -> tuple[int, ...]:
        """Batch sizes up to max_batch, ascending: the smallest for each distinct set of compiled kernels."""
        return (1,)

    def length_bounds(self, batch_size: int) -> tuple[int, ...]:
        """Mean context lengths above which decode steps of this many rows take other kernels, ascending: below, between
        and above them a graph each is captured."""
        return ()

    def fuses_rope(self, plan: Plan) -> bool:
        """Whether decode_with_rope serves this decode plan, and is faster."""
        return False

    def decode_with_rope(
        self, layer: AttentionLayer, qkv: torch.Tensor, rotation: QKNormRope, plan: Plan
    ) -> torch.Tensor:
        """`Ops.rope_store` and `decode` in one kernel, for backends that have it.

        qkv [batch, (num_q_heads + 2 * num_kv_heads) * head_dim] -> [batch, num_q_heads, head_dim]; each token's keys
        and values are stored in the slot of the last of its sequence's kv_lens tokens.
        """
        raise NotImplementedError(f"{type(self).__name__} does not rotate")

    def allocate_graph(self, max_batch_size: int) -> None:  # noqa: B027
        """Allocates every buffer that captured graphs will read; none where the constructor's serve. Again for another
        set of graphs: buffers that are large enough stay where they are."""

    def plan_capture(self, inputs: DecodeInputs) -> Plan:
        """The plan for the capture of this batch size; `inputs` has the static buffers."""
        return self.plan_decode(inputs)

    def plan_replay(self, inputs: DecodeInputs) -> None:  # noqa: B027
        """Updates the buffers of the captured plan of this batch size; `inputs` as in plan_capture, with this step's
        host arrays. Nothing where kernels read lengths and pages from the device."""

    @property
    def captures_prompts(self) -> bool:
        """Whether `plan_prompt` is there."""
        return False

    def plan_prompt(self, inputs: PromptInputs) -> Plan:
        """The plan for the capture of a single prompt's pass, valid for any prompt in the buffers at a replay;
        `prefill_into` does not write the rows of padding tokens."""
        raise NotImplementedError(f"{type(self).__name__} does not capture prompts")


class WritingBackend(AttentionBackend):
    """A backend whose kernels write into a tensor that they are given: it has `prefill_into` and `decode_into`."""

    @abstractmethod
    def prefill_into(self, layer: AttentionLayer, q: torch.Tensor, plan: Plan, out: torch.Tensor) -> None: ...

    @abstractmethod
    def decode_into(self, layer: AttentionLayer, q: torch.Tensor, plan: Plan, out: torch.Tensor) -> None: ...

    def prefill(self, layer: AttentionLayer, q: torch.Tensor, plan: Plan) -> torch.Tensor:
        out = self._output(q)
        self.prefill_into(layer, q, plan, out)
        return out

    def decode(self, layer: AttentionLayer, q: torch.Tensor, plan: Plan) -> torch.Tensor:
        out = self._output(q)
        self.decode_into(layer, q, plan, out)
        return out

    def _output(self, q: torch.Tensor) -> torch.Tensor:
        return torch.empty((*q.shape[:2], self.group.v_head_dim), dtype=q.dtype, device=q.device)
