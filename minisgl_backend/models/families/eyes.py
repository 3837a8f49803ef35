"""Readers of the encoders of images, from config.json's vision_config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

from minisgl_backend.layers.encoder_config import (
    CLIP_MEAN,
    CLIP_STD,
    Normalisation,
    PixtralConfig,
    QwenVisionConfig,
    SiglipConfig,
    TowerConfig,
)
from minisgl_backend.models.description import DecoderConfig
from minisgl_backend.models.keys import Keys, refuse

CLIP = Normalisation(mean=CLIP_MEAN, std=CLIP_STD)
_ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "quick_gelu", "silu")
_QWEN: Mapping[str, Mapping[str, Any]] = MappingProxyType(  # transformers' defaults of keys that configs omit
    {
        "2": {"depth": 32, "hidden_size": 1280, "num_heads": 16, "mlp_ratio": 4, "hidden_act": "quick_gelu"},
        "2.5": {"depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420, "hidden_act": "silu"},
        "3": {
            "depth": 27,
            "hidden_size": 1152,
            "num_heads": 16,
            "intermediate_size": 4304,
            "hidden_act": "gelu_pytorch_tanh",
            "num_position_embeddings": 2304,
        },
    }
)

# Towers that transformers' own code computes, with its defaults of keys that configs omit.
_TOWERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "clip_vision_model": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "patch_size": 32},
        "siglip_vision_model": {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "patch_size": 16,
        },
        "idefics3_vision": {"hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "patch_size": 32},
        "smolvlm_vision": {"hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "patch_size": 32},
        "internvl_vision": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "patch_size": 14},
        "gemma4_vision": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "patch_size": 16},
        "pixtral": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "patch_size": 16},
        "glm4v_vision": {
            # Its intermediate_size is that of the merger.
            **{"hidden_size": 1536, "out_hidden_size": 4096, "depth": 24, "patch_size": 14},
            "spatial_merge_size": 2,
        },
    }
)
_WHOLE = ("gemma4_vision", "pixtral", "glm4v_vision")  # an image of any size is one tile
_TOWER_OF: Mapping[Any, str] = MappingProxyType(  # whatever type vision_config names
    {
        "gemma4": "gemma4_vision",
        "glm46v": "glm4v_vision",
        "glm4v": "glm4v_vision",
        "glm4v_moe": "glm4v_vision",
        "idefics3": "idefics3_vision",
        "internvl": "internvl_vision",
        "smolvlm": "smolvlm_vision",
    }
)


def qwen_vision(
    config: Keys,
    decoder: DecoderConfig,
    generation: Literal["2", "2.5", "3"],
    deepstack: tuple[int, ...] = (8, 16, 24),
) -> QwenVisionConfig:
    """Of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5. Raises ConfigError for what is not computed.

    deepstack: layers whose outputs become planes, where config.json does not name them."""
    keys = Keys(config.mapping("vision_config"), _QWEN[generation])
    keys.choice("temporal_patch_size", (2,))
    keys.choice("in_channels", (3,))
    # Qwen2-VL's hidden_size is that of the decoder.
    size = keys.integer("embed_dim", 1280) if generation == "2" else keys.integer("hidden_size")
    patch, merge = keys.integer("patch_size", 16 if generation == "3" else 14), keys.integer("spatial_merge_size", 2)
    more: dict[str, Any] = {"intermediate_size": size * keys.integer("mlp_ratio")} if generation == "2" else {}
    if generation == "2.5":
        window = keys.integer("window_size", 112) // patch // merge * merge
        if window < merge:
            refuse("window_size", keys.get("window_size"), f"{patch * merge} pixels or more, a block of patches")
        layers = tuple(keys.get("fullatt_block_indexes", (7, 15, 23, 31)))
        more = {"window": window, "full_layers": layers, "norm": "rms", "gated": True}
    planes: tuple[int, ...] = ()
    if generation == "3":
        planes = tuple(keys.get("deepstack_visual_indexes", deepstack))
        more = {"num_positions": keys.integer("num_position_embeddings"), "plane_layers": planes}
    if len(planes) > decoder.num_layers:
        refuse("deepstack_visual_indexes", list(planes), f"{decoder.num_layers} or fewer, as the decoder has layers")
    return QwenVisionConfig(
        generation=generation,
        out_size=decoder.hidden_size,
        hidden_size=size,
        num_layers=keys.integer("depth"),
        num_heads=keys.integer("num_heads"),
        patch_size=patch,
        merge=merge,
        planes=tuple(range(len(planes))),
        activation=keys.choice("hidden_act", _ACTIVATIONS),
        normalisation=Normalisation() if generation == "3" else CLIP,
        patch_bias=generation == "3",
        rope_theta=_theta(keys),
        **{"intermediate_size": keys.integer("intermediate_size", 1), **more},
    )


def gemma3_vision(config: Keys, decoder: DecoderConfig) -> SiglipConfig:
    """Of Gemma 3."""
    keys = Keys(config.mapping("vision_config"), {"hidden_act": "gelu_pytorch_tanh"})
    keys.choice("num_channels", (3,))
    image, patch = keys.integer("image_size", 224), keys.integer("patch_size", 16)
    side, tokens = image // patch, config.integer("mm_tokens_per_image", 256)
    of_tokens = int(tokens**0.5)
    if of_tokens**2 != tokens or side % of_tokens:
        refuse("mm_tokens_per_image", tokens, f"the square of a divisor of {side}, the patches along a side")
    return SiglipConfig(
        out_size=decoder.hidden_size,
        hidden_size=keys.integer("hidden_size", 768),
        intermediate_size=keys.integer("intermediate_size", 3072),
        num_layers=keys.integer("num_hidden_layers", 12),
        num_heads=keys.integer("num_attention_heads", 12),
        patch_size=patch,
        image_size=image,
        merge=side // of_tokens,
        activation=keys.choice("hidden_act", _ACTIVATIONS),
        eps=keys.number("layer_norm_eps", 1e-6),
        num_positions=side**2,
        bidirectional="all",
    )


def mistral3_vision(config: Keys, decoder: DecoderConfig) -> PixtralConfig:
    """Of Mistral 3."""
    keys = Keys(config.mapping("vision_config"), {"hidden_act": "gelu", "model_type": "pixtral"})
    keys.choice("num_channels", (3,))
    keys.choice("model_type", ("pixtral",))
    config.choice("vision_feature_layer", (-1,))
    text = Keys(config.mapping("text_config"))
    return PixtralConfig(
        out_size=decoder.hidden_size,
        hidden_size=keys.integer("hidden_size", 1024),
        intermediate_size=keys.integer("intermediate_size", 4096),
        num_layers=keys.integer("num_hidden_layers", 24),
        num_heads=keys.integer("num_attention_heads", 16),
        patch_size=keys.integer("patch_size", 16),
        merge=config.integer("spatial_merge_size", 2),
        activation=keys.choice("hidden_act", _ACTIVATIONS),
        gated=True,
        norm="rms",
        eps=1e-5,
        bias=False,
        patch_bias=False,
        rope_theta=_theta(keys),
        rope_split="in turns",
        normalisation=CLIP,
        projector_eps=text.number("rms_norm_eps", 1e-6),
        projector_bias=config.boolean("multimodal_projector_bias", False),
        projector_activation=config.choice("projector_hidden_act", _ACTIVATIONS),
    )


_SHARES = 8  # that an image's tiles are computed in, at most


def tower(config: Keys, decoder: DecoderConfig) -> TowerConfig:
    """Of a tower that transformers' own code computes, as config.json says it."""
    vision = config.mapping("vision_config")
    model_type = _TOWER_OF.get(config.get("model_type")) or vision.get("model_type") or "clip_vision_model"
    if model_type not in _TOWERS:
        refuse("vision_config.model_type", model_type, ", ".join(_TOWERS))
    keys = Keys(vision, _TOWERS[model_type])
    text = Keys(config.mapping("text_config"))
    names = {"glm4v_vision": ("out_hidden_size", "depth")}.get(model_type, ("intermediate_size", "num_hidden_layers"))
    return TowerConfig(
        values=dict(config.given),
        out_size=decoder.hidden_size,
        hidden_size=keys.integer("hidden_size"),
        intermediate_size=keys.integer(names[0]),
        depth=keys.integer(names[1]),
        num_layers=1 if model_type in _WHOLE else _SHARES,
        patch_size=_side(keys, "patch_size"),
        merge=keys.integer("spatial_merge_size", 1),
        # Granite multiplies what it gets in place of embeddings, too.
        scale=decoder.embedding_multiplier if text.get("model_type") == "granite" else 1.0,
    )


def gemma4_vision(config: Keys, decoder: DecoderConfig) -> TowerConfig:
    """Of Gemma 4. An image's tokens see each other in layers with a window, where the text's config says so."""
    sees = Keys(config.mapping("text_config")).get("use_bidirectional_attention") == "vision"
    found = tower(config, decoder)
    return replace(
        found,
        values={**found.values, "audio_config": None},
        merge=Keys(config.mapping("vision_config")).integer("pooling_kernel_size", 3),
        bidirectional="windows" if sees else "none",
    )


def _side(keys: Keys, name: str) -> int:
    """A number, or a list of equal ones."""
    found = keys.get(name)
    return keys.integer(name) if not isinstance(found, list) or len(set(found)) != 1 else int(found[0])


def _theta(keys: Keys) -> float:
    """The rotation's, in either form of transformers' configs."""
    return Keys(keys.mapping("rope_parameters")).number("rope_theta", keys.number("rope_theta", 10_000.0))
