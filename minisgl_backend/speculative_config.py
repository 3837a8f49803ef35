"""The option `speculative_config`: which tokens are proposed, and how many of them a step may verify.

As vLLM spells it: a JSON object with `method`, `num_speculative_tokens` and what the method takes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to propose tokens. What serves it is named, and imported when a start uses it."""

    meaning: str  # what is proposed, in words
    # MODULE:NAME. On the device: a class, see `runner.proposers.proposer.DeviceProposer`; on the host: a function from
    # a SpeculativeConfig to a `speculation.proposer.Proposer`, in a module without torch.
    proposer: str
    on_device: bool = True
    # On the device: its own steps bring it the tokens that it has not seen; else it sees them in the model's.
    catches_up: bool = False
    takes_model: bool = False  # the folder of a model, as `model`
    aliases: tuple[str, ...] = ()  # vLLM's other names of it


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "ngram": Method(
            meaning="what followed the last tokens when they were there before",
            proposer="minisgl_backend.speculation.ngram:create_ngram_proposer",
            on_device=False,
        ),
        "draft_model": Method(
            meaning="what a smaller model says",
            proposer="minisgl_backend.runner.proposers.draft_model:DraftModelProposer",
            catches_up=True,
            takes_model=True,
        ),
        "eagle3": Method(
            meaning="what an EAGLE-3 head says",
            proposer="minisgl_backend.runner.proposers.head:Eagle3Proposer",
            takes_model=True,
        ),
        "mtp": Method(
            meaning="what the checkpoint's own layer for further tokens says",
            proposer="minisgl_backend.runner.proposers.head:MtpProposer",
            aliases=("deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "qwen3_next_mtp", "qwen3_5_mtp"),
        ),
    }
)
ALLOWED = 'a JSON object such as {"method": "ngram", "num_speculative_tokens": 4}'
MEANING = (
    f"a JSON object as vLLM spells it, `method` ({'; '.join(f'{name}: {row.meaning}' for name, row in METHODS.items())}"
    "), `model` (the folder of that model or head), "
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

    @property
    def row(self) -> Method:
        """What METHODS says of `method`."""
        return METHODS[self.method]


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
    name, model = given.get("method"), given.get("model")
    method = next((one for one, row in METHODS.items() if name in (one, *row.aliases)), None)
    if method is None:
        raise ValueError(f"its method is {name!r}; allowed: {', '.join(METHODS)}")
    takes_model = METHODS[method].takes_model
    if not takes_model and model is not None:
        raise ValueError(f"its model is {model!r}; allowed with the method {method}: unset")
    if takes_model and not (isinstance(model, str) and model):
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
