"""Rotary position embedding as config.json has it: `rope_theta` and `rope_scaling` of transformers 4.x, or
`rope_parameters` of 5.x."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from minisgl_backend.errors import ConfigError
from minisgl_backend.layers.config import RopeConfig
from minisgl_backend.models.keys import Keys, refuse

_ORIGINAL = "original_max_position_embeddings"
_KEYS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # by type: required, optional
    "default": ((), ("factor", _ORIGINAL)),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), (_ORIGINAL,)),
    "yarn": (
        ("factor",),
        (_ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}


def read_rope(keys: Keys, max_position: int) -> RopeConfig:
    """The one set of values of all layers; `max_position`: max_position_embeddings."""
    # As transformers 5.23: where both spellings are there, rope_scaling counts and rope_parameters does not.
    unread = keys.get("rope_parameters")
    given = keys.get("rope_scaling") or unread or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        refuse("rope_parameters", given, "one set of values for all layers")
    values = {key: value for key, value in given.items() if value is not None}
    theta = values.pop("rope_theta", keys.get("rope_theta", 10000.0))
    if isinstance(unread, dict) and unread.get("rope_theta", theta) != theta and given is not unread:
        raise ConfigError(
            f"config.json: rope_parameters has rope_theta {json.dumps(unread['rope_theta'])}, but beside rope_scaling "
            f"transformers reads none of it, which makes rope_theta {json.dumps(theta)}; allowed: the keys of "
            "rope_scaling written into rope_parameters, and no rope_scaling"
        )
    return _rope(values, theta, keys.get(_ORIGINAL), max_position)


def _rope(values: dict[str, Any], theta: Any, original: int | None, max_position: int) -> RopeConfig:
    rope_type = values.pop("rope_type", values.pop("type", "default"))
    values.pop("type", None)
    if rope_type not in _KEYS:
        refuse("rope_type", rope_type, ", ".join(_KEYS))
    partial = values.pop("partial_rotary_factor", 1.0)
    if partial != 1.0:
        refuse("partial_rotary_factor", partial, "1.0")
    for key, value in {"rope_theta": theta, **values}.items():
        if key != "truncate" and (not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0):
            refuse(key, value, "a number above 0")
    required, optional = _KEYS[rope_type]
    for key in required:
        if key not in values:
            raise ConfigError(f"config.json asks for rope type {rope_type} without its {key}")
    for key in values:
        if key not in required + optional:
            refuse(key, values[key], f"absent for rope type {rope_type}")
    if rope_type == "default":
        return RopeConfig(theta=float(theta))
    original = original or values.pop(_ORIGINAL, None) or max_position
    values.pop(_ORIGINAL, None)
    return RopeConfig(type=rope_type, theta=float(theta), original_max_position=int(original), **values)


def stretched(rope: RopeConfig | None, max_position: int) -> int:
    """The longest sequence in tokens: YaRN's factor makes it longer than max_position_embeddings."""
    if rope is None or rope.type != "yarn":
        return max_position
    return max(max_position, int(rope.factor * rope.original_max_position))
