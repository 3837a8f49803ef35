"""Checks keys of config.json that the model's family does not read: refused, warned about, or ignored.

known_keys.json has the keys of the config classes of transformers' decoders; scripts/list_config_keys.py writes it, so
that serving needs no transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minisgl_backend.models.keys import Keys, refuse

_FILE = Path(__file__).with_name("known_keys.json")

# Keys that do not change logits: about training, tokens, files, and what transformers returns to its caller.
_WITHOUT_EFFECT = frozenset(
    """
    _name_or_path _attn_implementation _attn_implementation_autoset architectures auto_map model_type
    transformers_version torch_dtype dtype id2label label2id problem_type num_labels finetuning_task return_dict
    return_dict_in_generate output_attentions output_hidden_states output_scores output_router_logits output_past
    use_return_dict torchscript use_bfloat16 tf_legacy_loss pruned_heads is_decoder add_cross_attention
    cross_attention_hidden_size tie_encoder_decoder chunk_size_feed_forward tokenizer_class prefix
    task_specific_params use_cache num_logits_to_keep pretraining_tp use_mem_eff_path unsloth_version
    pad_token_id bos_token_id eos_token_id sep_token_id cls_token_id mask_token_id unk_token_id eod_token_id
    decoder_start_token_id forced_bos_token_id forced_eos_token_id begin_suppress_tokens suppress_tokens bad_words_ids
    attention_dropout hidden_dropout attention_probs_dropout_prob hidden_dropout_prob attn_pdrop resid_pdrop embd_pdrop
    residual_dropout resid_dropout dropout activation_dropout classifier_dropout embedding_dropout layerdrop
    initializer_range initializer_cutoff_factor init_std router_aux_loss_coef aux_loss_coef z_loss_coefficient
    router_jitter_noise input_jitter_noise max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p min_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size num_return_sequences remove_invalid_values exponential_decay_length_penalty
    """.split()
)

# Values that switch off the feature of another family's key; 1 for multipliers.
_NEUTRAL: tuple[Any, ...] = (False, 0, 1, "", [], {})

# Keys of other engines and of models' own code, which no config class of transformers defines: any value except null
# and false changes what is computed.
_REFUSED = (
    "dual_chunk_attention_config",
    "use_mrope",
)


def check_unread(keys: Keys, model_type: str) -> tuple[str, ...]:
    """Raises ConfigError for an unread key that changes what a decoder of transformers computes.

    That is a key of any config class, unless its value is the default of `model_type`'s class or, where that class does
    not have the key, neutral: null, false, 0, 1 or empty. Returns the other unread keys, which transformers does not
    know either.
    """
    unread = {key: value for key, value in keys.unread().items() if key not in _WITHOUT_EFFECT}
    known = json.loads(_FILE.read_text(encoding="utf-8"))["keys"]
    unknown = []
    for key, value in unread.items():
        if key in _REFUSED:
            if value is not False:
                refuse(key, value, "absent: this is not served")
        elif key not in known:
            unknown.append(key)
        else:
            _check(key, value, known[key], model_type)
    return tuple(unknown)


def check_model_type(given: Any, architecture: str, model_type: str) -> None:
    """Raises ConfigError for the type of another decoder than the architecture's: transformers chooses a model's code
    by this key, whatever `architectures` says."""
    if given in (None, model_type):
        return
    if given in json.loads(_FILE.read_text(encoding="utf-8"))["model_types"]:
        refuse("model_type", given, f'"{model_type}", as `architectures` ({architecture}) says, or absent')


def _check(key: str, value: Any, groups: list[tuple[Any, list[str]]], model_type: str) -> None:
    own: Mapping[str, Any] = {of: default for default, types in groups for of in types}
    if model_type in own:
        if value != own[model_type]:
            refuse(key, value, f"{json.dumps(own[model_type])} for {model_type}")
    elif value is True or value not in _NEUTRAL:  # Python takes True for 1
        refuse(key, value, f"absent for {model_type}: it is a key of {', '.join(list(own)[:3])}")
