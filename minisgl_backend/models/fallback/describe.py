"""A model folder as `ModelConfig`, for models that run through transformers' code."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from minisgl_backend.errors import ConfigError
from minisgl_backend.layers.config import LayerConfig, MlpConfig
from minisgl_backend.layers.mixer_config import AttentionConfig, NormConfig, RopeConfig
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.end_tokens import end_tokens, read_end_of_text, token_ids
from minisgl_backend.models.fallback.module import base_name, logits_head
from minisgl_backend.models.fallback.probe import (
    IMPLEMENTATION,
    NUM_TOKENS,
    OWN_ATTENTION,
    Call,
    attention_calls,
    failures,
    refusal,
    register,
)
from minisgl_backend.models.fallback.rope import fix_rope
from minisgl_backend.models.fallback.source import Source, UnservedError, find_source, reasons
from minisgl_backend.models.generation import GenerationDefaults
from minisgl_backend.models.json_files import read_json, read_json_if_there
from minisgl_backend.models.pooling import EmbeddingDefaults, ScoreDefaults
from minisgl_backend.models.rope import LENGTHS, longest_told, stretched
from minisgl_backend.number_formats import DTYPES
from minisgl_backend.weights.names import TensorNames

_ANY_LENGTH = 8192  # where a config has none
# Name of the text model in checkpoints with encoders, and in those without.
_TEXT_PREFIXES = (("language_model.model.", "model."), ("model.language_model.", "model."), ("language_model.", ""))


def describe(folder: Path, *, trust_remote_code: bool = False) -> ModelConfig:
    """Raises ConfigError naming what is not served and why. Only needs config.json, no weights."""
    config_json = read_json(folder / "config.json")
    source = find_source(folder, config_json, trust_remote_code=trust_remote_code)
    generation = read_json_if_there(folder / "generation_config.json") or {}
    described = describe_source(source, config_json, generation, read_end_of_text(folder))
    return dataclasses.replace(described, embedding=EmbeddingDefaults.load(folder), scores=ScoreDefaults.load(folder))


def describe_source(
    source: Source, config_json: Mapping[str, Any], generation: Mapping[str, Any], tokenizer_eos: int | None = None
) -> ModelConfig:
    """`describe` for a source that was read already."""
    model = build_on_meta(source)
    try:
        base, calls, vocab_size, hidden_size = _probe(model)
    except UnservedError as error:
        raise refusal(source.name, error) from error
    positions, default_length = _max_position(source.config)
    mlp = MlpConfig(intermediate_size=_intermediate_size(getattr(model, base), calls, hidden_size, source.config))
    described = ModelConfig(
        architecture=source.name,
        implementation="transformers",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=tuple(
            LayerConfig(mixer=_attention(call, positions), mlp=mlp, norm=NormConfig(eps=1e-6)) for call in calls
        ),
        norm=NormConfig(eps=1e-6),
        max_position=positions,
        default_length=default_length,
        tie_word_embeddings=bool(getattr(source.config, "tie_word_embeddings", False)),
        dtype=_dtype(config_json, source.config),
        eos_token_ids=end_tokens(config_json, generation, tokenizer_eos, vocab_size),
        bos_token_id=next(iter(token_ids("config.json: bos_token_id", config_json.get("bos_token_id"))), None),
        generation=GenerationDefaults.read(generation),
        tensor_names=TensorNames(prefixes=_TEXT_PREFIXES if source.is_part else ()),
        why_no_images="it runs through transformers' own code, which gets text alone"
        if config_json.get("vision_config")
        else "",
    )
    described.check()
    return described


def build_on_meta(source: Source, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The modules without weights, for `probe`."""
    register()
    model_class, config = source.model_class, copy.deepcopy(source.config)
    experts = {"experts_implementation": IMPLEMENTATION} if model_class._can_set_experts_implementation() else {}
    with reasons(f"cannot build {source.name} from this config.json"), torch.device("meta"):
        try:
            model: PreTrainedModel = model_class._from_config(
                config, attn_implementation=IMPLEMENTATION, dtype=dtype, **experts
            )
        except KeyError as error:
            if error.args != (IMPLEMENTATION,):
                raise
            raise refusal(source.name, UnservedError(OWN_ATTENTION)) from error
    fix_rope(model, 0)
    return model.eval()


