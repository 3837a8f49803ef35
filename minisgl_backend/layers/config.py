"""What each layer of a model computes, as data: families write it (models/families), layers are built from it.

Needs neither torch nor transformers, so that a model folder is read and refused in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

# Of the gate; gelu_tanh is transformers' gelu_pytorch_tanh, swiglu_oai clamps the up half too (`gate_mul`).
Activation = Literal["silu", "gelu", "gelu_tanh", "swiglu_oai"]
# relu2: relu(x) ** 2 (So et al., 2021: Primer); xielu: with two learned numbers (Huang and Schlag, 2024: Deriving
# Activation Functions Using Integration).
UngatedActivation = Literal["silu", "gelu", "gelu_tanh", "relu2", "xielu"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. Fields beyond `theta` and `rotary_dim` are for the types that they name."""

    type: str = "default"  # default, linear, llama3, yarn, longrope or proportional
    theta: float = 10000.0
    rotary_dim: int | None = None  # leading dimensions of a head that are rotated; None: all (partial rotary)
    interleaved: bool = False  # neighbours are rotated together, not dimension i with i + rotary_dim / 2 (GPT-J)
    factor: float = 1.0  # linear, llama3, yarn, longrope, proportional
    original_max_position: int = 0  # llama3, yarn, longrope; tokens
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope; None: computed from the other fields
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    short_factor: tuple[float, ...] = ()  # longrope; one a pair of dimensions
    long_factor: tuple[float, ...] = ()  # longrope
    rotated_pairs: int = 0  # proportional: the first of a whole head's, the others are not rotated (Gemma 4)


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """RMSNorm (Zhang and Sennrich, 2019), or LayerNorm (Ba et al., 2016)."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    weight: bool = True  # False: LayerNorm without one (OLMo), or a norm of heads (Llama 4)
    bias: bool = False  # of LayerNorm
    weight_offset: float = 0.0  # added to the stored weight; Gemma stores what is to be added to 1


@dataclass(frozen=True, kw_only=True)
class QueryGrowth:
    """A query at position p is multiplied by 1 + beta * log(1 + floor(p / every)), so that attention over long contexts
    stays as sharp (Llama 4, Ministral 3)."""

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
    window: int | None = None  # tokens that a token sees, the last of which is itself; None: all up to itself
    chunk: int | None = None  # chunk size in tokens; a token sees its own chunk, up to itself; None: no chunks
    scale: float | None = None  # of queries' products with keys; None: head_dim ** -0.5
    soft_cap: float | None = None  # logits become soft_cap * tanh(logits / soft_cap)
    sinks: bool = False  # a learned logit a head that takes part in the softmax and has no value (gpt-oss)
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: NormConfig | None = None  # RMSNorm of queries and keys before the rotation
    qk_norm_over_heads: bool = False  # that norm is over all heads together (OLMo-2), not over each
    qk_norm_behind_rope: bool = False  # that norm follows the rotation (Hunyuan)
    query_growth: QueryGrowth | None = None

    @property
    def rope_head_dim(self) -> int:
        """Dimensions of a head that the rope's table is made for."""
        return self.head_dim


@dataclass(frozen=True, kw_only=True)
class ValueNormAttentionConfig(AttentionConfig):
    """Self-attention whose values have an RMSNorm without a weight (Gemma 4)."""

    value_norm_eps: float
    values_are_keys: bool = False  # what keys are made of, before their norm and rotation, are the values, too


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Multi-head latent attention (MLA; DeepSeek-AI, 2024: DeepSeek-V2) of one layer.

    What is kept of a token is a latent, from which keys and values of all heads are computed, and one rotated key that
    all heads share. With the computation of keys moved to the queries, it is attention with one KV head (absorbed).
    """

    num_q_heads: int
    q_lora_rank: int | None  # numbers of a latent from which queries are computed; None: from the hidden states
    kv_lora_rank: int  # numbers of the latent that is kept
    qk_nope_head_dim: int  # of a head's queries and keys: those that are not rotated
    qk_rope_head_dim: int  # those that are
    v_head_dim: int
    rope: RopeConfig
    scale: float  # of queries' products with keys
    norm: NormConfig  # of both latents
    bias: bool = False  # of what computes latents, and of the output

    num_kv_heads: ClassVar[int] = 1
    window: ClassVar[int | None] = None
    chunk: ClassVar[int | None] = None
    soft_cap: ClassVar[float | None] = None
    sinks: ClassVar[bool] = False

    @property
    def head_dim(self) -> int:
        """Numbers that are kept of a token: the absorbed key."""
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
    """How a mixture picks experts: the best `experts_per_token` of scores by softmax or sigmoid over all logits."""

    scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True  # the shares of those picked add up to 1
    bias: bool = False  # of the logits (gpt-oss)
    correction_bias: bool = False  # added to the scores for the choice alone (DeepSeek-V3)
    num_groups: int = 1  # experts are picked from the best `groups_per_token` of these groups (DeepSeek-V2)
    groups_per_token: int = 1
    scaling: float = 1.0  # factor of all shares
    in_float32: bool = False  # its weight and GEMM, whatever the model's number format is
    on_input: bool = False  # a token's share multiplies what its one expert is given, not what that returns (Llama 4)


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Mixture of experts: the router picks `experts_per_token` of `num_experts` gated MLPs for each token."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    router: RouterConfig
    activation: Activation = "silu"
    bias: bool = False  # of gate, up and down of every expert (gpt-oss)
    shared_intermediate_size: int = 0  # of an MLP that every token takes besides; 0: there is none
    shared_gate: bool = False  # its result is multiplied by the sigmoid of a product with the input (Qwen2-MoE)


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One decoder layer: attention, then an MLP, each added to the residual stream; or both at once, of one norm."""

    attention: AttentionConfig | LatentAttentionConfig
    mlp: MlpConfig | UngatedMlpConfig | MoeConfig
    norm: NormConfig
    # Of attention and MLP: of their input, their output, or both; "parallel": one norm whose output is the input of
    # both (Wang and Komatsuzaki, 2021: GPT-J).
    norms: Literal["before", "after", "both", "parallel"] = "before"
    residual_multiplier: float = 1.0  # of what attention and MLP add (Granite)
    output_factor: bool = False  # a stored number multiplies the residual stream behind the layer (Gemma 4)
