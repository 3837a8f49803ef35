"""config.json as models were released with it, which has more keys than transformers writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from minisgl_backend.attention.base import AttentionSpec
from minisgl_backend.kv.pool import bytes_per_page
from minisgl_backend.kv.state import StateLayout
from minisgl_backend.models.build import attention_spec
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.families import FAMILIES

GLM_4_5_AIR: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "pad_token_id": 151329,
    "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "partial_rotary_factor": 0.5, "initializer_range": 0.02, "intermediate_size": 10944,
    "max_position_embeddings": 131072, "model_type": "glm4_moe", "moe_intermediate_size": 1408, "norm_topk_prob": True,
    "num_attention_heads": 96, "n_group": 1, "topk_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
    "routed_scaling_factor": 1.0, "num_experts_per_tok": 8, "first_k_dense_replace": 1, "num_hidden_layers": 46,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
    "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "use_qk_norm": False, "vocab_size": 151552,
}  # fmt: skip
MINIMAX_M2: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"], "attention_dropout": 0.0, "attn_type_list": [1] * 62,
    "bos_token_id": None, "eos_token_id": None, "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072,
    "initializer_range": 0.02, "intermediate_size": 1536, "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_beta": 1.0, "max_position_embeddings": 196608,
    "mlp_intermediate_size": 8192, "model_type": "minimax_m2", "mtp_transformer_layers": 1, "num_attention_heads": 48,
    "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256,
    "num_mtp_modules": 3, "output_router_logits": False, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06,
    "rope_theta": 5000000, "rotary_dim": 64, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0,
    "scoring_func": "sigmoid", "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "sliding_window": None,
    "tie_word_embeddings": False, "use_cache": True, "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True,
    "torch_dtype": "bfloat16", "vocab_size": 200064,
}  # fmt: skip
ERNIE_4_5_21B: dict[str, Any] = {
    "architectures": ["Ernie4_5_MoeForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 12288, "max_position_embeddings": 131072,
    "model_type": "ernie4_5_moe", "num_attention_heads": 20, "num_key_value_heads": 4, "num_hidden_layers": 28,
    "rms_norm_eps": 1e-05, "use_cache": True, "vocab_size": 103424, "rope_theta": 500000, "use_rmsnorm": True,
    "tie_word_embeddings": True, "use_bias": False, "moe_num_experts": 64, "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1, "moe_intermediate_size": 1536, "moe_capacity": [64, 64, 64], "moe_gate": "topk",
    "moe_k": 6, "moe_layer_interval": 1, "moe_use_aux_free": True, "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
}  # fmt: skip
COMMAND_R7B: dict[str, Any] = {
    "architectures": ["Cohere2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 5,
    "cache_implementation": "hybrid", "eos_token_id": 255001, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "layer_norm_eps": 1e-05,
    "layer_switch": 4, "logit_scale": 0.25, "max_position_embeddings": 132096, "model_type": "cohere2",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "order_of_interleaved_layers":
    "local_attn_first", "pad_token_id": 0, "position_embedding_type": "rope_gptj", "rope_scaling": None,
    "rope_theta": 50000, "rotary_pct": 1.0, "sliding_window": 4096, "sliding_window_pattern": 4,
    "torch_dtype": "bfloat16", "use_cache": True, "use_embedding_sharing": True, "use_gated_activation": True,
    "use_parallel_block": True, "use_parallel_embedding": True, "vocab_size": 256000,
}  # fmt: skip
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
    "pad_token_id": 199999, "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn",
    "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0,
    "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False},
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 201088,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "aux_loss_alpha": 0.001, "hidden_act": "silu",
    "initializer_range": 0.02, "kv_lora_rank": 512, "moe_layer_freq": 1, "pretraining_tp": 1, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "seq_aux": True, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128,
}  # fmt: skip
_YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
DEEPSEEK_V2_LITE: dict[str, Any] = {
    **_DEEPSEEK, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "bos_token_id": 100000,
    "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10944,
    "max_position_embeddings": 163840, "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64,
    "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6,
    "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None, "rope_theta": 10000,
    "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, "routed_scaling_factor": 1.0,
    "scoring_func": "softmax", "topk_group": 1, "topk_method": "greedy", "vocab_size": 102400,
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    **_DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "bos_token_id": 0,
    "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432,
    "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
    "rope_theta": 10000, "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "topk_group": 4,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "vocab_size": 129280,
}  # fmt: skip
KIMI_K2: dict[str, Any] = {
    **DEEPSEEK_V3, "model_type": "kimi_k2", "bos_token_id": 163584, "eos_token_id": 163585, "first_k_dense_replace": 1,
    "max_position_embeddings": 131072, "n_group": 1, "n_routed_experts": 384, "num_attention_heads": 64,
    "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "rope_theta": 50000.0, "routed_scaling_factor": 2.827,
    "rope_scaling": {**_YARN, "beta_fast": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0}, "topk_group": 1,
    "vocab_size": 163840,
}  # fmt: skip
GLM_4_7_FLASH: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "pad_token_id": 154820, "eos_token_id": [154820, 154827, 154829], "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 10240, "max_position_embeddings": 202752, "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536, "topk_method": "noaux_tc", "norm_topk_prob": True, "num_attention_heads": 20,
    "n_group": 1, "topk_group": 1, "n_routed_experts": 64, "n_shared_experts": 1, "routed_scaling_factor": 1.8,
    "num_experts_per_tok": 4, "first_k_dense_replace": 1, "num_hidden_layers": 47, "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 1000000, "tie_word_embeddings": False, "dtype": "bfloat16", "q_lora_rank": 768, "kv_lora_rank": 512,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "vocab_size": 154880,
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "full_attention_interval": 4, "head_dim": 256,
    "hidden_act": "silu", "initializer_range": 0.02, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128, "rms_norm_eps": 1e-06,
    "max_position_embeddings": 262144, "num_attention_heads": 16, "tie_word_embeddings": False, "use_cache": True,
}  # fmt: skip
QWEN3_NEXT_80B: dict[str, Any] = {
    **_DELTA, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "hidden_size": 2048, "intermediate_size": 5120,
    "mlp_only_layers": [], "moe_intermediate_size": 512, "norm_topk_prob": True, "num_experts": 512,
    "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2, "output_router_logits": False,
    "partial_rotary_factor": 0.25, "rope_scaling": None, "rope_theta": 10000000, "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512, "torch_dtype": "bfloat16", "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
_QWEN3_5_TEXT: dict[str, Any] = {
    **_DELTA, "attn_output_gate": True, "dtype": "bfloat16", "eos_token_id": 248044, "vocab_size": 248320,
    "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 10000000,
        "rope_type": "default",
    },
}  # fmt: skip
_QWEN3_5_AROUND: dict[str, Any] = {
    "image_token_id": 248056, "video_token_id": 248057, "vision_start_token_id": 248053, "vision_end_token_id": 248054,
    "tie_word_embeddings": False, "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5"},
}  # fmt: skip


def _qwen3_5(num_layers: int, model_type: str = "qwen3_5", **text: Any) -> dict[str, Any]:
    types = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(num_layers)]
    sizes = {"num_hidden_layers": num_layers, "layer_types": types, "model_type": f"{model_type}_text"}
    architecture = (
        "Qwen3_5ForConditionalGeneration" if model_type == "qwen3_5" else "Qwen3_5MoeForConditionalGeneration"
    )
    inner = {**_QWEN3_5_TEXT, **sizes, **text}
    return {**_QWEN3_5_AROUND, "architectures": [architecture], "model_type": model_type, "text_config": inner}


QWEN3_5_9B = _qwen3_5(32, hidden_size=4096, intermediate_size=12288, num_key_value_heads=4)
QWEN3_5_27B = _qwen3_5(
    64, hidden_size=5120, intermediate_size=17408, num_attention_heads=24, num_key_value_heads=4,
    linear_num_value_heads=48,
)  # fmt: skip
QWEN3_5_35B_A3B = _qwen3_5(
    40, "qwen3_5_moe", hidden_size=2048, num_key_value_heads=2, moe_intermediate_size=512, num_experts=256,
    num_experts_per_tok=8, shared_expert_intermediate_size=512, router_aux_loss_coef=0.001,
)  # fmt: skip
OLMO_HYBRID_7B: dict[str, Any] = {
    "architectures": ["OlmoHybridForCausalLM"], "model_type": "olmo_hybrid", "attention_bias": False,
    "attention_dropout": 0.0, "bos_token_id": None, "dtype": "bfloat16", "eos_token_id": 100257, "hidden_act": "silu",
    "hidden_size": 3840, "initializer_range": 0.02, "intermediate_size": 11008, "linear_allow_neg_eigval": True,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 96, "linear_num_key_heads": 30, "linear_num_value_heads": 30,
    "linear_value_head_dim": 192, "max_position_embeddings": 65536, "num_attention_heads": 30, "num_hidden_layers": 32,
    "num_key_value_heads": 30, "pad_token_id": 100277, "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": None, "rope_type": "default"}, "tie_word_embeddings": False, "use_cache": True,
    "vocab_size": 100352,
}  # fmt: skip
# MiB of the states in a slot, and KiB of the inputs of convolutions.
SLOTS = {
    "qwen3-next-80b": (72, 36 * 48),
    "qwen3.5-9b": (48, 24 * 48),
    "qwen3.5-27b": (144, 48 * 60),
    "qwen3.5-35b-a3b": (60, 30 * 48),
    "olmo-hybrid-7b": (24 * 30 * 96 * 192 * 4 / 2**20, 24 * 3 * 30 * 384 * 2 / 2**10),
}

_LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-05, "block_out_init_scale": 1.0,
    "block_use_swiglu": True, "block_use_xavier_init": True, "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False,
    "conv_use_xavier_init": True, "eos_token_id": 7, "initializer_range": 0.02, "max_position_embeddings": 128000,
    "model_type": "lfm2", "norm_eps": 1e-05, "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16", "use_cache": True, "use_pos_enc": True, "vocab_size": 65536,
}  # fmt: skip
_LFM2_16: dict[str, Any] = {**_LFM2, "num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14]}


def _lfm2(config: dict[str, Any], size: int, intermediate_size: int, heads: int) -> dict[str, Any]:
    sizes = dict.fromkeys(("block_dim", "conv_dim", "conv_dim_out", "hidden_size"), size)
    return {
        **config,
        **sizes,
        "block_ff_dim": intermediate_size,
        **dict.fromkeys(("num_attention_heads", "num_heads"), heads),
    }


# (config, MLP, bytes of a token's keys and values, bytes of a page's vectors), in bfloat16, without drafts.
LFM2 = {
    "lfm2-350m": (_lfm2(_LFM2_16, 1024, 6656, 16), 4608, 12 << 10, 60 << 10),
    "lfm2-700m": (_lfm2(_LFM2_16, 1536, 10240, 24), 6912, 12 << 10, 90 << 10),
    "lfm2-1.2b": (_lfm2(_LFM2_16, 2048, 12288, 32), 8192, 12 << 10, 120 << 10),
    "lfm2-2.6b": (
        _lfm2(
            {**_LFM2, "num_hidden_layers": 30, "full_attn_idxs": [2, 6, 9, 13, 17, 21, 25, 28], "theta": 1000000.0},
            2048, 10752, 32,
        ) | {"block_auto_adjust_ff_dim": False},
        10752, 16 << 10, 264 << 10,
    ),
    "lfm2-8b-a1b": (
        {
            "architectures": ["Lfm2MoeForCausalLM"], "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False,
            "dtype": "bfloat16", "eos_token_id": 7, "hidden_size": 2048, "initializer_range": 0.02,
            "intermediate_size": 7168, "max_position_embeddings": 128000, "model_type": "lfm2_moe",
            "layer_types": ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
            "moe_intermediate_size": 1792, "norm_eps": 1e-05, "norm_topk_prob": True, "num_attention_heads": 32,
            "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 24,
            "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta": 1000000.0, "routed_scaling_factor": 1.0,
            "use_cache": True, "use_expert_bias": True, "vocab_size": 65536,
        },
        7168, 12 << 10, 216 << 10,
    ),
}  # fmt: skip

RELEASED = {
    **{name: config for name, (config, *_) in LFM2.items()},
    "qwen3-next-80b": QWEN3_NEXT_80B,
    "qwen3.5-9b": QWEN3_5_9B,
    "qwen3.5-27b": QWEN3_5_27B,
    "qwen3.5-35b-a3b": QWEN3_5_35B_A3B,
    "olmo-hybrid-7b": OLMO_HYBRID_7B,
    "deepseek-v2-lite": DEEPSEEK_V2_LITE,
    "deepseek-v3": DEEPSEEK_V3,
    "kimi-k2": KIMI_K2,
    "glm-4.7-flash": GLM_4_7_FLASH,
    "gpt-oss-20b": GPT_OSS_20B,
    "glm-4.5-air": GLM_4_5_AIR,
    "minimax-m2": MINIMAX_M2,
    "minimax-m2 as published": {
        **MINIMAX_M2,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "float8_e4m3fn",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        },
    },
    "ernie-4.5": ERNIE_4_5_21B,
    "r7b": COMMAND_R7B,
}


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_config_is_read(name: str) -> None:
    config = ModelConfig.from_dicts(RELEASED[name], {})
    assert config.num_layers == RELEASED[name].get("text_config", RELEASED[name])["num_hidden_layers"]
    assert config.architecture in FAMILIES


@pytest.mark.parametrize("name", SLOTS)
def test_bytes_of_a_state(name: str) -> None:
    config, (mib, kib) = ModelConfig.from_dicts(RELEASED[name], {}), SLOTS[name]
    config.check_tensor_parallel(2)
    for tp_size in (1, 2):
        layout = StateLayout.of((layer.mixer.state for layer in config.layers), torch.bfloat16, tp_size)
        assert layout is not None
        assert layout.bytes_per_slot == (mib * 2**20 + kib * 2**10) / tp_size
    assert all(one.rope is None or one.rope.rotary_dim == 64 for one in config.attentions)


def test_which_layers_keep_states() -> None:
    """By layer_types, or where they are absent by full_attention_interval."""
    told = ModelConfig.from_dicts(QWEN3_5_9B, {})
    assert [layer.mixer.state is None for layer in told.layers] == [False, False, False, True] * 8
    text = {key: value for key, value in QWEN3_5_9B["text_config"].items() if key != "layer_types"}
    assert ModelConfig.from_dicts({**QWEN3_5_9B, "text_config": text}, {}).layers == told.layers
    every_second = ModelConfig.from_dicts({**QWEN3_5_9B, "text_config": {**text, "full_attention_interval": 2}}, {})
    assert [layer.mixer.state is None for layer in every_second.layers] == [False, True] * 16
    assert told.layer_weights_per_token == 24 * 4096 * (12_288 + 64 + 4096) + 8 * 4096 * 14_336 + 32 * 3 * 4096 * 12_288


def test_olmo_hybrid_says_in_two_ways_that_nothing_is_rotated() -> None:
    told = ModelConfig.from_dicts(OLMO_HYBRID_7B, {})
    assert ModelConfig.from_dicts({**OLMO_HYBRID_7B, "rope_parameters": None}, {}) == told
    assert all(one.rope is None for one in told.attentions)


def test_minimax_m2_rotates_as_many_dimensions_as_rotary_dim_says() -> None:
    """The tests against transformers do not show it: what it saves has partial_rotary_factor, which counts first."""
    rope = ModelConfig.from_dicts(MINIMAX_M2, {}).layers[0].mixer.rope
    assert rope is not None
    assert (rope.rotary_dim, rope.theta) == (64, 5e6)


@pytest.mark.parametrize("name", LFM2)
def test_what_lfm2_keeps(name: str) -> None:
    config, size, token_bytes, vector_bytes = LFM2[name]
    model = ModelConfig.from_dicts(config, {})
    assert model.layers[0].mlp.intermediate_size == size
    assert model.tie_word_embeddings
    blank = AttentionSpec(
        page_size=64, max_seq_len=32768, max_rows=9, dtype=torch.bfloat16, device=torch.device("meta"), max_drafts=0
    )
    for drafts in (0, 3):
        spec = attention_spec(model, replace(blank, max_drafts=drafts), tp_size=1)
        assert bytes_per_page(spec.places, 64) == 64 * token_bytes + vector_bytes * (3 + drafts) // 3
        assert bytes_per_page(attention_spec(model, spec, tp_size=2).places, 64) * 2 == bytes_per_page(spec.places, 64)
