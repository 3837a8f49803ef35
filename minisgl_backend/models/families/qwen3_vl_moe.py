"""Qwen3-VL with experts, text: Qwen3-MoE, whose experts are stored together."""

from dataclasses import replace

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys, Stored
from minisgl_backend.models.families.common import decoder, mlp, norm
from minisgl_backend.models.families.qwen2_vl import TEXT_NAMES
from minisgl_backend.models.families.qwen3_moe import experts, sparse_layers
from minisgl_backend.models.families.qwen3_vl import ENCODER, text_attention


def read(keys: Keys) -> DecoderConfig:
    keys.choice("norm_topk_prob", (True,))
    heads = text_attention(keys, keys.integer("hidden_size") // keys.integer("num_attention_heads"))
    dense, mixture = mlp(keys), experts(keys)
    mlps = [mixture if is_sparse else dense for is_sparse in sparse_layers(keys)]
    return decoder(keys, [LayerConfig(mixer=heads, mlp=one, norm=norm(keys)) for one in mlps])


_GATE_UP = tuple(f"mlp.experts.{kind}_proj.weight" for kind in ("gate", "up"))

FAMILY = Family(
    model_type="qwen3_vl_moe",
    read=read,
    defaults={
        "num_key_value_heads": 16,
        "rope_theta": 500_000.0,
        "num_local_experts": 60,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
    text_config="text_config",
    encoder=ENCODER,
    tensor_names=replace(
        TEXT_NAMES,
        stored=(
            # Published checkpoints have each expert as [inputs, outputs]; transformers 5 saves [outputs, inputs].
            Stored(name="mlp.experts.gate_up_proj", of=_GATE_UP, either_way=True),
            Stored(name="mlp.experts.down_proj", of=("mlp.experts.down_proj.weight",), either_way=True),
        ),
    ),
)
