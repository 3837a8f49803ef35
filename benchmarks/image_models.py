"""Shapes of models that see, as those of `benchmarks.model_shapes`, and what their folders say of pixels."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_MERGE: dict[str, Any] = {"spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
_QWEN_TOKENS = {"image_token_id": 151655, "video_token_id": 151656, "bos_token_id": 256, "eos_token_id": 257}

IMAGE_SHAPES: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "qwen2.5-vl-7b": {
            **_QWEN_TOKENS,
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": "qwen2_5_vl",
            "hidden_act": "silu",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": 152064,
            "vision_config": {
                **_MERGE,
                "depth": 32,
                "hidden_act": "silu",
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "num_heads": 16,
                "out_hidden_size": 3584,
                "patch_size": 14,
                "window_size": 112,
                "fullatt_block_indexes": [7, 15, 23, 31],
            },
        },
        "qwen3-vl-8b": {
            **_QWEN_TOKENS,
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "model_type": "qwen3_vl",
            "tie_word_embeddings": False,
            "text_config": {
                "model_type": "qwen3_vl_text",
                "attention_bias": False,
                "dtype": "bfloat16",
                "head_dim": 128,
                "hidden_act": "silu",
                "hidden_size": 4096,
                "intermediate_size": 12288,
                "num_hidden_layers": 36,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "max_position_embeddings": 40960,
                "rms_norm_eps": 1e-6,
                "rope_theta": 5000000.0,
                "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]},
                "vocab_size": 151936,
            },
            "vision_config": {
                **_MERGE,
                "model_type": "qwen3_vl",
                "depth": 27,
                "deepstack_visual_indexes": [8, 16, 24],
                "hidden_act": "gelu_pytorch_tanh",
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_heads": 16,
                "num_position_embeddings": 2304,
                "out_hidden_size": 4096,
                "patch_size": 16,
            },
        },
    }
)

_CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
PROCESSORS: Mapping[str, dict[str, Any]] = MappingProxyType(  # preprocessor_config.json, by shape
    {
        "qwen2.5-vl-7b": {**_CLIP, "patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 12845056},
        "qwen3-vl-8b": {
            **_HALF, "patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 16777216}
        },
    }
)  # fmt: skip
