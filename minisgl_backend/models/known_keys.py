"""Checks keys of config.json that the model's family does not read: refused, warned about, or ignored.

A key that the config class of the model's type does not have changes nothing in transformers: it is ignored with a
warning, and refused only where another engine reads it for that type (`READ_ELSEWHERE`). known_keys.json has the keys
of the native types' classes; scripts/list_config_keys.py writes it, so that serving needs no transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.keys import Keys, refusal, refuse

_FILE = Path(__file__).with_name("known_keys.json")

# Keys that do not change logits: about training, tokens, files, and what transformers returns to its caller.
_WITHOUT_EFFECT = frozenset(
    """
    _name_or_path _model_name_or_path _attn_implementation _attn_implementation_autoset architectures auto_map
    model_type transformers_version torch_dtype dtype id2label label2id problem_type num_labels finetuning_task
    return_dict return_dict_in_generate output_attentions output_hidden_states output_scores output_router_logits
    output_past use_return_dict torchscript use_bfloat16 tf_legacy_loss pruned_heads is_decoder add_cross_attention
    cross_attention_hidden_size tie_encoder_decoder chunk_size_feed_forward tokenizer_class prefix
    task_specific_params use_cache num_logits_to_keep pretraining_tp use_mem_eff_path unsloth_version
    pad_token_id bos_token_id eos_token_id sep_token_id cls_token_id mask_token_id unk_token_id eod_token_id
    decoder_start_token_id forced_bos_token_id forced_eos_token_id begin_suppress_tokens suppress_tokens bad_words_ids
    attention_dropout hidden_dropout attention_probs_dropout_prob hidden_dropout_prob attn_pdrop resid_pdrop embd_pdrop
    residual_dropout resid_dropout dropout activation_dropout classifier_dropout embedding_dropout layerdrop
    initializer_range initializer_cutoff_factor init_std router_aux_loss_coef aux_loss_coef z_loss_coefficient
    router_jitter_noise input_jitter_noise max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p min_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    sentence_transformers sbert_ce_default_activation_function
    encoder_no_repeat_ngram_size num_return_sequences remove_invalid_values exponential_decay_length_penalty
    cache_implementation transformers.js_config is_llama_config embed_dropout
    """.split()
)

_VLLM = "https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/model_executor/models/"
_SGLANG = "https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/models/"
_ROPES = "https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/model_executor/layers/rotary_embedding/__init__.py"
_SGLANG_ROPES = (
    "https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/layers/rotary_embedding/factory.py"
)
_FASTCHAT = "https://github.com/lm-sys/FastChat/blob/main/fastchat/model/model_adapter.py"  # of LongChat
_HUNYUAN = "https://github.com/Tencent-Hunyuan/Hunyuan-A13B/blob/main/models/configuration_hunyuan.py"  # its own code


class ReadElsewhere(NamedTuple):
    """A key that another engine reads for these model types, though transformers' class does not have it: a model that
    is published for that engine would be computed otherwise here."""

    key: str
    model_types: str  # separated by spaces; "" for all
    source: str  # where it is read
    harmless: Any = False  # the value that changes nothing there, besides null and false

    def is_of(self, model_type: str) -> bool:
        """Whether the row is one of this type's."""
        return not self.model_types or model_type in self.model_types.split()


_DUAL_CHUNKS = "qwen2 qwen2_moe qwen3 qwen3_moe"
_BY_LLAMA = "llama iquestcoder mistral ministral3 phi3 ernie4_5"  # vLLM has one class for them
_SCALED = "apertus exaone exaone4 exaone_moe granite granite_swa hyperclovax nemotron hunyuan_v1_dense hunyuan_v1_moe"
_BIASED = "apertus exaone exaone4 exaone_moe granite granite_swa nemotron hunyuan_v1_dense hunyuan_v1_moe"
_ROTATED = "apertus arcee exaone exaone_moe granite granite_swa phi3"

