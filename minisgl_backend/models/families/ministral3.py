"""Ministral 3 and the dense Mistral Large 3: Mistral with queries scaled by their position."""

from dataclasses import replace

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.layers.mixer_config import AttentionTemperatureTuning, TemperatureTunedAttentionConfig
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys, max_positions, read_rope, refuse
from minisgl_backend.models.families.common import attention, decoder, mlp, norm, window

_BETA = "llama_4_scaling_beta"
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    _BETA: 0.1,
}


def read(keys: Keys) -> DecoderConfig:
    # transformers only reads the longest sequence from its own key.
    rope = read_rope(keys, keys.integer("head_dim"), apart=(_BETA, "max_position_embeddings"))
    tuning = _temperature_tuning(keys)
    heads = attention(keys, TemperatureTunedAttentionConfig, rope=rope, window=window(keys, None), tuning=tuning)
    layer = LayerConfig(mixer=heads, mlp=mlp(keys), norm=norm(keys, eps=1e-5))
    return replace(decoder(keys, [layer] * keys.integer("num_hidden_layers")), max_position=max_positions(keys))


def _temperature_tuning(keys: Keys) -> AttentionTemperatureTuning:
    values = keys.mapping("rope_scaling") or keys.mapping("rope_parameters")
    beta, original = values.get(_BETA), values.get("original_max_position_embeddings")
    if not isinstance(beta, (int, float)) or isinstance(beta, bool) or beta < 0:
        refuse(_BETA, beta, "a number, 0 or more")
    if not isinstance(original, int) or isinstance(original, bool) or original < 1:
        refuse("original_max_position_embeddings", original, "an integer, 1 or more")
    return AttentionTemperatureTuning(beta=float(beta), every=original)


FAMILY = Family(
    model_type="ministral3", read=read, defaults={"num_key_value_heads": 8, "head_dim": 128, "rope_parameters": _ROPE}
)
