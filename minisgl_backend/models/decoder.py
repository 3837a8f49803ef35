"""The modules of a decoder, built from its description: embedding, layers, final norm, output projection."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import cast

import torch
from torch import nn

from minisgl_backend.attention.base import AttentionSpec
from minisgl_backend.kv.pool import KVPool
from minisgl_backend.kv.state import StatePool
from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.layers.context import ForwardContext
from minisgl_backend.layers.embedding import Embedding, ParallelLMHead
from minisgl_backend.layers.mixer import Mixer, make_mixer
from minisgl_backend.layers.model_input import ModelInput
from minisgl_backend.layers.norm import Norm, SublayerNorms, make_norm
from minisgl_backend.layers.pooling import ClassificationHead
from minisgl_backend.layers.residual import MicroBatches, Residual, join
from minisgl_backend.layers.weights import LayerContext, WeightedLayer
from minisgl_backend.lazy_import import load_attribute
from minisgl_backend.models.borders import Borders
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.weights.method import LinearMethod, process_weights_after_loading
from minisgl_backend.weights.parts import WeightPart

Indices = torch.Tensor | None  # int [num_logits]: which tokens; None: all


class DecoderLayer(nn.Module):
    """A mixer, then an MLP, each with norms around it and added to the residual stream."""

    def __init__(self, layer: LayerConfig, hidden_size: int, layer_context: LayerContext) -> None:
        super().__init__()
        self._tp = layer_context.tp
        self.mixer = make_mixer(layer.mixer, hidden_size, layer_context)
        self.mlp = load_attribute(layer.mlp.module)(layer.mlp, hidden_size, layer_context.at("mlp"))
        names = _NORM_NAMES[layer.norms]
        norms = {
            name: make_norm(hidden_size, layer.norm, name, layer_context)
            for name in filter(None, (name for pair in names for name in pair))
        }
        for name, norm in norms.items():
            self.add_module(name, norm)
        self.layer_scalar = LayerScalar(layer_context) if layer.layer_scalar else None
        self._mixer_norms, self._mlp_norms = (
            SublayerNorms(norms.get(before), norms.get(after), layer.residual_multiplier) for before, after in names
        )

    @property
    def input_norm(self) -> Norm | None:
        """The first thing that happens to its input."""
        return self._mixer_norms.before

    def derive_weights(self) -> None:
        """Computes tensors that are derived from weights. Called when all weights are loaded."""
        self.mixer.derive_weights()
        self.mlp.derive_weights(self.mixer.o_proj, self._mlp_norms)

    def store(self, hidden: torch.Tensor, tokens: ModelInput, slots: torch.Tensor) -> None:
        """Only keeps these tokens: hidden [num_tokens, hidden_size] as in `forward`, slots int [num_tokens]."""
        _, projected = self.mixer.qkv_proj(Residual(hidden, self._tp), self.input_norm)
        self.mixer.store(projected, tokens, slots)

    def forward(
        self, micro_batches: MicroBatches, tokens: ModelInput, ctx: ForwardContext, logits_indices: Indices = None
    ) -> MicroBatches:
        """All tokens, in micro-batches -> all of them, or those at `logits_indices`."""
        micro_batches = self._mixed(micro_batches, tokens, ctx, logits_indices)
        outputs = tuple([self.mlp(one, self._mlp_norms) for one in micro_batches])
        return outputs if self.layer_scalar is None else tuple([self.layer_scalar(one) for one in outputs])

    def _mixed(
        self, micro_batches: MicroBatches, tokens: ModelInput, ctx: ForwardContext, logits_indices: Indices
    ) -> MicroBatches:
        """The residual stream plus mixer(norm(residual)), of all micro-batches together; arguments as of `forward`."""
        mixer, norm = self.mixer, self._mixer_norms.before
        if len(micro_batches) == 1:
            residual, projected = mixer.qkv_proj(micro_batches[0], norm)
            settled: MicroBatches = (residual,)
        else:  # `mix` takes one tensor, which has the rows of all micro-batches
            projected = mixer.qkv_proj.empty_outputs(len(tokens.positions))
            rows = projected.split([one.num_tokens for one in micro_batches])
            pairs = zip(micro_batches, rows, strict=True)
            settled = tuple(mixer.qkv_proj.into(one, norm, out) for one, out in pairs)
        mixed = mixer.mix(projected, tokens, ctx)
        if logits_indices is not None:
            mixed, settled = mixed[logits_indices], (join(settled).at(logits_indices),)
        # A deferred o_proj is multiplied by a kernel that knows no adapters.
        if tokens.by_row is None and self.mlp.takes_o_proj(len(mixed)):
            return (join(settled).deferring(mixed, mixer.o_proj.method),)
        if self._tp.size == 1:
            return (mixer.o_proj(settled[0], mixed, self._mixer_norms),)
        sizes = self._tp.micro_batches(len(mixed))
        all_reduce = self._tp.all_reduce_for(len(mixed), captured=ctx.captured)
        if len(sizes) != len(settled):
            settled = join(settled).split(sizes)
        pairs = zip(settled, mixed.split(sizes), strict=True)
        return tuple(mixer.o_proj(one.reduced_by(all_reduce), x, self._mixer_norms) for one, x in pairs)


class LayerScalar(WeightedLayer):
    """A stored number that multiplies the residual stream."""

    def __init__(self, layer_context: LayerContext) -> None:
        super().__init__()
        self._name = layer_context.name("layer_scalar")
        self.weight = layer_context.parameter(1)

    def forward(self, residual: Residual) -> Residual:
        return residual.times(self.weight)

    def weight_parts(self) -> list[WeightPart]:
        return [WeightPart(name=self._name, shape=(1,), target=self.weight)]


class ParallelDecoderLayer(DecoderLayer):
    """Mixer and MLP in parallel, with the same norm, added to the residual stream together: tensor parallelism needs
    one all-reduce."""

    def derive_weights(self) -> None:
        self.mixer.derive_weights()

    def forward(
        self, micro_batches: MicroBatches, tokens: ModelInput, ctx: ForwardContext, logits_indices: Indices = None
    ) -> MicroBatches:
        settled, normed = zip(*[one.settled(self.input_norm) for one in micro_batches], strict=True)
        residual, x = join(settled), normed[0] if len(normed) == 1 else torch.cat(normed)
        mixed = self.mixer.mix(self.mixer.qkv_proj.of(x, slots=tokens.by_row), tokens, ctx)
        if logits_indices is not None:
            mixed, x, residual = mixed[logits_indices], x[logits_indices], residual.at(logits_indices)
        sizes = self._tp.micro_batches(len(x))
        residual = residual.reduced_by(self._tp.all_reduce_for(len(x), captured=ctx.captured))
        parts = zip(residual.split(sizes), x.split(sizes), mixed.split(sizes), strict=True)
        return tuple([self._plus_both(*one) for one in parts])

    def _plus_both(self, residual: Residual, x: torch.Tensor, mixed: torch.Tensor) -> Residual:
        o_proj, mlp, slots = self.mixer.o_proj, self.mlp, residual.by_row
        return residual.plus(
            lambda added_to: mlp.part(x, o_proj.part(mixed, added_to, slots), slots), self._mixer_norms
        )


def decoder_layer(layer: LayerConfig, hidden_size: int, layer_context: LayerContext) -> DecoderLayer:
    """The module of one layer."""
    return (ParallelDecoderLayer if layer.norms == "parallel" else DecoderLayer)(layer, hidden_size, layer_context)


# Norms before and after the mixer, before and after the MLP, by LayerConfig.norms; "": none.
_NORM_NAMES = {
    "before": (("input_layernorm", ""), ("post_attention_layernorm", "")),
    "after": (("", "post_attention_layernorm"), ("", "post_feedforward_layernorm")),
    "parallel": (("input_layernorm", ""), ("input_layernorm", "")),
    "both": (
        ("input_layernorm", "post_attention_layernorm"),
        ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
}


class Decoder(nn.Module):
    """Embedding, layers and final norm: what checkpoints call `model`."""

    def __init__(self, config: ModelConfig, layers: Iterable[DecoderLayer], layer_context: LayerContext) -> None:
        super().__init__()
        self.embed_tokens = Embedding(
            config.vocab_size, config.hidden_size, "embed_tokens", layer_context, config.embedding_multiplier
        )
        self.layers = nn.ModuleList(layers)
        self._warm_up_layers = warm_up_layers(config)
        self._tp = layer_context.tp
        self.norm = make_norm(config.hidden_size, config.norm, "norm", layer_context)

    def forward(self, tokens: ModelInput, ctx: ForwardContext) -> torch.Tensor:
        """Hidden states after the final norm, [num_logits, hidden_size], of the tokens of `ctx.logits_indices`.

        For the others the last layer's mixer only keeps what later tokens see, unless `ctx.aux` requests all: that
        saves most of one layer in a long prompt's prefill.
        """
        hidden = self.embed_tokens(tokens.token_ids, tokens.by_row)
        if tokens.given is not None:
            hidden = tokens.given.placed(hidden)
        micro_batches: MicroBatches = (Residual(hidden, self._tp, by_row=tokens.by_row),)
        layers = cast("Sequence[DecoderLayer]", self.layers)
        *earlier, last = (layers[index] for index in self._warm_up_layers) if ctx.is_warm_up else layers
        borders = Borders.of_pass(tokens, ctx)
        for index, layer in enumerate(earlier):
            if borders is not None:
                micro_batches = borders.cross(index, micro_batches, layer.input_norm)
            micro_batches = layer(micro_batches, tokens, ctx)
        if borders is None:
            return self._normed(last(micro_batches, tokens, ctx, ctx.logits_indices))
        micro_batches, end = borders.cross(len(earlier), micro_batches, last.input_norm), len(layers)
        if not borders.needs_all(end):
            return self._normed(last(micro_batches, tokens, ctx, ctx.logits_indices))
        hidden = self._normed(borders.add(end, last(micro_batches, tokens, ctx), self.norm))
        borders.keep(end, hidden)
        return hidden if ctx.logits_indices is None else hidden[ctx.logits_indices]

    def _normed(self, micro_batches: MicroBatches) -> torch.Tensor:
        normed = [one.settled(self.norm)[1] for one in micro_batches]
        return normed[0] if len(normed) == 1 else torch.cat(normed)


class CausalLM(nn.Module):
    """A decoder-only language model."""

    def __init__(self, config: ModelConfig, layer_context: LayerContext, max_seq_len: int) -> None:
        super().__init__()
        self.config = config
        self._tp, layer_context = layer_context.tp, layer_context.within(max_seq_len)
        self.ropes = layer_context.ropes or ()  # of its mixers
        layers = (
            decoder_layer(layer, config.hidden_size, layer_context.at(f"model.layers.{index}"))
            for index, layer in enumerate(config.layers)
        )
        self.model = Decoder(config, layers, layer_context.at("model"))
        # A model that does not generate uses its embedding as output projection: what it samples is not used.
        tied = self.model.embed_tokens if config.tie_word_embeddings or not config.generates else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, "lm_head", layer_context, tied)
        self.score = (
            ClassificationHead(config.num_labels, config.hidden_size, "score", layer_context)
            if config.num_labels
            else None
        )

    def forward(self, tokens: ModelInput, ctx: ForwardContext) -> torch.Tensor:
        """See `Decoder`."""
        return self.model(tokens, ctx)

    def bind_attention(self, spec: AttentionSpec, pool: KVPool) -> None:
        """Binds the mixers to this pool."""
        layers, page_states = count(), count(len(spec.places) - len(spec.page_states))
        for mixer in self._mixers():
            mixer.bind(spec, pool, page_states if mixer.has_page_state else layers)

    def bind_states(self, states: StatePool) -> None:
        """Binds the mixers to this pool."""
        layers = count()
        for mixer in self._mixers():
            mixer.bind_states(states, layers)

    def _mixers(self) -> Iterator[Mixer]:
        return (module for module in self.modules() if isinstance(module, Mixer))

    def logits(self, hidden: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [num_sampled, hidden_size] -> [num_sampled, vocab_size], in the model's dtype. slots: of adapters,
        int32 [num_sampled]; None: no row has one."""
        return self._shaped(self.lm_head(hidden, slots))

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden_size] -> [n, num_labels]; only for a model with a classification head."""
        assert self.score is not None, "a request for scores is refused where there is no head"
        return self.score(hidden)

    def decode_logits(self, hidden: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        """`logits` for all rows of a decode step, once per step, where ranks other than 0, which do not sample, may get
        [num_sampled, 0]."""
        return self._shaped(self.lm_head.on_rank_0(hidden, slots))

    def _shaped(self, logits: torch.Tensor) -> torch.Tensor:
        """Applies the model's logits multiplier and soft cap, in place."""
        multiplier, soft_cap = self.config.logits_multiplier, self.config.logits_soft_cap
        if multiplier != 1.0:
            logits.mul_(multiplier)
        return logits if soft_cap is None else logits.div_(soft_cap).tanh_().mul_(soft_cap)

    def derive_weights(self) -> None:
        """Computes what layers derive from weights. Called when all weights are loaded."""
        process_weights_after_loading(self)
        for module in self.modules():
            if isinstance(module, DecoderLayer):
                module.derive_weights()

    def prepare(self, batch_sizes: Sequence[int], longest: int) -> None:
        """Lets the GEMMs choose their kernels for decode steps of these sizes, and for prefills of up to `longest`
        tokens. Called before a capture."""
        alike: dict[tuple[type, tuple[int, int]], list[LinearMethod]] = {}
        for module in self.model.modules():
            if isinstance(module, LinearMethod):
                alike.setdefault((type(module), module.spec.shape), []).append(module)
        longest_micro_batch = self._tp.longest_micro_batch(longest)
        for methods in alike.values():
            methods[0].prepare(methods, batch_sizes, longest_micro_batch)
        self.lm_head.method.prepare([self.lm_head.method], batch_sizes)


def warm_up_layers(config: ModelConfig) -> tuple[int, ...]:
    """Layers, ascending, that launch every kernel of a forward pass: the first, for which nothing is left to add, the
    first of each kind after it, and the last, which may only compute the rows of `logits_indices`."""
    later = {kind: index for index, kind in reversed(list(enumerate(config.layers))) if index > 0}
    return tuple(sorted({0, *later.values(), config.num_layers - 1}))
