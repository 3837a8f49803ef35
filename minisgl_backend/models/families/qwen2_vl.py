"""Qwen2-VL, text: Qwen2 without the image encoder."""

from functools import partial

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys, TensorNames, read_rope
from minisgl_backend.models.families.common import attention, decoder, mlp, norm
from minisgl_backend.models.families.eyes import qwen_vision
from minisgl_backend.models.families.qwen2 import windows_above

# Keys of the parts that are left out, in flat configs.
_AROUND = (
    "vision_config",
    *(f"{name}_token_id" for name in ("image", "video", "vision_start", "vision_end", "vision")),
)


def read(keys: Keys) -> DecoderConfig:
    keys.without_effect(*_AROUND)
    head_dim = keys.integer("hidden_size") // keys.integer("num_attention_heads")
    heads = attention(keys, qkv_bias=True, rope=read_rope(keys, head_dim, mrope="in sections"))
    layer = LayerConfig(mixer=heads, mlp=mlp(keys), norm=norm(keys, eps=1e-5))
    return decoder(keys, [layer.with_mixer(window=size) for size in windows_above(keys)])


# With the names of transformers 4 and 5.
TEXT_NAMES = TensorNames(prefixes=(("model.language_model.", "model."),), left_out=("visual.", "model.visual."))

FAMILY = Family(
    model_type="qwen2_vl",
    read=read,
    defaults={"num_key_value_heads": 8, "rope_theta": 1_000_000.0, "max_window_layers": 80},
    text_config="text_config",
    may_be_flat=True,
    tensor_names=TEXT_NAMES,
    encoder=partial(qwen_vision, generation="2"),
)
