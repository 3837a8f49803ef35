"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama with merged projections, LongRoPE and partial rope."""

from __future__ import annotations

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.models.description import DecoderConfig
from minisgl_backend.models.families.common import Family, attention, decoder, mlp, norm, window
from minisgl_backend.models.keys import Keys
from minisgl_backend.models.rope import read_rope
from minisgl_backend.weights.names import Stored, TensorNames


def read(keys: Keys) -> DecoderConfig:
    num_q_heads = keys.integer("num_attention_heads")
    head_dim = keys.integer("hidden_size") // num_q_heads
    keys.choice("attention_bias", (False,))  # a key of its checkpoints, which transformers does not read
    layer = LayerConfig(
        mixer=attention(
            keys, num_kv_heads=num_q_heads, rope=read_rope(keys, head_dim, partial=True), window=window(keys, None)
        ),
        mlp=mlp(keys),
        norm=norm(keys, eps=1e-5),
    )
    return decoder(keys, [layer] * keys.integer("num_hidden_layers"))


FAMILY = Family(
    model_type="phi3",
    read=read,
    defaults={"original_max_position_embeddings": 4096},
    tensor_names=TensorNames(
        stored=(
            Stored(name="self_attn.qkv_proj", of=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            Stored(name="mlp.gate_up_proj", of=("mlp.gate_proj", "mlp.up_proj")),
        )
    ),
)