READ_ELSEWHERE = (
    ReadElsewhere("dual_chunk_attention_config", _DUAL_CHUNKS, _VLLM + "qwen2.py"),
    ReadElsewhere("dual_chunk_attention_config", "hyperclovax", _VLLM + "hyperclovax.py"),
    ReadElsewhere("dual_chunk_attention_config", "glm4", _SGLANG + "glm4.py"),
    # A key of the publisher's own, false in the released files; no engine among those above reads it.
    ReadElsewhere("use_mrope", "qwen2 qwen2_moe", "https://huggingface.co/Qwen/Qwen2.5-3B/blob/main/config.json"),
    ReadElsewhere("qk_norm", "qwen2", _VLLM + "qwen2.py"),
    ReadElsewhere("scale_emb", "qwen2", _SGLANG + "qwen2.py", 1),
    ReadElsewhere("shared_expert_intermediate_size", "qwen3_moe", _VLLM + "qwen3_moe.py", 0),
    ReadElsewhere("n_shared_experts", "qwen2_moe", _SGLANG + "qwen2_moe.py", 0),
    ReadElsewhere("bias", _BY_LLAMA, _VLLM + "llama.py"),
    ReadElsewhere("bias", _BIASED, _VLLM + "granite.py"),
    ReadElsewhere("qkv_bias", f"{_BY_LLAMA} apertus", _VLLM + "llama.py"),
    ReadElsewhere("mlp_bias", "apertus exaone4 exaone_moe", _VLLM + "exaone4.py"),
    ReadElsewhere("attention_bias", "exaone4 exaone_moe", _VLLM + "exaone4.py"),
    ReadElsewhere("attention_bias", "minimax_m2", _VLLM + "minimax_m2.py"),
    ReadElsewhere("attention_bias", "mistral ministral3", _VLLM + "llama.py"),
    ReadElsewhere("activation_function", "exaone", _VLLM + "exaone.py", "silu"),
    ReadElsewhere("logit_scale", f"{_BY_LLAMA} internlm3", _VLLM + "llama.py", 1),
    ReadElsewhere("logit_scale", _SCALED, _VLLM + "granite.py", 1),
    ReadElsewhere("logit_scale", "gemma3", _VLLM + "gemma3_mm.py", 1),
    ReadElsewhere("rope_is_neox_style", f"llama internlm3 iquestcoder {_ROTATED}", _SGLANG + "llama.py", True),
    ReadElsewhere("rope_is_neox_style", "ernie4_5 ernie4_5_moe", _SGLANG + "ernie4.py"),
    ReadElsewhere("llama_4_scaling", "deepseek_v2 deepseek_v3", _VLLM + "deepseek_v2.py"),
    ReadElsewhere("llama_4_scaling", "mistral ministral3", _VLLM + "mistral.py"),
    ReadElsewhere("ada_rms_norm_t_cond", "mistral ministral3", _VLLM + "mistral.py"),
    ReadElsewhere("index_topk", "deepseek_v2 deepseek_v3", _VLLM + "deepseek_v2.py"),
    ReadElsewhere("index_topk", "glm4_moe_lite", _VLLM + "glm4_moe_lite.py"),
    ReadElsewhere("swiglu_limit", "deepseek_v2 deepseek_v3", _SGLANG + "deepseek_v2.py"),
    ReadElsewhere("num_hash_layers", "deepseek_v2 deepseek_v3", _SGLANG + "deepseek_v2.py", 0),
    ReadElsewhere("moe_layer_freq", "glm4_moe_lite", _VLLM + "glm4_moe_lite.py", 1),
    ReadElsewhere("sliding_windows", "exaone_moe", _VLLM + "exaone_moe.py"),
    ReadElsewhere("swiglu_limits", "exaone_moe", _VLLM + "exaone_moe.py"),
    ReadElsewhere("hidden_act_alpha", "gpt_oss", _SGLANG + "gpt_oss.py", 1.702),
    ReadElsewhere("shared_intermediate_size", "granitemoe", _SGLANG + "granitemoe.py", 0),
    ReadElsewhere("attention_sinks", "granite", _VLLM + "granite.py"),
    ReadElsewhere("layer_rope_theta", "granite", _VLLM + "granite.py"),
    ReadElsewhere("layer_types", "granite", _VLLM + "granite.py", "full_attention"),
    ReadElsewhere("layer_types", "apertus", _VLLM + "apertus.py", "full_attention"),
    ReadElsewhere("layer_types", "olmo2", _SGLANG + "olmo2.py", "full_attention"),
    ReadElsewhere("rope_scaling.alpha", "", _ROPES),
    ReadElsewhere("rope_scaling.mrope_section", "", _ROPES),
    ReadElsewhere("rope_scaling.use_fope", "", _ROPES),
    ReadElsewhere("rope_scaling.short_mscale", "", _ROPES),
    ReadElsewhere("rope_scaling.long_mscale", "", _ROPES),
    ReadElsewhere("rope_scaling.extrapolation_factor", "", _SGLANG_ROPES, 1),
    ReadElsewhere("rope_scaling.attn_factor", "", _SGLANG_ROPES, 1),
    ReadElsewhere("rope_condense_ratio", "llama", _FASTCHAT, 1),
    ReadElsewhere("position_embedding_xdrope", "hunyuan_v1_dense hunyuan_v1_moe", _HUNYUAN),
    ReadElsewhere("use_rotary_pos_emb", "hunyuan_v1_dense hunyuan_v1_moe", _HUNYUAN, True),
    ReadElsewhere("sliding_window", "", "https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/engine/arg_utils.py"),
)


