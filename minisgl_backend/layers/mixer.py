"""The mixer of a layer: the sublayer in which tokens see each other, with its first and its last projection."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch

from minisgl_backend.attention.base import AttentionSpec, LayerGroup
from minisgl_backend.kv.pool import KVPool
from minisgl_backend.layers.context import ForwardContext
from minisgl_backend.layers.linear import ColumnParallelLinear, RowParallelLinear
from minisgl_backend.layers.mixer_config import MixerConfig
from minisgl_backend.layers.model_input import ModelInput
from minisgl_backend.layers.norm import SublayerNorms
from minisgl_backend.layers.residual import MicroBatches, join
from minisgl_backend.layers.weights import LayerContext, WeightedLayer
from minisgl_backend.lazy_import import load_attribute
from minisgl_backend.tensor_parallel import TensorParallel


class Mixer(WeightedLayer, ABC):
    """Projection of the hidden states, `mix`, and output projection. Made of its config, the model's hidden size and a
    `LayerContext` at its path."""

    qkv_proj: ColumnParallelLinear
    o_proj: RowParallelLinear
    _tp: TensorParallel

    @classmethod
    def cache(cls, config: MixerConfig, tp_size: int, dtype: torch.dtype, max_seq_len: int) -> LayerGroup | None:
        """What one rank keeps of its tokens in pages, in `dtype`, and how backends attend to them: the group of all
        layers that do so alike, without the layers. None: it keeps nothing there."""
        return None

    @abstractmethod
    def bind(self, spec: AttentionSpec, pool: KVPool, layers: Iterator[int]) -> None:
        """Binds it to this pool. One that keeps tokens in pages takes the next of `layers`, those of `spec`."""

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

    def forward(
        self,
        micro_batches: MicroBatches,
        norms: SublayerNorms,
        tokens: ModelInput,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
        *,
        defers_o_proj: Callable[[int], bool],
    ) -> MicroBatches:
        """The residual stream plus mixer(norm(residual)), of all micro-batches together.

        `logits_indices`, int [num_logits]: only these tokens are returned; all are kept.
        `defers_o_proj`: whether the next sublayer runs o_proj, at this token count.
        """
        if len(micro_batches) == 1:
            residual, projected = self.qkv_proj(micro_batches[0], norms.before)
            settled: MicroBatches = (residual,)
        else:  # `mix` takes one tensor, which has the rows of all micro-batches
            projected = self.qkv_proj.empty_outputs(len(tokens.positions))
            rows = projected.split([one.num_tokens for one in micro_batches])
            pairs = zip(micro_batches, rows, strict=True)
            settled = tuple(self.qkv_proj.into(one, norms.before, out) for one, out in pairs)
        mixed = self.mix(projected, tokens, ctx)
        if logits_indices is not None:
            mixed, settled = mixed[logits_indices], (join(settled).at(logits_indices),)
        if defers_o_proj(len(mixed)):
            return (join(settled).deferring(mixed, self.o_proj.method),)
        if self._tp.size == 1:
            return (self.o_proj(settled[0], mixed, norms),)
        sizes = self._tp.micro_batches(len(mixed))
        all_reduce = self._tp.all_reduce_for(len(mixed), captured=ctx.captured)
        if len(sizes) != len(settled):
            settled = join(settled).split(sizes)
        pairs = zip(settled, mixed.split(sizes), strict=True)
        return tuple(self.o_proj(one.reduced_by(all_reduce), x, norms) for one, x in pairs)


def make_mixer(config: MixerConfig, hidden_size: int, layer_context: LayerContext) -> Mixer:
    """That of the layer whose context this is."""
    made: Mixer = load_attribute(config.module)(config, hidden_size, layer_context.at(config.name))
    return made


def cache_of(config: MixerConfig, tp_size: int, dtype: torch.dtype, max_seq_len: int) -> LayerGroup | None:
    """See `Mixer.cache`."""
    found: LayerGroup | None = load_attribute(config.module).cache(config, tp_size, dtype, max_seq_len)
    return found
