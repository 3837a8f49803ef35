"""What mixes the tokens of a layer, as data: self-attention in its variants, latent attention (MLA). The gated delta
rule is in `layers.gated_delta_config`.

Another kind is a subclass of `MixerConfig` and the module that it names; nothing else asks which kind a layer has.
Needs neither torch nor transformers, as `layers.config`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from minisgl_backend.errors import ConfigError
from minisgl_backend.kv.state_config import StateConfig


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. Comments name the types that use a field."""

    type: str = "default"  # default, linear, dynamic, llama3, yarn, longrope or proportional
    theta: float = 10000.0
    rotary_dim: int | None = None  # leading dimensions of a head that are rotated; None: all (partial rotary)
    interleaved: bool = False  # pairs are neighbouring dimensions (GPT-J), not i and i + rotary_dim / 2 (NeoX)
    factor: float = 1.0  # linear, dynamic, llama3, yarn, longrope, proportional
    original_max_position: int = 0  # linear, dynamic, llama3, yarn, longrope; tokens
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope; None: computed from the other fields
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    short_factor: tuple[float, ...] = ()  # longrope; one per pair of dimensions
    long_factor: tuple[float, ...] = ()  # longrope
    # M-RoPE (Qwen, 2024: Qwen2-VL): by pair, which of a token's positions (time, row, column) turns it; (): it has one.
    axes: tuple[int, ...] = ()
    rotated_pairs: int = 0  # proportional: only the first pairs of a head are rotated (Gemma 4)


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """RMSNorm (Zhang and Sennrich, 2019), or LayerNorm (Ba et al., 2016)."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    weight: bool = True  # False: LayerNorm without one (OLMo), or a norm of heads (Llama 4)
    bias: bool = False  # of LayerNorm
    weight_offset: float = 0.0  # added to the stored weight; 1 for Gemma, which stores weight - 1


class MixerConfig(ABC):
    """What mixes the tokens of one layer. Subclasses are frozen dataclasses, with the sizes of the whole model."""

    module: ClassVar[str]  # MODULE:CLASS of the `layers.mixer.Mixer` that runs it, imported when a model is built
    name: ClassVar[str] = "self_attn"  # of its part of a layer in checkpoints
    rope: RopeConfig | None  # None: no position embedding (NoPE)

    @property
    def attention(self) -> HeadsConfig | None:
        """Itself, where backends compute it and its tokens are kept in pages; None for other kinds."""
        return None

    @property
    def ends_with_pages(self) -> bool:
        """Whether prompt chunks end with their prompt or with a page, since a chunk reads what is kept at the end of
        the page before it."""
        return False

    @property
    def state(self) -> StateConfig | None:
        """What it keeps of a row beside pages; None: nothing."""
        return None

    @abstractmethod
    def num_weights(self, hidden_size: int) -> int:
        """Of its linear layers."""

    def check(self) -> None:  # noqa: B027  not every kind has something to refuse
        """Raises ConfigError for what the engine supports for no family."""

    @abstractmethod
    def check_tp(self, size: int) -> None:
        """Raises ConfigError unless it splits over `size` ranks."""


@dataclass(frozen=True, kw_only=True)
class HeadsConfig(MixerConfig):
    """Attention of one layer, as its backends and its cache see it."""

    num_q_heads: int
    num_kv_heads: int  # in the cache
    head_dim: int  # likewise
    rope: RopeConfig | None
    window: int | None = None  # tokens that a token sees, including itself; None: all up to itself
    chunk: int | None = None  # chunk size in tokens; a token sees its own chunk, up to itself; None: no chunks
    scale: float | None = None  # of the scores; None: head_dim ** -0.5
    soft_cap: float | None = None  # scores become soft_cap * tanh(scores / soft_cap)
    sinks: bool = False  # each head has a learned logit that takes part in the softmax and has no value (gpt-oss)

    @property
    def attention(self) -> HeadsConfig:
        return self

    @property
    def rope_head_dim(self) -> int:
        """Dimensions of a head that the rope table covers."""
        return self.head_dim

    @property
    def latents(self) -> tuple[int, int] | None:
        """Sizes of the cached latent and of its rotated key (MLA); None: the cache has keys and values."""
        return None

    def check(self) -> None:
        if self.num_q_heads % self.num_kv_heads:
            raise ConfigError(
                f"config.json: num_key_value_heads is {self.num_kv_heads}; allowed: a divisor of "
                f"num_attention_heads ({self.num_q_heads})"
            )
        if self.window is not None and self.chunk is not None:
            raise ConfigError("config.json: a layer has a window and chunks of attention; allowed: one of them")
        if self.head_dim % 2:
            raise ConfigError(f"config.json: head_dim is {self.head_dim}; allowed: an even number")

    def check_tp(self, size: int) -> None:
        """With more ranks than KV heads, several ranks have the same head."""
        check_divides(size, "num_attention_heads", self.num_q_heads)
        if size % self.num_kv_heads:
            check_divides(size, "num_key_value_heads", self.num_kv_heads, "a divisor or a multiple")


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(HeadsConfig):
    """Self-attention."""

    module: ClassVar[str] = "minisgl_backend.layers.attention:SelfAttention"

    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: NormConfig | None = None  # RMSNorm of each head of queries and keys, before the rotation

    def num_weights(self, hidden_size: int) -> int:
        return 2 * (self.num_q_heads + self.num_kv_heads) * self.head_dim * hidden_size


@dataclass(frozen=True, kw_only=True)
class GatedAttentionConfig(AttentionConfig):
    """Self-attention whose output, of all heads, is multiplied by sigmoid(gate(x)) (Qwen3-Next)."""

    module: ClassVar[str] = "minisgl_backend.layers.attention_variants:GatedAttention"

    def num_weights(self, hidden_size: int) -> int:
        return super().num_weights(hidden_size) + self.num_q_heads * self.head_dim * hidden_size


@dataclass(frozen=True, kw_only=True)
class NormOverHeadsAttentionConfig(AttentionConfig):
    """Self-attention whose norm of queries and keys is over all heads together (OLMo-2)."""

    module: ClassVar[str] = "minisgl_backend.layers.attention_variants:NormOverHeadsAttention"

    qk_norm: NormConfig = field()


@dataclass(frozen=True, kw_only=True)
class NormBehindRopeAttentionConfig(AttentionConfig):
    """Self-attention whose norm of queries and keys follows the rotation (Hunyuan)."""

    module: ClassVar[str] = "minisgl_backend.layers.attention_variants:NormBehindRopeAttention"

    qk_norm: NormConfig = field()


@dataclass(frozen=True, kw_only=True)
class AttentionTemperatureTuning:
    """A query at position p is multiplied by 1 + beta * log(1 + floor(p / every)), which keeps attention over long
    contexts sharp."""

    beta: float
    every: int  # tokens
    offset: int = 0  # tokens, added to p (Llama 4: 1)


@dataclass(frozen=True, kw_only=True)
class TemperatureTunedAttentionConfig(AttentionConfig):
    """Self-attention with temperature tuning (Llama 4, Ministral 3)."""

    module: ClassVar[str] = "minisgl_backend.layers.attention_variants:TemperatureTunedAttention"

    tuning: AttentionTemperatureTuning


@dataclass(frozen=True, kw_only=True)
class ValueNormAttentionConfig(AttentionConfig):
    """Self-attention whose values have an RMSNorm without a weight (Gemma 4)."""

    module: ClassVar[str] = "minisgl_backend.layers.attention_variants:ValueNormAttention"

    value_norm_eps: float
    k_eq_v: bool = False  # values are the output of k_proj, before the keys' norm and rotation


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig(HeadsConfig):
    """Multi-head latent attention (MLA; DeepSeek-AI, 2024: DeepSeek-V2).

    The cache holds a latent per token, from which keys and values of all heads are computed, and one rotated key that
    all heads share. With the computation of keys moved to the queries, it is attention with one KV head (absorbed).
    """

    module: ClassVar[str] = "minisgl_backend.layers.latent_attention:LatentAttention"

    num_kv_heads: int = field(default=1, init=False)
    head_dim: int = field(init=False)  # numbers in the cache per token: the absorbed key
    rope: RopeConfig
    scale: float = field()
    q_lora_rank: int | None  # size of the latent from which queries are computed; None: from the hidden states
    kv_lora_rank: int  # size of the latent in the cache
    qk_nope_head_dim: int  # dimensions of a head's queries and keys that are not rotated
    qk_rope_head_dim: int  # those that are
    v_head_dim: int
    norm: NormConfig  # of both latents
    bias: bool = False  # of the projections to latents, and of the output projection

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_dim", self.kv_lora_rank + self.qk_rope_head_dim)

    @property
    def rope_head_dim(self) -> int:
        return self.qk_rope_head_dim

    @property
    def latents(self) -> tuple[int, int]:
        return self.kv_lora_rank, self.qk_rope_head_dim

    def num_weights(self, hidden_size: int) -> int:
        qk_dim, heads = self.qk_nope_head_dim + self.qk_rope_head_dim, self.num_q_heads
        queries = heads * qk_dim * (self.q_lora_rank or hidden_size) + (self.q_lora_rank or 0) * hidden_size
        expanded = heads * (self.qk_nope_head_dim + self.v_head_dim) * self.kv_lora_rank
        return queries + expanded + (self.head_dim + heads * self.v_head_dim) * hidden_size


def check_divides(tp: int, key: str, value: int, allowed: str = "a divisor") -> None:
    """Raises ConfigError unless `tp` ranks get equal parts of `value`, which `key` of config.json tells."""
    if value % tp:
        raise ConfigError(f"tp is {tp}; allowed: {allowed} of the model's {key}, which is {value}")
