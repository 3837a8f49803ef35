"""Hunyuan A13B: Hunyuan with experts and a shared expert."""

from minisgl_backend.layers.config import MoeConfig, RouterConfig
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys, Stored, TensorNames, refuse
from minisgl_backend.models.families.common import norm, uniform
from minisgl_backend.models.families.hunyuan_v1_dense import HEAD_NORMS, hunyuan_attention


def read(keys: Keys) -> DecoderConfig:
    size = keys.integer("intermediate_size")
    num_experts, experts_per_token = _one(keys, "num_experts", 1), _one(keys, "moe_topk", 1)
    if experts_per_token > num_experts:
        refuse("moe_topk", experts_per_token, f"1 to num_experts ({num_experts})")
    for key, value in (("moe_intermediate_size", size), ("num_shared_expert", 1)):
        if (given := _one(keys, key, value)) != value:
            refuse(key, given, f"{value}, which transformers assumes")
    keys.choice("moe_layer_num_skipped", (0,))
    keys.choice("norm_topk_prob", (True,))
    keys.choice("use_mixed_mlp_moe", (True,))
    keys.choice("hidden_act", ("silu",))
    return uniform(
        keys,
        hunyuan_attention(keys),
        MoeConfig(
            num_experts=num_experts,
            experts_per_token=experts_per_token,
            intermediate_size=size,
            router=RouterConfig(renormalize=True),
            shared_intermediate_size=size,
        ),
        norm(keys, eps=1e-5),
    )


def _one(keys: Keys, key: str, default: int) -> int:
    """A number that is the same in all layers; the key may have a list with one entry per layer."""
    value = keys.get(key, default)
    first, *others = value if isinstance(value, list) and value else [value]
    if not isinstance(first, int) or isinstance(first, bool) or first < 1 or any(one != first for one in others):
        refuse(key, value, "an integer, 1 or more, the same in all layers")
    return first


_SHARED = tuple(
    Stored(name=f"mlp.shared_mlp.{kind}_proj", of=(f"mlp.shared_expert.{kind}_proj",))
    for kind in ("gate", "up", "down")
)

FAMILY = Family(
    model_type="hunyuan_v1_moe",
    read=read,
    tensor_names=TensorNames(stored=(*HEAD_NORMS, *_SHARED, Stored(name="mlp.gate.wg", of=("mlp.gate",)))),
)
