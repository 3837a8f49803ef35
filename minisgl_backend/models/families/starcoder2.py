"""StarCoder2: LayerNorm, biases everywhere, an MLP without a gate."""

from minisgl_backend.layers.mixer_config import NormConfig
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys, Stored, TensorNames
from minisgl_backend.models.families.common import attention, ungated_mlp, uniform, window


def read(keys: Keys) -> DecoderConfig:
    bias = keys.boolean("use_bias", True)
    keys.choice("norm_type", ("layer_norm",))
    keys.choice("mlp_type", ("default",))
    return uniform(
        keys,
        attention(keys, num_kv_heads=2, qkv_bias=bias, output_bias=bias, window=window(keys, None)),
        ungated_mlp(keys, "gelu_pytorch_tanh", bias=bias),
        NormConfig(eps=keys.number("norm_epsilon", 1e-5), kind="layer", bias=True),
    )


FAMILY = Family(
    model_type="starcoder2",
    read=read,
    defaults={"tie_word_embeddings": True},
    tensor_names=TensorNames(
        stored=(Stored(name="mlp.c_fc", of=("mlp.up_proj",)), Stored(name="mlp.c_proj", of=("mlp.down_proj",)))
    ),
)
