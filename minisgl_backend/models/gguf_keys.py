"""What becomes of each metadata key of a GGUF file: it is read, it changes nothing, only some of its values are served,
or it is not read and said to be so. Needs neither torch nor gguf.

The tables follow what llama.cpp's loader reads for the architectures that are served; what it reads for others alone,
such as a logit_scale, changes nothing in them there either.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from minisgl_backend.errors import ConfigError
from minisgl_backend.weights.gguf_header import GGUFHeader

log = logging.getLogger(__name__)

_EXPERTS = frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length"})
_WINDOW = frozenset({"attention.sliding_window", "attention.sliding_window_pattern"})
_DELTA = frozenset(
    {
        *("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size"),
        "full_attention_interval",
    }
)
_READ = frozenset(  # by gguf_config, of every architecture
    {
        *("block_count", "context_length", "embedding_length", "embedding_length_out", "feed_forward_length"),
        *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "pooling_type"),
        *("attention.key_length", "attention.value_length", "attention.key_length_swa", "attention.value_length_swa"),
        *("rope.dimension_count", "rope.dimension_count_swa", "rope.freq_base", "rope.scale_linear"),
        *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor"),
        *("rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
        *("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_log_multiplier"),
    }
)
_READ_OF: Mapping[str, frozenset[str]] = {
    "gemma2": _WINDOW | {"rope.freq_base_swa", "attn_logit_softcapping", "final_logit_softcapping"},
    "gemma3": _WINDOW | {"rope.freq_base_swa", "final_logit_softcapping"},
    "lfm2": frozenset({"shortconv.l_cache"}),
    "lfm2moe": _EXPERTS | {"shortconv.l_cache", "leading_dense_block_count", "expert_gating_func"},
    "phi3": frozenset({"attention.sliding_window"}),
    "qwen2moe": _EXPERTS | {"expert_shared_feed_forward_length"},
    "qwen3moe": _EXPERTS,
    "qwen3next": _EXPERTS | _DELTA | {"expert_shared_feed_forward_length"},
    "qwen35": _DELTA,
    "qwen35moe": _EXPERTS | _DELTA | {"expert_shared_feed_forward_length"},
}
_WITHOUT_EFFECT = frozenset(  # on tokens and numbers
    {
        *("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "rope.dimension_sections"),
        *("expert_group_used_count", "classifier.pooling_type"),
    }
)
# Other values would change numbers; each list begins with llama.cpp's default, which its own writer puts into files.
_SERVED: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "classifier.output_labels": ([],),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_group_count": (0, 1),
    "nextn_predict_layers": (0,),
    "rope.scaling.alpha": (0.0, 1.0),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
}
_SAMPLING = frozenset({"temp", "top_k", "top_p", "min_p", "penalty_repeat"})
_TOKENS = ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask", "fim_pad", "fim_rep", "fim_sep")
_TOKENIZER = frozenset(  # read by gguf_tokenizer, or without effect: names of tokens for filling in code
    {
        *("model", "pre", "tokens", "token_type", "scores", "merges", "token_type_count"),
        *("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix"),
        *(f"{name}_token_id" for name in (*_TOKENS, "cls", "fim_pre", "fim_suf", "fim_mid")),
        *(f"{name}_token_id" for name in ("prefix", "suffix", "middle")),
    }
)


def check_keys(header: GGUFHeader, architecture: str) -> None:
    """Raises ConfigError, naming the key, for values that are not served; warns of keys that are not read."""
    read = _READ | _READ_OF.get(architecture, frozenset())
    unread = []
    for key, value in header.metadata.items():
        family, _, name = key.partition(".")
        if family == architecture and name not in read | _WITHOUT_EFFECT:
            if name in _SERVED:
                _check(header, key, value, _SERVED[name])
            else:
                unread.append(key)
        elif (key.startswith("general.sampling.") and key.rpartition(".")[2] not in _SAMPLING) or (
            family == "tokenizer" and not _is_read_of_tokenizer(name)
        ):
            unread.append(key)
    if unread := [key for key in unread if header.metadata[key]]:  # 0, false and the like switch off
        told = ", ".join(repr(key)[1:-1] for key in unread)
        log.warning("%s: not read, for this architecture: %.2000s", header.files[0], told)


def _is_read_of_tokenizer(name: str) -> bool:
    family, _, rest = name.partition(".")
    return family in ("chat_template", "chat_templates") or (family == "ggml" and rest in _TOKENIZER)


def _check(header: GGUFHeader, key: str, value: Any, served: tuple[Any, ...]) -> None:
    values = value if isinstance(value, list) and value else [value]  # of every layer
    if any(one not in served for one in values):
        allowed = ", ".join(str(one).lower() for one in served)
        raise ConfigError(f"{header.files[0]}: {key} is {value!r:.200}; allowed: {allowed} or absent")
