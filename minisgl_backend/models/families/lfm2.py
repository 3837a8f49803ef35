"""LFM2 and LFM2.5: gated short convolutions, and attention with head norms in every third layer or fewer."""

from dataclasses import replace

from minisgl_backend.layers.config import DenseMlpConfig, LayerConfig, MlpConfig, MoeConfig
from minisgl_backend.layers.mixer_config import NormConfig
from minisgl_backend.layers.short_conv_config import ShortConvConfig
from minisgl_backend.models.families.base import FULL, DecoderConfig, Family, Keys, Stored, TensorNames, refuse
from minisgl_backend.models.families.common import attention, decoder, layer_types

CONV = "conv"  # entry of layer_types


def read(keys: Keys) -> DecoderConfig:
    num_layers = keys.integer("num_hidden_layers")
    types = layer_types(keys, num_layers, allowed=(FULL, CONV)) or _types(keys, num_layers)
    keys.without_effect("full_attn_idxs")
    size = keys.integer("hidden_size")
    for key in ("block_dim", "conv_dim", "conv_dim_out"):  # of the released files; transformers reads none of them
        keys.choice(key, (size,))
    keys.choice("block_use_swiglu", (True,))
    keys.choice("use_pos_enc", (True,))
    keys.choice("num_heads", (keys.integer("num_attention_heads"),))
    keys.without_effect("block_norm_eps", "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init")
    keys.without_effect("conv_use_xavier_init")
    return hybrid(keys, types, [MlpConfig(intermediate_size=_intermediate_size(keys))] * num_layers)


def hybrid(keys: Keys, types: tuple[str, ...], mlps: list[DenseMlpConfig | MoeConfig]) -> DecoderConfig:
    """Of both LFM2s; an MLP and one of FULL and CONV for each layer."""
    norm = NormConfig(eps=keys.number("norm_eps", 1e-5))
    conv = ShortConvConfig(
        channels=keys.integer("hidden_size"),
        width=keys.integer("conv_L_cache", 3, least=2),
        bias=keys.boolean("conv_bias", False),
    )
    keys.choice("hidden_act", ("silu",))  # which transformers' class does not read
    if FULL not in types:
        refuse("layer_types", list(types), f"at least one {FULL}")
    heads = attention(keys, num_kv_heads=8, qk_norm=norm)
    layers = [
        LayerConfig(mixer=heads if kind == FULL else conv, mlp=mlp, norm=norm)
        for kind, mlp in zip(types, mlps, strict=True)
    ]
    ties = keys.boolean("tie_word_embeddings", True)
    return replace(decoder(keys, layers), tie_word_embeddings=keys.boolean("tie_embedding", ties))


def _types(keys: Keys, num_layers: int) -> tuple[str, ...]:
    """By full_attn_idxs; without it all layers attend."""
    given = keys.get("full_attn_idxs", list(range(num_layers)))
    if not isinstance(given, list) or not all(type(index) is int and 0 <= index < num_layers for index in given):
        refuse("full_attn_idxs", given, f"a list of layers, 0 to {num_layers - 1}")
    return tuple(FULL if layer in given else CONV for layer in range(num_layers))


def _intermediate_size(keys: Keys) -> int:
    """With block_auto_adjust_ff_dim two thirds of what is said, times a factor, rounded up."""
    size = keys.integer("block_ff_dim", keys.integer("intermediate_size", 12288))
    multiple, factor = keys.integer("block_multiple_of", 256), keys.number("block_ffn_dim_multiplier", 1.0)
    if not keys.boolean("block_auto_adjust_ff_dim", True):
        return size
    return -(-int(factor * int(2 * size / 3)) // multiple) * multiple


NAMES = (
    Stored(name="operator_norm", of=("input_layernorm",)),
    Stored(name="ffn_norm", of=("post_attention_layernorm",)),
    Stored(name="self_attn.out_proj", of=("self_attn.o_proj",)),
    Stored(name="self_attn.q_layernorm", of=("self_attn.q_norm",)),
    Stored(name="self_attn.k_layernorm", of=("self_attn.k_norm",)),
    Stored(name="conv.in_proj", of=("conv.b_proj", "conv.c_proj", "conv.x_proj")),
    Stored(name="feed_forward.w1", of=("mlp.gate_proj",)),
    Stored(name="feed_forward.w3", of=("mlp.up_proj",)),
    Stored(name="feed_forward.w2", of=("mlp.down_proj",)),
    Stored(name="model.embedding_norm", of=("model.norm",)),
)
DEFAULTS = {"rope_theta": 1_000_000.0, "tie_word_embeddings": True, "max_position_embeddings": 128_000}

FAMILY = Family(
    model_type="lfm2",
    read=read,
    defaults={
        **DEFAULTS,
        "hidden_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 65_536,
    },
    tensor_names=TensorNames(stored=NAMES),
)
