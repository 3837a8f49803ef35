"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama with merged projections, LongRoPE and partial rope."""

from minisgl_backend.models.families.base import DecoderConfig, Family, Keys, Stored, TensorNames, read_rope
from minisgl_backend.models.families.common import attention, mlp, norm, uniform, window


def read(keys: Keys) -> DecoderConfig:
    num_q_heads = keys.integer("num_attention_heads")
    head_dim = keys.integer("hidden_size") // num_q_heads
    keys.choice("attention_bias", (False,))  # a key of its checkpoints, which transformers does not read
    return uniform(
        keys,
        attention(
            keys, num_kv_heads=num_q_heads, rope=read_rope(keys, head_dim, partial=True), window=window(keys, None)
        ),
        mlp(keys),
        norm(keys, eps=1e-5),
    )


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
