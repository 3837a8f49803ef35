"""HyperCLOVA X SEED: Granite with norms before and after attention and MLP."""

from dataclasses import replace

from minisgl_backend.models.families import granite
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys, Stored, TensorNames


def read(keys: Keys) -> DecoderConfig:
    keys.choice("use_post_norm", (True,))
    like_granite = granite.read(keys)
    # An absent multiplier means 1 for Granite, and the usual scale here.
    scale = keys.number("attention_multiplier", like_granite.attentions[0].head_dim ** -0.5)
    layers = tuple(replace(layer.with_mixer(scale=scale), norms="both") for layer in like_granite.layers)
    # Logits are multiplied by the number by which Granite divides them.
    return replace(like_granite, layers=layers, logits_multiplier=keys.number("logits_scaling", 1.0))


FAMILY = Family(
    model_type="hyperclovax",
    read=read,
    tensor_names=TensorNames(
        stored=(
            Stored(name="post_norm1", of=("post_attention_layernorm",)),
            Stored(name="post_attention_layernorm", of=("pre_feedforward_layernorm",)),
            Stored(name="post_norm2", of=("post_feedforward_layernorm",)),
        )
    ),
)
