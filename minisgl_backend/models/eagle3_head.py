"""The modules of an EAGLE-3 head (Li et al., 2025); `models.draft_head` describes its inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import torch
from torch import nn

from minisgl_backend.attention.base import AttentionSpec
from minisgl_backend.kv.pool import KVPool
from minisgl_backend.layers.attention import SelfAttention
from minisgl_backend.layers.config import MlpConfig
from minisgl_backend.layers.context import ForwardContext
from minisgl_backend.layers.embedding import Embedding, ParallelLMHead
from minisgl_backend.layers.linear import RowParallelLinear
from minisgl_backend.layers.mlp import GatedMLP
from minisgl_backend.layers.model_input import ModelInput
from minisgl_backend.layers.norm import SublayerNorms, make_norm
from minisgl_backend.layers.residual import Residual
from minisgl_backend.layers.weights import LayerContext, WeightedLayer
from minisgl_backend.models.build import layer_context_of
from minisgl_backend.models.draft_head import DraftHead
from minisgl_backend.models.eagle3 import NUM_STATES, Eagle3Config
from minisgl_backend.models.load_config import LoadConfig
from minisgl_backend.weights.files import Checkpoint
from minisgl_backend.weights.method import LinearMethod, LinearOutput, LinearSpec
from minisgl_backend.weights.parts import WeightPart

_EMBEDDING, _VOCABULARY = "embed_tokens.weight", "d2t"
_DRAFTED = "t2d"  # mask of the target's tokens that can be drafted: redundant, d2t has the ids


class DraftVocabulary(WeightedLayer):
    """The target's id of each token of the draft vocabulary; stored as the difference to the draft id (d2t)."""

    def __init__(self, size: int, layer_context: LayerContext) -> None:
        super().__init__()
        self._name = layer_context.name(_VOCABULARY)
        self.ids = layer_context.parameter(size, dtype=torch.int64)

    def derive(self, vocab_size: int) -> None:
        """Called once, when they are loaded."""
        self.ids.data.add_(torch.arange(len(self.ids), device=self.ids.device))
        self.ids.data.clamp_(0, vocab_size - 1)

    def to_target_vocab(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """As of `Eagle3Head`."""
        lowest = torch.finfo(logits.dtype).min
        return logits.new_full((len(logits), vocab_size), lowest).index_copy_(1, self.ids, logits)

    def weight_parts(self) -> list[WeightPart]:
        shape = tuple(self.ids.shape)
        return [WeightPart(name=self._name, shape=shape, target=self.ids, dtypes=(torch.int64, torch.int32))]

    def fill_with_noise(self, generator: torch.Generator) -> None:
        self.ids.data.zero_()


class MidLayer(nn.Module):
    """The head's one layer, named as in published checkpoints."""

    def __init__(self, config: Eagle3Config, layer_context: LayerContext) -> None:
        super().__init__()
        layer, size = config.layers[0], config.hidden_size
        assert isinstance(layer.mlp, MlpConfig), "as heads are read"
        self._tp = layer_context.tp
        self._norm_before_residual = config.norm_before_residual
        context = layer_context.at("self_attn")
        self.self_attn = SelfAttention(layer.mixer, size, context, input_size=2 * size)
        self.mlp = GatedMLP(layer.mlp, size, layer_context.at("mlp"))
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            make_norm(size, layer.norm, name, layer_context)
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        )
        self._mlp_norms = SublayerNorms(self.post_attention_layernorm)

    def keep(self, embedded: torch.Tensor, hidden: torch.Tensor, tokens: ModelInput, slots: torch.Tensor) -> None:
        """Only stores keys and values of these positions; slots int [num_tokens], the others as in `forward`."""
        self.self_attn.store(self._projected(embedded, self.hidden_norm(hidden)), tokens, slots)

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, tokens: ModelInput, ctx: ForwardContext
    ) -> Residual:
        """embedded and hidden [num_tokens, hidden_size] -> the layer's hidden states."""
        normed = self.hidden_norm(hidden)
        # The residual stream may be overwritten, so it is copied; here, and not between GEMMs and attention, where a
        # kernel without early launch would cost more.
        residual = Residual(normed if self._norm_before_residual else hidden.clone(), self._tp)
        qkv = self._projected(embedded, normed)
        attended = self.self_attn.mix(qkv, tokens, ctx)
        all_reduce = self._tp.all_reduce_for(len(attended), captured=ctx.captured)
        o_proj: RowParallelLinear = self.self_attn.o_proj
        residual = o_proj(residual.reduced_by(all_reduce), attended, SublayerNorms(None))
        return self.mlp(residual, self._mlp_norms)

    def _projected(self, embedded: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values; normed: of the hidden states, [num_tokens, hidden_size]."""
        return self.self_attn.qkv_proj.of(torch.cat([self.input_layernorm(embedded), normed], dim=-1))


class Eagle3Head(DraftHead):
    """A head on one rank. With tensor parallelism its layer and its output projection are split like the target's; the
    projection of the target's states is replicated on each rank."""

    def __init__(
        self, config: Eagle3Config, layer_context: LayerContext, max_seq_len: int, embedding: Embedding | None
    ) -> None:
        """embedding: the target's; None: the head has its own."""
        super().__init__()
        self.config: Eagle3Config = config
        self.states_size = NUM_STATES * config.target_hidden_size
        self.fc: LinearMethod = layer_context.methods.plain_linear(_whole("fc", config), None)
        self.midlayer = MidLayer(config, layer_context.within(max_seq_len).at("midlayer"))
        self.norm = make_norm(config.hidden_size, config.norm, "norm", layer_context)
        self.lm_head = ParallelLMHead(config.draft_vocab_size, config.hidden_size, "lm_head", layer_context, None)
        is_whole = config.draft_vocab_size == config.vocab_size
        self.vocabulary = None if is_whole else DraftVocabulary(config.draft_vocab_size, layer_context)
        self.embed_tokens: Embedding | None = None
        if embedding is None:
            self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, "embed_tokens", layer_context)
        # Without its multiplier; no module of its own.
        self._embedded: Callable[[torch.Tensor], torch.Tensor] = (embedding or self.embed_tokens).rows  # type: ignore[union-attr]

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        return self.fc.apply_weights(states)

    def keep(self, tokens: ModelInput, hidden: torch.Tensor, slots: torch.Tensor) -> None:
        self.midlayer.keep(self._embedded(tokens.token_ids), hidden, tokens, slots)

    def forward(
        self, tokens: ModelInput, hidden: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = self.midlayer(self._embedded(tokens.token_ids), hidden, tokens, ctx)
        residual, normed = residual.settled(self.norm)
        _, states = residual.settled(None)
        return self.lm_head(normed), states

    def to_target_vocab(self, logits: torch.Tensor) -> torch.Tensor:
        vocabulary, size = self.vocabulary, self.config.vocab_size
        return logits if vocabulary is None else vocabulary.to_target_vocab(logits, size)

    def bind_attention(self, spec: AttentionSpec, pool: KVPool) -> None:
        self.midlayer.self_attn.bind(spec, pool, count())

    def prepare(self, batch_sizes: Sequence[int], longest: int) -> None:
        for module in self.modules():
            if isinstance(module, LinearMethod):
                module.prepare([module], batch_sizes, 0 if module is self.lm_head.method else longest)

    def derive_weights(self) -> None:
        super().derive_weights()
        if self.vocabulary is not None:
            self.vocabulary.derive(self.config.vocab_size)


def build_eagle3_head(
    config: Eagle3Config, model_dir: str | Path, load: LoadConfig, *, embedding: Embedding
) -> Eagle3Head:
    """The head of one rank, ready to run; `embedding`: the target's, which it shares unless its checkpoint has one.

    Raises ConfigError naming tensors that are missing, unexpected or of another shape than config.json says.
    """
    layer_context = layer_context_of(config, config.quantization, load)
    checkpoint = None if load.dummy_weights else Checkpoint(Path(model_dir), config.tensor_names)
    shared = None if checkpoint is not None and _EMBEDDING in checkpoint else embedding
    head = Eagle3Head(config, layer_context, load.max_seq_len, shared).eval()
    head.load(checkpoint, config.tensor_names, lambda name: name in (_VOCABULARY, _DRAFTED))
    return head


def _whole(name: str, config: Eagle3Config) -> LinearSpec:
    size, inputs = config.hidden_size, NUM_STATES * config.target_hidden_size
    output = LinearOutput(name=name, size=size, start=0, local=size)
    return LinearSpec(outputs=(output,), input_size=inputs, local_inputs=inputs)
