"""Rope of transformers' modules without choices in the forward pass.

Transformers takes the frequencies of dynamic and LongRoPE scaling, and PhiMoE's factors of cosines and sines, by the
longest sequence in a batch. Here they are those of the longest sequence that is served: a sequence's result must not
depend on others in the batch, and keys in the cache are shared.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_BY_LENGTH = ("dynamic", "longrope")


def fix_rope(model: Any, max_seq_len: int) -> None:
    """Fixes all rope modules for sequences of up to `max_seq_len` tokens."""
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, dict):
            for layer_type, one in rope_type.items():
                _fix_frequencies(module, one, layer_type, module.config.rope_parameters[layer_type], max_seq_len)
            module.rope_type = dict.fromkeys(rope_type, "default")
        elif isinstance(rope_type, str) and hasattr(module, "inv_freq"):
            parameters = getattr(module.config, "rope_parameters", None) or {}
            _fix_frequencies(module, rope_type, None, parameters, max_seq_len)
            module.rope_type = "default"
            _fix_factor(module, parameters, max_seq_len)


def _fix_frequencies(
    module: Any, rope_type: str, layer_type: str | None, parameters: Mapping[str, Any], max_seq_len: int
) -> None:
    if rope_type not in _BY_LENGTH or max_seq_len <= _original(module, rope_type, parameters):
        return
    frequencies: torch.Tensor = getattr(module, f"{layer_type}_inv_freq" if layer_type else "inv_freq")
    more = {"layer_type": layer_type} if layer_type else {}
    long, _ = ROPE_INIT_FUNCTIONS[rope_type](module.config, frequencies.device, seq_len=max_seq_len, **more)
    frequencies.copy_(long)


def _original(module: Any, rope_type: str, parameters: Mapping[str, Any]) -> int:
    """Tokens of the context within which nothing is chosen otherwise."""
    if rope_type == "dynamic":
        return int(module.config.max_position_embeddings)
    return int(parameters["original_max_position_embeddings"])


def _fix_factor(module: Any, parameters: Mapping[str, Any], max_seq_len: int) -> None:
    """PhiMoE's module asks its config for the factor in each pass, and for frequencies, which would be the CPU's."""
    factor = float(getattr(module, "attention_scaling", 1.0))
    if "long_mscale" in parameters:
        is_long = max_seq_len > parameters["original_max_position_embeddings"]
        factor = float(parameters["long_mscale" if is_long else "short_mscale"])
        module.config = copy.copy(module.config)
        module.config.rope_parameters = {**parameters, "rope_type": "default"}
    module.rope_init_fn = lambda *_, **__: (module.inv_freq, factor)
