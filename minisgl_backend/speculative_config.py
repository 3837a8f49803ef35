"""The option `speculative_config`: which tokens are proposed, and how many of them a step may verify.

As vLLM spells it: a JSON object with `method`, `num_speculative_tokens` and what the method takes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

METHODS = ("ngram", "draft_model", "eagle3", "mtp")
# vLLM's other names of mtp, by the family of the model.
_SAME = {"deepseek_mtp": "mtp", "glm4_moe_mtp": "mtp", "glm4_moe_lite_mtp": "mtp"}
WITH_MODEL = ("draft_model", "eagle3")  # those that take `model`
ALLOWED = 'a JSON object such as {"method": "ngram", "num_speculative_tokens": 4}'
MEANING = (
    "a JSON object as vLLM spells it, `method` (ngram: what followed the last tokens when they were there before; "
    "draft_model: what a smaller model says; eagle3: what an EAGLE-3 head says; mtp: what the "
    "checkpoint's own layer for further tokens says), `model` (the folder of that model or head), "
    "`num_speculative_tokens` (most "
    'drafts of a sequence in a step, or "auto"; how many it is, is measured, down to none where they do not pay), '
    "`prompt_lookup_max` and `prompt_lookup_min` (tokens that ngram compares)"
)
MOST_DRAFTS = 15  # of one row in one step: with its own token 16 entries of the batch
DEFAULT_LOOKUP_MAX, DEFAULT_LOOKUP_MIN = 5, 2
LONGEST_LOOKUP = 32
DRAFT_ENTRIES = 64  # rows and drafts together of a step that has drafts: more hardly pay
_KEYS = ("method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """What `speculative_config` says."""

    method: str
    most_drafts: int  # of one row in one step; how many it is, is decided step by step
    model: str | None = None  # the folder of the model that proposes; None: none does
    prompt_lookup_max: int  # of ngram: tokens that are compared at most, and at least
    prompt_lookup_min: int


def most_decode_entries(max_running: int, config: SpeculativeConfig | None) -> int:
    """Rows and drafts together that a step can have."""
    if config is None:
        return max_running
    return max(max_running, min(max_running * (1 + config.most_drafts), DRAFT_ENTRIES))


def read_speculative_config(text: str | Mapping[str, Any]) -> SpeculativeConfig:
    """Raises ValueError, whose text says what is wrong and what is allowed."""
    try:
        given = json.loads(text) if isinstance(text, str) else dict(text)
    except ValueError:
        raise ValueError(f"allowed: {ALLOWED}") from None
    if not isinstance(given, dict):
        raise ValueError(f"allowed: {ALLOWED}")
    for key in given:
        if key not in _KEYS:
            raise ValueError(f"it has the unknown key {key!r}; allowed: {', '.join(_KEYS)}")
    method = given.get("method")
    if isinstance(method, str):
        method = _SAME.get(method, method)
    if method not in METHODS:
        raise ValueError(f"its method is {method!r}; allowed: {', '.join(METHODS)}")
    model = given.get("model")
    if method not in WITH_MODEL and model is not None:
        raise ValueError(f"its model is {model!r}; allowed with the method {method}: unset")
    if method in WITH_MODEL and not (isinstance(model, str) and model):
        raise ValueError(f"its model is {model!r}; allowed with the method {method}: the folder of a model")
    drafts = given.get("num_speculative_tokens", "auto")
    if drafts != "auto":
        drafts = _integer("num_speculative_tokens", drafts, 1, MOST_DRAFTS, ', or "auto"')
    longest = shortest = None
    if given.get("prompt_lookup_max") is not None:
        longest = _integer("prompt_lookup_max", given["prompt_lookup_max"], 1, LONGEST_LOOKUP)
    if given.get("prompt_lookup_min") is not None:
        most, why = (LONGEST_LOOKUP, "") if longest is None else (longest, ", which is prompt_lookup_max")
        shortest = _integer("prompt_lookup_min", given["prompt_lookup_min"], 1, most, why)
    if longest is None:
        longest = max(DEFAULT_LOOKUP_MAX, shortest or 0)
    return SpeculativeConfig(
        method=method,
        model=model,
        most_drafts=MOST_DRAFTS if drafts == "auto" else drafts,
        prompt_lookup_max=longest,
        prompt_lookup_min=min(DEFAULT_LOOKUP_MIN, longest) if shortest is None else shortest,
    )


def _integer(name: str, value: Any, least: int, most: int, more: str = "") -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"its {name} is {value!r}; allowed: {least} to {most}{more}")
    return value
