"""Options of the configs that tests/parity/checkpoints.py makes, which several of them share."""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 320
MAX_POSITION = 512

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITION,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Larger than usual, so that attention and rotation matter as much as they do in a trained model.
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
GRANITE: dict[str, Any] = {
    "attention_multiplier": 0.1, "residual_multiplier": 0.4, "embedding_multiplier": 3.0, "logits_scaling": 2.0,
}  # fmt: skip
GEMMA: dict[str, Any] = {"pad_token_id": 0, "attn_implementation": "eager"}
SLIDES = ["sliding_attention", "full_attention", "sliding_attention"]
CONVS = ["conv", "full_attention", "conv"]
GEMMA4: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 24,
    "layer_types": [*SLIDES[:2], "full_attention"],
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 20.0,
    **GEMMA,
}
# Layers without a window have half the bytes of a token, or twice as many.
GEMMA4_SMALL = {**GEMMA4, "num_key_value_heads": 4, "layer_types": [*SLIDES[::2], "full_attention"]}
GEMMA4_LARGE = {**GEMMA4_SMALL, "num_global_key_value_heads": 2, "global_head_dim": 64}
MOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

MROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
ENCODER: dict[str, Any] = {
    "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64, "patch_size": 4,
}  # fmt: skip
PIXTRAL: dict[str, Any] = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "head_dim": 16, "image_size": 16, "patch_size": 4,
}  # fmt: skip
LLAMA4: dict[str, Any] = {
    "head_dim": 16, "intermediate_size_mlp": 80, "num_local_experts": 4, "moe_layers": [1, 2],
    "no_rope_layers": [1, 0, 1], "attention_chunk_size": 24, "floor_scale": 16, "attn_scale": 0.3,
    "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 500_000.0}, "pad_token_id": 0,
}  # fmt: skip
LLAMA4_ENCODER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "num_key_value_heads": 4,
}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
}

# The gated delta rule in three of four layers.
DELTA: dict[str, Any] = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