class ReadElsewhereError(ConfigError):
    """A key of `READ_ELSEWHERE`, which transformers' own code would ignore in silence."""


_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("vocab_size", "max_position_embeddings", "rms_norm_eps"),
)


def default_sizes(model_type: str) -> Mapping[str, Any]:
    """Sizes of `model_type`'s class in transformers, of a decoder whose config omits them."""
    known: Mapping[str, Any] = _defaults_of(model_type)
    return {key: known[key] for key in _SIZES if key in known}


def _defaults_of(model_type: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))["defaults"].get(model_type, {})
    return found


def check_unread(keys: Keys, model_type: str, longest: int) -> tuple[str, ...]:
    """Raises ConfigError for an unread key of `model_type`'s class in transformers whose value is not its default, and
    ReadElsewhereError for one that another engine reads for this type. Returns the other unread keys.

    `longest`: sequence in tokens.
    """
    unread = {key: value for key, value in keys.unread().items() if key not in _WITHOUT_EFFECT}
    own = _defaults_of(model_type)
    unknown = []
    for key, value in unread.items():
        if key in own:
            if value != own[key]:
                refuse(key, value, f"{json.dumps(own[key])} for {model_type}")
            continue
        rows = [row for row in READ_ELSEWHERE if row.key == key and row.is_of(model_type)]
        if key == "sliding_window" and (keys.get("use_sliding_window") is False or _reaches(value, longest)):
            continue
        for row in rows:
            _check_elsewhere(row, value, model_type)
        if not rows:
            unknown.append(key)
    return tuple(unknown)


def check_model_type(given: Any, architecture: str, model_type: str) -> None:
    """Raises ConfigError for the type of another decoder than the architecture's: transformers chooses a model's code
    by this key, whatever `architectures` says."""
    if given in (None, model_type):
        return
    if given in json.loads(_FILE.read_text(encoding="utf-8"))["model_types"]:
        refuse("model_type", given, f'"{model_type}", as `architectures` ({architecture}) says, or absent')


def _reaches(window: Any, longest: int) -> bool:
    return isinstance(window, int) and window >= longest


def _check_elsewhere(row: ReadElsewhere, value: Any, model_type: str) -> None:
    values = value if isinstance(value, list) else [value]  # of each layer
    if any(one is not False and (one is True or one != row.harmless) for one in values if one is not row.harmless):
        allowed = f"absent for {model_type}: another engine reads it ({row.source}), this one does not"
        raise ReadElsewhereError(refusal(row.key, value, allowed))
