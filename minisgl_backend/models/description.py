"""The computation of a decoder as data: families (models/families) write it, `models.decoder` builds modules of it."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl_backend.errors import ConfigError
from minisgl_backend.layers.config import (
    AttentionConfig,
    LatentAttentionConfig,
    LayerConfig,
    MlpConfig,
    MoeConfig,
    NormConfig,
    UngatedMlpConfig,
)


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

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def draft_layer(self) -> LayerConfig:
        """The config of each MTP layer: in all families that of the model's last layer."""
        return self.layers[-1]

    @property
    def draft_prefixes(self) -> tuple[str, ...]:
        """Prefixes of the MTP layers' tensor names."""
        return tuple(f"model.layers.{self.num_layers + index}." for index in range(self.num_draft_layers))

    @property
    def head_dims(self) -> tuple[int, ...]:
        """The distinct head sizes of the layers."""
        return tuple(dict.fromkeys(layer.attention.head_dim for layer in self.layers))

    @property
    def latents(self) -> tuple[int, int] | None:
        """kv_lora_rank and qk_rope_head_dim of a model with latents (MLA) in all layers; None: keys and values."""
        attention = self.layers[0].attention
        if isinstance(attention, AttentionConfig):
            return None
        return attention.kv_lora_rank, attention.qk_rope_head_dim

    @property
    def mixture(self) -> MoeConfig | None:
        """The mixture of the first layer that has one; None: all MLPs are dense."""
        return next((layer.mlp for layer in self.layers if isinstance(layer.mlp, MoeConfig)), None)

    def check(self) -> None:
        """Raises ConfigError for combinations that the engine does not support for any family."""
        if len({type(layer.attention) for layer in self.layers}) > 1:
            raise ConfigError("config.json: some layers keep latents (MLA); allowed: in all layers, or in none")
        for layer in self.layers:
            attention = layer.attention
            if attention.num_q_heads % attention.num_kv_heads:
                raise ConfigError(
                    f"config.json: num_key_value_heads is {attention.num_kv_heads}; allowed: a divisor of "
                    f"num_attention_heads ({attention.num_q_heads})"
                )
            if attention.window is not None and attention.chunk is not None:
                raise ConfigError("config.json: a layer has a window and chunks of attention; allowed: one of them")
            if attention.head_dim % 2:
                raise ConfigError(f"config.json: head_dim is {attention.head_dim}; allowed: an even number")

    @property
    def layer_weights_per_token(self) -> int:
        """Number of weights of all layers that one token uses; two operations each."""
        heads = sum(attention_weights(layer.attention, self.hidden_size) for layer in self.layers)
        return heads + self.hidden_size * sum(_mlp_rows_per_token(layer) for layer in self.layers)

    def check_tensor_parallel(self, size: int) -> None:
        """Raises ConfigError unless heads and MLPs split evenly over `size` ranks. With more ranks than KV heads,
        several ranks have the same head."""
        for layer in self.layers:
            sizes = {"num_attention_heads": layer.attention.num_q_heads}
            if size % layer.attention.num_kv_heads:
                sizes["num_key_value_heads"] = layer.attention.num_kv_heads
            if isinstance(layer.mlp, (MlpConfig, UngatedMlpConfig)):
                sizes["intermediate_size"] = layer.mlp.intermediate_size
            else:
                sizes["moe_intermediate_size"] = layer.mlp.intermediate_size
                sizes["shared_expert_intermediate_size"] = layer.mlp.shared_intermediate_size
            for key, value in sizes.items():
                if value % size:
                    or_multiple = " or a multiple" if key == "num_key_value_heads" else ""
                    raise ConfigError(
                        f"tp is {size}; allowed: a divisor{or_multiple} of the model's {key}, which is {value}"
                    )


def attention_weights(attention: AttentionConfig | LatentAttentionConfig, hidden_size: int) -> int:
    """Number of weights of the linear layers around attention."""
    a = attention
    if isinstance(a, AttentionConfig):
        return 2 * (a.num_q_heads + a.num_kv_heads) * a.head_dim * hidden_size
    qk_dim = a.qk_nope_head_dim + a.qk_rope_head_dim
    queries = a.num_q_heads * qk_dim * (a.q_lora_rank or hidden_size) + (a.q_lora_rank or 0) * hidden_size
    expanded = a.num_q_heads * (a.qk_nope_head_dim + a.v_head_dim) * a.kv_lora_rank
    return queries + expanded + (a.head_dim + a.num_q_heads * a.v_head_dim) * hidden_size


def _mlp_rows_per_token(layer: LayerConfig) -> int:
    """Number of weight rows, each of hidden_size, that one token uses in one layer's MLP."""
    mlp = layer.mlp
    if isinstance(mlp, MlpConfig):
        return 3 * mlp.intermediate_size
    if isinstance(mlp, UngatedMlpConfig):
        return 2 * mlp.intermediate_size
    experts = 3 * mlp.intermediate_size * mlp.experts_per_token + mlp.num_experts
    return experts + 3 * mlp.shared_intermediate_size + mlp.shared_gate
