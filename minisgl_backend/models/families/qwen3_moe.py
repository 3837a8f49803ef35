"""Qwen3-MoE: Qwen3's attention, with a mixture of experts in place of the MLP of most layers."""

from dataclasses import replace

from minisgl_backend.layers.config import LayerConfig, MoeConfig, RouterConfig
from minisgl_backend.layers.mixer_config import RopeConfig
from minisgl_backend.models.families.base import FULL, DecoderConfig, Family, Keys, refuse
from minisgl_backend.models.families.common import decoder, layer_types, mlp, norm, outgrows, window
from minisgl_backend.models.families.qwen3 import head_norm_attention


def read(keys: Keys) -> DecoderConfig:
    attention = head_norm_attention(keys)
    attention = replace(attention, window=_window(keys, attention.rope))
    dense, mixture = mlp(keys), experts(keys)
    sparse = sparse_layers(keys)
    mlps = [mixture if is_sparse else dense for is_sparse in sparse]
    return decoder(keys, [LayerConfig(mixer=attention, mlp=one, norm=norm(keys)) for one in mlps])


def _window(keys: Keys, rope: RopeConfig | None) -> int | None:
    """One window for all layers, or none: transformers reads no layer_types for this architecture."""
    types = layer_types(keys, keys.integer("num_hidden_layers"))
    keys.without_effect("max_window_layers")
    if not keys.get("use_sliding_window"):
        keys.without_effect("sliding_window")
        return None
    size = window(keys, 4096)
    if len(set(types)) > 1 and outgrows(keys, rope, size):
        refuse("layer_types", list(types), "one type for all layers of Qwen3MoeForCausalLM")
    return None if FULL in types else size


def experts(keys: Keys, size_key: str = "moe_intermediate_size") -> MoeConfig:
    """The routed experts of Qwen's mixtures. size_key: of their intermediate size."""
    num_experts = keys.integer("num_experts", keys.get("num_local_experts"))  # renamed in transformers 5
    experts_per_token = keys.integer("num_experts_per_tok")
    if experts_per_token > num_experts:
        refuse("num_experts_per_tok", experts_per_token, f"1 to num_experts ({num_experts})")
    keys.choice("hidden_act", ("silu",))
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        intermediate_size=keys.integer(size_key),
        router=RouterConfig(renormalize=keys.boolean("norm_topk_prob", False)),
    )


def sparse_layers(keys: Keys) -> list[bool]:
    """Which layers have experts: every decoder_sparse_step-th, except those of mlp_only_layers."""
    step, dense = keys.integer("decoder_sparse_step", 1), keys.sequence("mlp_only_layers")
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(keys.integer("num_hidden_layers"))]


FAMILY = Family(model_type="qwen3_moe", read=read)
