"""K-EXAONE: head norms, no position embedding in layers without a window, the mixtures of DeepSeek-V3."""

from minisgl_backend.layers.config import LayerConfig, MlpConfig, MoeConfig
from minisgl_backend.models.families.base import FULL, SLIDING, DecoderConfig, Family, Keys, refuse
from minisgl_backend.models.families.common import (
    attention,
    decoder,
    every,
    head_size,
    layer_types,
    mlp,
    norm,
    routed_experts,
)
from minisgl_backend.models.families.common import window as read_window
from minisgl_backend.models.rope import read_rope
from minisgl_backend.weights.names import SHARED_EXPERTS, Stored, TensorNames


def read(keys: Keys) -> DecoderConfig:
    num_layers = keys.integer("num_hidden_layers")
    window = read_window(keys, 4096)
    types = layer_types(keys, num_layers)
    if not types:
        types = (FULL,) * num_layers if window is None else every(keys.integer("sliding_window_pattern", 4), num_layers)
    keys.without_effect("sliding_window_pattern")
    rope = read_rope(keys, head_size(keys))
    heads = {
        slides: attention(
            keys,
            num_kv_heads=32,
            rope=rope if slides or window is None else None,
            window=window if slides else None,
            qk_norm=norm(keys, eps=1e-5),
        )
        for slides in (False, True)
    }
    mlps: dict[str, MlpConfig | MoeConfig] = {"dense": mlp(keys), "sparse": _experts(keys)}
    layers = [
        LayerConfig(mixer=heads[kind == SLIDING], mlp=mlps[sparse], norm=norm(keys, eps=1e-5))
        for kind, sparse in zip(types, _mlp_types(keys, num_layers), strict=True)
    ]
    keys.without_effect("num_nextn_predict_layers")  # MTP layers are stored apart: see `left_out`
    return decoder(keys, layers)


def _mlp_types(keys: Keys, num_layers: int) -> list[str]:
    """dense or sparse, for each layer."""
    num_dense = keys.integer("first_k_dense_replace", 1, least=0)
    keys.without_effect("is_moe_layer")
    types = keys.get("mlp_layer_types") or ["dense" if layer < num_dense else "sparse" for layer in range(num_layers)]
    if len(types) != num_layers or not set(types) <= {"dense", "sparse"}:
        refuse("mlp_layer_types", types, f"dense or sparse for each of the {num_layers} layers")
    return list(types)


def _experts(keys: Keys) -> MoeConfig:
    return routed_experts(keys, count_key="num_experts", shared_key="num_shared_experts", scaling=2.5)


FAMILY = Family(
    model_type="exaone_moe",
    read=read,
    defaults={"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 1024},
    tensor_names=TensorNames(
        stored=(*SHARED_EXPERTS, Stored(name="mlp.e_score_correction_bias", of=("mlp.gate.e_score_correction_bias",))),
        left_out=("mtp.",),
    ),
)
