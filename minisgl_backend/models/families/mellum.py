"""Mellum: Qwen3-MoE with windows and a rope for each layer type."""

from minisgl_backend.layers.config import LayerConfig, MlpConfig, MoeConfig
from minisgl_backend.models.families.base import FULL, SLIDING, DecoderConfig, Family, Keys, TensorNames, refuse
from minisgl_backend.models.families.common import attention, check_window, decoder, layer_types, mlp, norm, window
from minisgl_backend.models.families.qwen3_moe import experts
from minisgl_backend.models.rope import by_layer_type, make_rope

_THETAS = {FULL: 500_000.0, SLIDING: 10_000.0}


def read(keys: Keys) -> DecoderConfig:
    num_layers, size = keys.integer("num_hidden_layers"), window(keys, 1024)
    types = layer_types(keys, num_layers) or (FULL,) * num_layers
    check_window(size, types)
    kinds = keys.get("mlp_layer_types") or ["sparse"] * num_layers
    if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
        refuse("mlp_layer_types", kinds, f"dense or sparse for each of the {num_layers} layers")
    bias, head_dim = keys.boolean("attention_bias", False), keys.integer("head_dim")
    heads = {
        kind: attention(
            keys,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=norm(keys),
            window=size if kind == SLIDING else None,
            rope=make_rope(keys, values, values.pop("rope_theta", _THETAS[kind]), head_dim),
        )
        for kind, values in by_layer_type(keys, _THETAS).items()
    }
    mlps: dict[str, MlpConfig | MoeConfig] = {"dense": mlp(keys), "sparse": experts(keys)}
    # The MTP layer is stored apart from the others: see `left_out`.
    keys.without_effect("num_mtp_layers", "num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types")
    layers = [
        LayerConfig(mixer=heads[kind], mlp=mlps[sparse], norm=norm(keys))
        for kind, sparse in zip(types, kinds, strict=True)
    ]
    return decoder(keys, layers)


FAMILY = Family(
    model_type="mellum",
    read=read,
    defaults={"head_dim": 128, "norm_topk_prob": True},
    tensor_names=TensorNames(left_out=("mtp.",)),
)
