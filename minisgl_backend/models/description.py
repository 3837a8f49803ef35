"""The computation of a decoder as data: families (models/families) write it, `models.decoder` builds modules of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from minisgl_backend.errors import ConfigError
from minisgl_backend.layers.config import LayerConfig, MoeConfig
from minisgl_backend.layers.mixer_config import HeadsConfig, NormConfig


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Embedding, layers, final norm and output projection of one model; sizes are those before tensor parallelism."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm: NormConfig  # after the last layer
    max_position: int  # tokens; with linear, dynamic and YaRN's scaling the extended length
    tie_word_embeddings: bool
    embedding_multiplier: float = 1.0  # of the embedding's vectors
    logits_multiplier: float = 1.0
    num_labels: int = 0  # of the classification head that replaces the output projection; 0: there is none
    generates: bool = True  # False: its checkpoints have no output projection, so it only serves embeddings
    logits_soft_cap: float | None = None  # logits become soft_cap * tanh(logits / soft_cap)
    # Tokens of the longest sequence where max_seq_len_override does not ask for more; None: max_position. With dynamic
    # scaling the original context, within which nothing is scaled: beyond it shorter sequences are computed otherwise.
    default_length: int | None = None
    num_draft_layers: int = 0  # MTP layers after the last layer in checkpoints

    def with_layers(self, **changes: Any) -> DecoderConfig:
        """The same with these fields of all layers."""
        return replace(self, layers=tuple(replace(layer, **changes) for layer in self.layers))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def draft_layer(self) -> LayerConfig:
        """The config of each MTP layer: in all families that of the model's last layer with attention, and with experts
        where the model has any."""
        last = next(layer for layer in reversed(self.layers) if layer.mixer.attention is not None)
        mixtures = (layer.mlp for layer in reversed(self.layers) if isinstance(layer.mlp, MoeConfig))
        return replace(last, mlp=next(mixtures, last.mlp))

    @property
    def draft_prefixes(self) -> tuple[str, ...]:
        """Prefixes of the MTP layers' tensor names."""
        return tuple(f"model.layers.{self.num_layers + index}." for index in range(self.num_draft_layers))

    @property
    def attentions(self) -> tuple[HeadsConfig, ...]:
        """Of the layers whose mixer is attention, in their order: they have a part of the pages."""
        return tuple(one for layer in self.layers if (one := layer.mixer.attention) is not None)

    @property
    def head_dims(self) -> tuple[int, ...]:
        """The distinct head sizes of the layers."""
        return tuple(dict.fromkeys(attention.head_dim for attention in self.attentions))

    @property
    def latents(self) -> tuple[int, int] | None:
        """kv_lora_rank and qk_rope_head_dim of a model with latents (MLA) in all layers; None: keys and values."""
        return next((attention.latents for attention in self.attentions), None)

    @property
    def has_states(self) -> bool:
        """Whether layers keep something of a row beside pages."""
        return any(layer.mixer.state is not None for layer in self.layers)

    @property
    def ends_with_pages(self) -> bool:
        """See `MixerConfig`; of the whole model."""
        return any(layer.mixer.ends_with_pages for layer in self.layers)

    @property
    def mixture(self) -> MoeConfig | None:
        """The mixture of the first layer that has one; None: all MLPs are dense."""
        return next((layer.mlp for layer in self.layers if isinstance(layer.mlp, MoeConfig)), None)

    def check(self) -> None:
        """Raises ConfigError for combinations that the engine does not support for any family."""
        if not self.attentions:
            raise ConfigError("config.json: no layer has attention; allowed: one or more that have it")
        if len({attention.latents is None for attention in self.attentions}) > 1:
            raise ConfigError("config.json: some layers keep latents (MLA); allowed: in all layers, or in none")
        for layer in self.layers:
            layer.mixer.check()

    @property
    def layer_weights_per_token(self) -> int:
        """Number of weights of all layers that one token uses; two operations each."""
        size = self.hidden_size
        return sum(layer.mixer.num_weights(size) + size * layer.mlp.rows_per_token() for layer in self.layers)

    def check_tensor_parallel(self, size: int) -> None:
        """Raises ConfigError unless mixers and MLPs split evenly over `size` ranks."""
        for layer in self.layers:
            layer.mixer.check_tp(size)
            layer.mlp.check_tp(size)
