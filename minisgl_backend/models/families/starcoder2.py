"""StarCoder2: LayerNorm, biases everywhere, an MLP without a gate."""

from __future__ import annotations

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.layers.mixer_config import NormConfig
from minisgl_backend.models.description import DecoderConfig
from minisgl_backend.models.families.common import Family, attention, decoder, ungated_mlp, window
from minisgl_backend.models.keys import Keys
from minisgl_backend.weights.names import Stored, TensorNames


def read(keys: Keys) -> DecoderConfig:
    bias = keys.boolean("use_bias", True)
    keys.choice("norm_type", ("layer_norm",))
    keys.choice("mlp_type", ("default",))
    layer = LayerConfig(
        mixer=attention(keys, num_kv_heads=2, qkv_bias=bias, output_bias=bias, window=window(keys, None)),
        mlp=ungated_mlp(keys, "gelu_pytorch_tanh", bias=bias),
        norm=NormConfig(eps=keys.number("norm_epsilon", 1e-5), kind="layer", bias=True),
    )
    return decoder(keys, [layer] * keys.integer("num_hidden_layers"))


FAMILY = Family(
    model_type="starcoder2",
    read=read,
    defaults={"tie_word_embeddings": True},
    tensor_names=TensorNames(
        stored=(Stored(name="mlp.c_fc", of=("mlp.up_proj",)), Stored(name="mlp.c_proj", of=("mlp.down_proj",)))
    ),
)
