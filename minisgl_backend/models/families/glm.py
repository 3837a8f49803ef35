"""GLM-4 (9B, of 2024): Llama with interleaved rope over half of each head, and merged gate and up."""

from __future__ import annotations

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.models.description import DecoderConfig
from minisgl_backend.models.families.common import Family, attention, decoder, mlp, norm
from minisgl_backend.models.keys import Keys
from minisgl_backend.models.rope import read_rope
from minisgl_backend.weights.names import Stored, TensorNames


def read(keys: Keys) -> DecoderConfig:
    layer = LayerConfig(
        mixer=attention(
            keys,
            qkv_bias=keys.boolean("attention_bias", True),
            rope=read_rope(keys, keys.integer("head_dim"), partial=True, part=0.5, interleaved=True),
        ),
        mlp=mlp(keys),
        norm=norm(keys, eps=1.5625e-07),
    )
    return decoder(keys, [layer] * keys.integer("num_hidden_layers"))


FAMILY = Family(
    model_type="glm",
    read=read,
    defaults={"head_dim": 128, "num_key_value_heads": 2},
    tensor_names=TensorNames(stored=(Stored(name="mlp.gate_up_proj", of=("mlp.gate_proj", "mlp.up_proj")),)),
)
