"""EXAONE 3.0, 3.5 and Deep: Llama with other names for keys and tensors."""

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.layers.mixer_config import NormConfig
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys, Stored, TensorNames
from minisgl_backend.models.families.common import attention, decoder, mlp


def read(keys: Keys) -> DecoderConfig:
    bias = keys.boolean("attention_bias", False)
    eps = keys.number("rms_norm_eps", keys.number("layer_norm_epsilon", 1e-5))
    has_act = keys.get("hidden_act") is not None
    layer = LayerConfig(
        mixer=attention(keys, bias=bias),
        mlp=mlp(keys, "hidden_act" if has_act else "activation_function", bias=keys.boolean("mlp_bias", False)),
        norm=NormConfig(eps=eps),
    )
    num_layers = keys.integer("num_hidden_layers", keys.get("num_layers"))
    return decoder(keys, [layer] * num_layers)


_NAMES = {
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    **{f"attn.attention.{kind}_proj": f"self_attn.{kind}_proj" for kind in "qkv"},
    "attn.attention.out_proj": "self_attn.o_proj",
    "mlp.c_fc_0": "mlp.gate_proj",
    "mlp.c_fc_1": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}
_PREFIXES = (
    ("transformer.h.", "model.layers."),
    ("transformer.wte.", "model.embed_tokens."),
    ("transformer.ln_f.", "model.norm."),
)

FAMILY = Family(
    model_type="exaone",
    read=read,
    defaults={"num_key_value_heads": 8, "rope_theta": 500_000.0},
    tensor_names=TensorNames(
        stored=tuple(Stored(name=theirs, of=(ours,)) for theirs, ours in _NAMES.items()), prefixes=_PREFIXES
    ),
)
