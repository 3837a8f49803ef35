"""What each layer of a model computes, as data: families write it (models/families), layers are built from it.

Needs neither torch nor transformers, so that a model folder is read and refused in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

# Activations of the gate; gelu_tanh is transformers' gelu_pytorch_tanh, swiglu_oai clamps the up half too (`gate_mul`).
Activation = Literal["silu", "gelu", "gelu_tanh", "swiglu_oai"]
# relu2: relu(x) ** 2 (So et al., 2021: Primer); xielu has two learned parameters (Huang and Schlag, 2024: Deriving
# Activation Functions Using Integration).
UngatedActivation = Literal["silu", "gelu", "gelu_tanh", "relu2", "xielu"]


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
    rotated_pairs: int = 0  # proportional: only the first pairs of a head are rotated (Gemma 4)


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """RMSNorm (Zhang and Sennrich, 2019), or LayerNorm (Ba et al., 2016)."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    weight: bool = True  # False: LayerNorm without one (OLMo), or a norm of heads (Llama 4)
    bias: bool = False  # of LayerNorm
    weight_offset: float = 0.0  # added to the stored weight; 1 for Gemma, which stores weight - 1


@dataclass(frozen=True, kw_only=True)
class QueryGrowth:
    """Temperature tuning: a query at position p is multiplied by 1 + beta * log(1 + floor(p / every)), which keeps
    attention over long contexts sharp (Llama 4, Ministral 3)."""

    beta: float
    every: int  # tokens
    offset: int = 0  # tokens, added to p (Llama 4: 1)


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Self-attention of one layer; heads are those of the whole model, before they are split over ranks."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None  # None: no position embedding (NoPE)
    window: int | None = None  # tokens that a token sees, including itself; None: all up to itself
    chunk: int | None = None  # chunk size in tokens; a token sees its own chunk, up to itself; None: no chunks
    scale: float | None = None  # of the scores; None: head_dim ** -0.5
    soft_cap: float | None = None  # logits become soft_cap * tanh(logits / soft_cap)
    sinks: bool = False  # each head has a learned logit that takes part in the softmax and has no value (gpt-oss)
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: NormConfig | None = None  # RMSNorm of queries and keys before the rotation
    qk_norm_over_heads: bool = False  # that norm is over all heads together (OLMo-2), not over each
    qk_norm_behind_rope: bool = False  # that norm follows the rotation (Hunyuan)
    query_growth: QueryGrowth | None = None

    @property
    def rope_head_dim(self) -> int:
        """Dimensions of a head that the rope table covers."""
        return self.head_dim


@dataclass(frozen=True, kw_only=True)
class ValueNormAttentionConfig(AttentionConfig):
    """Self-attention whose values have an RMSNorm without a weight (Gemma 4)."""

    value_norm_eps: float
    values_are_keys: bool = False  # values are the output of k_proj, before the keys' norm and rotation


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Multi-head latent attention (MLA; DeepSeek-AI, 2024: DeepSeek-V2) of one layer.

    The cache holds a latent per token, from which keys and values of all heads are computed, and one rotated key that
    all heads share. With the computation of keys moved to the queries, it is attention with one KV head (absorbed).
    """

    num_q_heads: int
    q_lora_rank: int | None  # size of the latent from which queries are computed; None: from the hidden states
    kv_lora_rank: int  # size of the latent in the cache
    qk_nope_head_dim: int  # dimensions of a head's queries and keys that are not rotated
    qk_rope_head_dim: int  # those that are
    v_head_dim: int
    rope: RopeConfig
    scale: float  # of the scores
    norm: NormConfig  # of both latents
    bias: bool = False  # of the projections to latents, and of the output projection

    num_kv_heads: ClassVar[int] = 1
    window: ClassVar[int | None] = None
    chunk: ClassVar[int | None] = None
    soft_cap: ClassVar[float | None] = None
    sinks: ClassVar[bool] = False

    @property
    def head_dim(self) -> int:
        """Numbers in the cache per token: the absorbed key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def rope_head_dim(self) -> int:
        """As of `AttentionConfig`."""
        return self.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True)
class MlpConfig:
    """The gated MLP: down(activation(gate(x)) * up(x))."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False  # of all three


@dataclass(frozen=True, kw_only=True)
class UngatedMlpConfig:
    """The MLP without a gate: down(activation(up(x)))."""

    intermediate_size: int
    activation: UngatedActivation
    bias: bool = False  # of both


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How a mixture picks experts: those with the best scores, by softmax or sigmoid over all logits."""

    scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True  # the weights of the picked experts add up to 1
    bias: bool = False  # of the logits (gpt-oss)
    correction_bias: bool = False  # added to the scores for the selection only (DeepSeek-V3)
    num_groups: int = 1  # experts are picked from the best `groups_per_token` of these groups (DeepSeek-V2)
    groups_per_token: int = 1
    scaling: float = 1.0  # factor of all weights
    in_float32: bool = False  # its weight and GEMM are float32, whatever the model's dtype is
    on_input: bool = False  # a token's weight multiplies the input of its one expert, not the output (Llama 4)


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Mixture of experts: the router picks `experts_per_token` of `num_experts` gated MLPs for each token."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    router: RouterConfig
    activation: Activation = "silu"
    bias: bool = False  # of gate, up and down of every expert (gpt-oss)
    shared_intermediate_size: int = 0  # of the shared expert; 0: there is none
    shared_gate: bool = False  # its output is multiplied by sigmoid(gate(x)), one number per token (Qwen2-MoE)


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One decoder layer: attention, then an MLP, each added to the residual stream; or both in parallel."""

    attention: AttentionConfig | LatentAttentionConfig
    mlp: MlpConfig | UngatedMlpConfig | MoeConfig
    norm: NormConfig
    # Which norms attention and MLP have: of their input, their output, or both; "parallel": one norm whose output is
    # the input of both (Wang and Komatsuzaki, 2021: GPT-J).
    norms: Literal["before", "after", "both", "parallel"] = "before"
    residual_multiplier: float = 1.0  # of the outputs of attention and MLP (Granite)
    output_factor: bool = False  # a stored number multiplies the residual stream after the layer (Gemma 4)