def _probe(model: PreTrainedModel) -> tuple[str, list[Call], int, int]:
    """(Name of the decoder, its attention calls, vocabulary size, hidden size)."""
    if getattr(model, "_is_stateful", False) or any(isinstance(one, nn.Conv1d) for one in model.modules()):
        raise UnservedError("has a state other than keys and values (it is recurrent)")
    base = base_name(model)
    if base is None:
        raise UnservedError("has no decoder apart from its output projection")
    with reasons(f"cannot run {type(model).__name__}"):
        calls, hidden_size = attention_calls(model, getattr(model, base))
        hidden = torch.zeros(1, NUM_TOKENS, hidden_size, device="meta")
        head = logits_head(model, base)
        with failures(head):
            logits = head(inputs_embeds=hidden, use_cache=False).logits
    return base, calls, logits.shape[-1], hidden_size


def _attention(call: Call, max_position: int) -> AttentionConfig:
    window = call.window if call.window is not None and call.window < max_position else None
    return AttentionConfig(
        num_q_heads=call.num_q_heads,
        num_kv_heads=call.num_kv_heads,
        head_dim=call.head_dim,
        rope=None,  # the module applies rope itself
        window=window,
        scale=call.scale,
        soft_cap=call.soft_cap,
        sinks=call.sinks is not None,
    )


def _max_position(config: PreTrainedConfig) -> tuple[int, int | None]:
    """The longest sequence in tokens, extended by rope scaling; and `DecoderConfig.default_length`."""
    found = [value for name in LENGTHS if isinstance(value := getattr(config, name, None), int) and value > 0]
    positions = found[0] if found else _ANY_LENGTH
    given = getattr(config, "rope_parameters", None)
    given = given if isinstance(given, dict) else {}
    ropes = [one for one in given.values() if isinstance(one, dict)] or [given]
    scaled = [
        RopeConfig(
            type=one["rope_type"],
            factor=one["factor"],
            original_max_position=one.get("original_max_position_embeddings") or positions,
        )
        for one in ropes
        if one.get("rope_type") and one.get("factor")
    ]
    # Without a rope each position has a vector of its own, however long a tokenizer takes texts to be.
    told = longest_told(getattr(config, "model_max_length", None)) if given else 0
    longest = max([told, *(stretched(rope, positions) for rope in [None, *scaled])])
    return longest, positions if any(rope.type == "dynamic" for rope in scaled) else None


def _dtype(config_json: Mapping[str, Any], config: PreTrainedConfig) -> str:
    saved = config_json.get("dtype") or config_json.get("torch_dtype") or config.dtype or "float32"
    name = str(saved).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"config.json: dtype is {name!r}; allowed: {', '.join(DTYPES)}")
    return name


def _intermediate_size(base: nn.Module, calls: list[Call], hidden_size: int, config: PreTrainedConfig) -> int:
    """Intermediate size of gated MLPs with the same number of weights per token as the layers' weights outside
    attention."""
    embeddings = {id(module.weight) for module in base.modules() if isinstance(module, nn.Embedding)}
    weights = sum(
        parameter.numel() * (_share_of_experts(config, parameter.shape[0]) if parameter.dim() == 3 else 1)
        for parameter in base.parameters()
        if parameter.dim() >= 2 and id(parameter) not in embeddings
    )
    heads = sum(2 * (call.num_q_heads + call.num_kv_heads) * call.head_dim for call in calls)
    return max(1, int(weights / hidden_size - heads) // (3 * len(calls)))


def _share_of_experts(config: PreTrainedConfig, num_experts: int) -> float:
    """The share of a layer's experts that a token takes."""
    names = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k")
    taken = next((value for name in names if isinstance(value := getattr(config, name, None), int)), num_experts)
    return min(1.0, taken / num_experts)
