"""Small configs of the decoder types of transformers: common sizes, and what each type needs besides."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB_SIZE, MAX_POSITION, WINDOW = 320, 512, 24
LARGEST = 3_000_000  # parameters

# Under whichever of these names a config class has them.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "ffn_hidden_size": 96,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITION,
    "sliding_window": WINDOW,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "attention_dropout": 0.0,
}
_SLIDES = ["sliding_attention", "full_attention", "sliding_attention"]

# Layers differ in their head size and number of KV heads; the last two keep nothing of their own.
_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": _SLIDES[:2] * 2,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "enable_moe_block": True,
    "top_k_experts": 2,
}

# By model_type: other keys, or others' values.
SPECIAL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": MAX_POSITION},
    "gpt-sw3": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": MAX_POSITION},
    "gpt_bigcode": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": MAX_POSITION},
    "gptj": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": MAX_POSITION, "rotary_dim": 8},
    "codegen": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": MAX_POSITION, "rotary_dim": 8},
    "deepseek_v3": {"head_dim": 8, "num_key_value_heads": 4},
    "youtu": {"head_dim": 8, "num_key_value_heads": 4},
    "axk1": {"head_dim": 8, "num_key_value_heads": 4},
    "glm4_moe_lite": {"head_dim": 8, "num_key_value_heads": 4},
    "sarvam_mla": {"head_dim": 8, "num_key_value_heads": 4},
    "deepseek_v2": {"head_dim": 8, "num_key_value_heads": 4, "topk_method": "greedy"},
    "minicpm3": {"head_dim": 8, "num_key_value_heads": 4},
    "opt": {"word_embed_proj_dim": 64},
    "gemma3n_text": {
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "layer_types": [*_SLIDES, "full_attention", "sliding_attention"],
        "intermediate_size": [96] * 5,
        "activation_sparsity_pattern": [0.5] + [0.0] * 4,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "laurel_rank": 8,
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": {**_GEMMA4, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "laguna": {"num_attention_heads_per_layer": [4, 2, 4]},
    "ctrl": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": MAX_POSITION, "dff": 96},
}

# Types that run through transformers' code.
SERVED: tuple[str, ...] = tuple(
    """
    afmoe apertus apertus1p5_text arcee aria_text axk1 beam biogpt bitnet codegen cohere cohere2 cohere2_moe ctrl
    cwm deepseek_v2 deepseek_v3 diffllama dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe flex_olmo flint
    gemma gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3
    gpt2 gpt_bigcode gpt_neox gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoeshared helium
    hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 kolibri1 laguna llama mellum
    mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder
    nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe
    sarvam_mla sarvam_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma youtu
    """.split()
)


def small_config(model_type: str, **changes: Any) -> Any:
    """Of the type's text model, with the sizes above."""
    config_class = CONFIG_MAPPING[model_type]
    known = set(config_class().to_dict()) | set(getattr(config_class, "attribute_map", {}))
    common = {key: value for key, value in _COMMON.items() if key in known}
    return config_class(**{**common, **SPECIAL.get(model_type, {}), **changes})


def small_model(model_type: str, **changes: Any) -> Any:
    """The same weights in every run; no norm or bias is trivial."""
    torch.manual_seed(zlib.crc32(model_type.encode()))
    config = small_config(model_type, **changes)
    model_class: Any = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{model_type} has {size} parameters with this config; allowed: {LARGEST}")
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def save_type(model_type: str, folder: Path, **changes: Any) -> None:
    """Writes a checkpoint of the type."""
    small_model(model_type, **changes).save_pretrained(folder)
