"""Reads rotary position embedding from config.json: `rope_theta` and `rope_scaling` of transformers 4.x, or
`rope_parameters` of 5.x."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

from minisgl_backend.errors import ConfigError
from minisgl_backend.layers.mixer_config import RopeConfig
from minisgl_backend.models.keys import Keys, is_positive, refuse

_ORIGINAL = "original_max_position_embeddings"
_KEYS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # by type: required, optional
    "default": ((), ("factor", _ORIGINAL)),
    "linear": (("factor",), (_ORIGINAL,)),
    "dynamic": (("factor",), (_ORIGINAL,)),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), (_ORIGINAL,)),
    "yarn": (
        ("factor",),
        (_ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (("short_factor", "long_factor"), ("factor", _ORIGINAL, "attention_factor")),
}
MRope = Literal["in sections", "interleaved"]
_MROPE = ("mrope_section", "mrope_interleaved")
_SECTIONS: Mapping[MRope, list[int]] = {"in sections": [16, 24, 24], "interleaved": [24, 20, 20]}  # of absent keys
_NO_NUMBERS = ("truncate", "short_factor", "long_factor")
_MAY_BE_ZERO = ("mscale", "mscale_all_dim")  # then the other one counts


def read_rope(
    keys: Keys,
    head_dim: int,
    *,
    partial: bool = False,
    part: float = 1.0,
    interleaved: bool = False,
    mrope: MRope | None = None,
    apart: Iterable[str] = (),
) -> RopeConfig:
    """The rope of all layers, which must be the same. `partial`: the family reads partial_rotary_factor, the share of a
    head's dimensions that is rotated; `part`: its default; `interleaved`: as in RopeConfig; `mrope`: the family gives
    parts of an image a position per axis, which are equal for text, and deals the pairs to the axes so; `apart`: keys
    among the values that do not concern the rope."""
    # As in transformers 5.23: if both spellings are present, rope_scaling counts and rope_parameters does not.
    unread = keys.get("rope_parameters")
    given = keys.get("rope_scaling") or unread or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        refuse("rope_parameters", given, "one set of values for all layers")
    left_out = (*apart, *(_MROPE if mrope else ()))
    values = {key: value for key, value in given.items() if value is not None and key not in left_out}
    if mrope:
        values = {key: "default" if value == "mrope" else value for key, value in values.items()}
    theta = values.pop("rope_theta", keys.get("rope_theta", 10000.0))
    if isinstance(unread, dict) and given is not unread and "rope_theta" in unread and unread["rope_theta"] != theta:
        raise ConfigError(
            f"config.json: rope_parameters has rope_theta {json.dumps(unread['rope_theta'])}, but transformers ignores "
            f"rope_parameters if there is rope_scaling, and takes rope_theta {json.dumps(theta)}; allowed: the keys of "
            "rope_scaling written into rope_parameters, and no rope_scaling"
        )
    part = values.pop("partial_rotary_factor", keys.get("partial_rotary_factor", part))
    if not isinstance(part, (int, float)) or not 0 < part <= 1 or (part != 1 and not partial):
        refuse("partial_rotary_factor", part, "a number above 0, up to 1" if partial else "1.0")
    original = keys.get(_ORIGINAL)
    if original is not None:
        values[_ORIGINAL] = keys.integer(_ORIGINAL)
    rope = make_rope(keys, values, theta, int(head_dim * part))
    axes = axes_of(given.get("mrope_section"), mrope, int(head_dim * part) // 2) if mrope else ()
    return replace(rope, rotary_dim=rope.rotary_dim if part != 1 else None, interleaved=interleaved, axes=axes)


def axes_of(sections: Any, mrope: MRope, num_pairs: int) -> tuple[int, ...]:
    """RopeConfig.axes: `sections` says how many pairs each axis has, None: as many as the family's class gives it.
    (): they are not all there are, so that images cannot be placed."""
    if sections is None:  # as many as the classes have, whose pairs are 64, or 32 of a part of the head (GLM-4.1V)
        halves = 2 if mrope == "in sections" and num_pairs == 32 else 1
        sections = [one // halves for one in _SECTIONS[mrope]]
    if not isinstance(sections, list) or len(sections) != 3 or not all(isinstance(one, int) for one in sections):
        refuse("mrope_section", sections, "a list of three numbers of pairs")
    if mrope == "in sections":
        if sum(sections) != num_pairs:
            return ()
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    axes = [0] * num_pairs
    for axis in (1, 2):
        for pair in range(axis, min(3 * sections[axis], num_pairs), 3):
            axes[pair] = axis
    return tuple(axes)


def by_layer_type(keys: Keys, types: Iterable[str]) -> dict[str, dict[str, Any]]:
    """rope_parameters by layer type, where it has a set of values for each; {} for missing types."""
    given, types = keys.mapping("rope_parameters"), tuple(types)
    if any(kind not in types or not isinstance(values, (dict, type(None))) for kind, values in given.items()):
        refuse("rope_parameters", given, f"a JSON object each for {' and '.join(types)}, and nothing else")
    return {kind: {k: v for k, v in (given.get(kind) or {}).items() if v is not None} for kind in types}


def make_rope(keys: Keys, given: Mapping[str, Any], theta: Any, rotary_dim: int) -> RopeConfig:
    """From the values of one rope: rope_type (or type) and the keys of that type. Others are left unread, as by
    transformers."""
    rope_type = given.get("rope_type", given.get("type", "default"))
    rope_type = "longrope" if rope_type == "su" else rope_type  # "su" in early configs of Phi-3
    if not isinstance(rope_type, str) or rope_type not in _KEYS:
        refuse("rope_type", rope_type, ", ".join(_KEYS))
    required, optional = _KEYS[rope_type]
    for key, value in given.items():
        if key not in (*required, *optional, "rope_type", "type"):
            keys.leave_unread(f"rope_scaling.{key}", value)
    values = {key: given[key] for key in (*required, *optional) if key in given}
    for key, value in {"rope_theta": theta, **values}.items():
        if key in _NO_NUMBERS or (key in _MAY_BE_ZERO and value == 0):
            continue
        if not is_positive(value):
            refuse(key, value, "a number above 0")
    for key in required:
        if key not in values:
            raise ConfigError(f"config.json asks for rope type {rope_type} without its {key}")
    if rope_type == "default":
        return RopeConfig(theta=float(theta), rotary_dim=rotary_dim)
    max_position = max_positions(keys)
    original = int(values.pop(_ORIGINAL, max_position))
    if rope_type == "dynamic":
        original = max_position  # of which transformers takes the multiples, whatever else is there
    if rope_type == "longrope":
        values.setdefault("factor", max_position / original)
        for key in ("short_factor", "long_factor"):
            values[key] = _factors(key, values[key], rotary_dim // 2)
    return RopeConfig(
        type=rope_type, theta=float(theta), rotary_dim=rotary_dim, original_max_position=original, **values
    )


def _factors(key: str, values: Any, count: int) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) != count or not all(map(is_positive, values)):
        refuse(key, values, f"a list of {count} numbers above 0, one for each pair of dimensions that is rotated")
    return tuple(float(value) for value in values)


# Keys of the longest sequence, in tokens; the first that is present counts.
LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "max_seq_length",
    "seq_length",
    "n_ctx",
    "max_target_positions",
)
_NO_LENGTH = 1 << 31  # model_max_length of tokenizers without one is larger


def max_positions(keys: Keys) -> int:
    """The longest sequence in tokens, before rope scaling. Raises ConfigError where no key has one."""
    return keys.integer(next((key for key in LENGTHS if keys.get(key) is not None), LENGTHS[0]))


def longest(keys: Keys, ropes: Iterable[RopeConfig | None]) -> int:
    """The longest sequence in tokens, for layers with these ropes. `model_max_length` counts where it is longer:
    Command R's config.json has the context within which it was pretrained as max_position_embeddings."""
    told = longest_told(keys.get("model_max_length"))
    return max(told, *(stretched(rope, max_positions(keys)) for rope in ropes))


def longest_told(model_max_length: Any) -> int:
    """Its tokens, 0 where it says nothing."""
    is_length = isinstance(model_max_length, int) and not isinstance(model_max_length, bool)
    return model_max_length if is_length and model_max_length < _NO_LENGTH else 0


def stretched(rope: RopeConfig | None, max_position: int) -> int:
    """The longest sequence in tokens: max_position_embeddings, multiplied by the factor of linear, dynamic and YaRN's
    scaling. vLLM does the same with linear and dynamic."""
    if rope is None or rope.type not in ("linear", "dynamic", "yarn"):
        return max_position
    return max(max_position, int(rope.factor * rope.original_max_position))
