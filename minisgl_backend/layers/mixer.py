"""The mixer of a layer: the sublayer in which tokens see each other, with its first and its last projection."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch

from minisgl_backend.attention.base import AttentionSpec, LayerGroup
from minisgl_backend.kv.layout import PageLayout
from minisgl_backend.kv.pool import KVPool
from minisgl_backend.kv.state import StatePool
from minisgl_backend.layers.context import ForwardContext
from minisgl_backend.layers.linear import ColumnParallelLinear, JoinedColumnParallelLinear, RowParallelLinear
from minisgl_backend.layers.mixer_config import MixerConfig
from minisgl_backend.layers.model_input import ModelInput
from minisgl_backend.layers.weights import LayerContext, WeightedLayer
from minisgl_backend.lazy_import import load_attribute


class Mixer(WeightedLayer, ABC):
    """Projection of the hidden states, `mix`, and output projection. Made of its config, the model's hidden size and a
    `LayerContext` at its path."""

    qkv_proj: ColumnParallelLinear | JoinedColumnParallelLinear
    o_proj: RowParallelLinear
    has_page_state: ClassVar[bool] = False  # see `page_state`

    @classmethod
    def cache(cls, config: MixerConfig, tp_size: int, dtype: torch.dtype, max_seq_len: int) -> LayerGroup | None:
        """What one rank keeps of its tokens in pages, in `dtype`, and how backends attend to them: the group of all
        layers that do so alike, without the layers. None: it keeps nothing there."""
        return None

    @classmethod
    def page_state(cls, config: MixerConfig, tp_size: int, dtype: torch.dtype, max_drafts: int) -> PageLayout | None:
        """What one rank keeps with whole pages, in `dtype`, where a row has up to `max_drafts` drafts in a step. None:
        nothing."""
        return None

    @abstractmethod
    def bind(self, spec: AttentionSpec, pool: KVPool, layers: Iterator[int]) -> None:
        """Binds it to this pool. One that keeps tokens in pages takes the next of `layers`, those of `spec`: its layers
        with attention, or its `page_states` where the mixer has one."""

    def bind_states(self, states: StatePool, layers: Iterator[int]) -> None:
        """Binds it to this pool. One that has a state takes the next of `layers`, those of the pool."""

    def derive_weights(self) -> None:
        """To be called when all weights are loaded."""

    @abstractmethod
    def mix(self, projected: torch.Tensor, tokens: ModelInput, ctx: ForwardContext) -> torch.Tensor:
        """Everything between qkv_proj and o_proj; of attention: norms, rotation, the store into the KV pool, scores.

        projected: output of qkv_proj, [num_tokens, local outputs], may be overwritten -> the input of o_proj,
        [num_tokens, local inputs].
        """

    @abstractmethod
    def store(self, projected: torch.Tensor, tokens: ModelInput, slots: torch.Tensor) -> None:
        """Only keeps these tokens: as `mix` without an output; slots int [num_tokens]."""


def make_mixer(config: MixerConfig, hidden_size: int, layer_context: LayerContext) -> Mixer:
    """That of the layer whose context this is."""
    made: Mixer = load_attribute(config.module)(config, hidden_size, layer_context.at(config.name))
    return made


def cache_of(config: MixerConfig, tp_size: int, dtype: torch.dtype, max_seq_len: int) -> LayerGroup | None:
    """See `Mixer.cache`."""
    found: LayerGroup | None = load_attribute(config.module).cache(config, tp_size, dtype, max_seq_len)
    return found


def page_state_of(config: MixerConfig, tp_size: int, dtype: torch.dtype, max_drafts: int) -> PageLayout | None:
    """See `Mixer.page_state`."""
    found: PageLayout | None = load_attribute(config.module).page_state(config, tp_size, dtype, max_drafts)
    return found
