"""The gated delta rule in config.json, as the families that have it share it."""

from dataclasses import replace

from minisgl_backend.layers.config import MoeConfig
from minisgl_backend.layers.gated_delta_config import GatedDeltaConfig
from minisgl_backend.layers.mixer_config import NormConfig
from minisgl_backend.models.families.base import FULL, LINEAR, DecoderConfig, Keys, Stored
from minisgl_backend.models.families.common import layer_types
from minisgl_backend.models.families.qwen3_moe import experts

_LINEAR_ATTN = "linear_attn."
# The convolution's channels are split over ranks in three parts.
CONVOLUTION = Stored(
    name=f"{_LINEAR_ATTN}conv1d", of=tuple(f"{_LINEAR_ATTN}{kind}_conv1d" for kind in "qkv"), may_be_absent=True
)


def gated_delta(keys: Keys, norm: NormConfig, *, num_heads: int = 0, beta_scale: float = 1.0) -> GatedDeltaConfig:
    """`norm`: of its outputs. `num_heads`: where the keys of its numbers of heads and their sizes may be absent."""
    keys.choice("hidden_act", ("silu",))  # of its convolution and its gate, too
    num_k_heads = keys.integer("linear_num_key_heads", num_heads or None)
    absent = int(0.75 * keys.integer("hidden_size") / num_k_heads) if num_heads else None
    k_dim = keys.integer("linear_key_head_dim", absent)
    return GatedDeltaConfig(
        num_k_heads=num_k_heads,
        num_v_heads=keys.integer("linear_num_value_heads", num_heads or None),
        k_dim=k_dim,
        v_dim=keys.integer("linear_value_head_dim", 2 * k_dim if num_heads else None),
        conv_width=keys.integer("linear_conv_kernel_dim", 4, least=2),
        norm=norm,
        beta_scale=beta_scale,
    )


def hybrid_types(keys: Keys) -> tuple[str, ...]:
    """LINEAR or FULL for each layer: layer_types, or every full_attention_interval-th has attention."""
    num_layers = keys.integer("num_hidden_layers")
    interval = keys.integer("full_attention_interval", 4)
    types = layer_types(keys, num_layers, allowed=(FULL, LINEAR))
    return types or tuple(LINEAR if (layer + 1) % interval else FULL for layer in range(num_layers))


def shared_experts(keys: Keys) -> MoeConfig:
    """Qwen's routed experts and a shared one with a gate."""
    size = keys.integer("shared_expert_intermediate_size")
    return replace(experts(keys), shared_intermediate_size=size, shared_gate=True)


def gated_queries(decoder: DecoderConfig) -> Stored:
    """Each head's gate follows its query."""
    of = ("self_attn.q_proj", "self_attn.q_gate")
    return Stored(name="self_attn.q_proj", of=of, groups=decoder.attentions[0].num_q_heads)
