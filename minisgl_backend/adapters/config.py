"""adapter_config.json of PEFT: what is applied, and what is refused by its own sentence. Needs no torch.

An adapter that is not wholly understood would answer wrongly without a word, so every key has a row here, and an
unknown one is refused unless it is null, false or empty.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from minisgl_backend.adapters.patterns import ALLOWED, LONGEST_PATTERN, is_quick
from minisgl_backend.config import MAX_RANK
from minisgl_backend.errors import ConfigError
from minisgl_backend.models.json_files import read_json

CONFIG_FILE = "adapter_config.json"
# Say where the adapter comes from, how it was trained, or which modules were to be trained: the tensors of the file
# say which were. `ensure_weight_tying` is about whole tensors, which have a refusal of their own.
_INFORMATIVE = frozenset(
    "auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config exclude_modules inference_mode "
    "layers_pattern layers_to_transform loftq_config lora_dropout lora_ga_config megatron_core peft_version "
    "qalora_group_size revision runtime_config target_modules task_type".split()
)
_APPLIED = frozenset("alpha_pattern init_lora_weights lora_alpha peft_type r rank_pattern use_rslora".split())
# Initialisations that leave the base's weights as they are; others take a part of them into the adapter.
_KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
_MOST_PATTERNS = 4096  # of rank_pattern and alpha_pattern
_VARIANT = "it computes something else than B(A x)"
_REFUSED = {
    "alora_invocation_tokens": "the adapter acts from these tokens on alone, and what is computed before is the base's",
    "arrow_config": "it chooses among several adapters for each token",
    "fan_in_fan_out": "the base's weights are stored transposed (Conv1D), as those of no family served here",
    "kasa_config": _VARIANT,
    "layer_replication": "the model has other layers than its base",
    "lora_bias": "the adapter's B has biases",
    "megatron_config": "its tensors are those of Megatron's parallel layers",
    "modules_to_save": "whole modules were trained beside the adapter",
    "monteclora_config": _VARIANT,
    "target_parameters": "it changes parameters that are no linear layers, as the experts of a mixture",
    "trainable_token_indices": "embeddings of some tokens were trained beside the adapter",
    "use_bdlora": _VARIANT,
    "use_dora": "the adapter also scales the norms of the merged weights (DoRA)",
    "use_qalora": _VARIANT,
    "velora_config": _VARIANT,
}
_MERGED = frozenset({"use_dora"})  # of those, what is right where the adapter is merged


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """What the tensors of an adapter mean."""

    path: Path  # of the file
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    divides_by_root: bool  # rsLoRA: the scale is alpha / sqrt(rank)
    has_magnitudes: bool = False  # DoRA

    @classmethod
    def read(cls, folder: Path, *, merged: bool = False) -> LoraConfig:
        """merged: into the base's weights, which allows DoRA. Raises ConfigError naming the file, the key, its value
        and what is allowed."""
        path = folder / CONFIG_FILE
        if not path.is_file():
            raise ConfigError(f"{folder} has no {CONFIG_FILE}; an adapter is a folder as PEFT's save_pretrained writes")
        found = read_json(path)
        keys = _Keys(path, found)
        if (kind := found.get("peft_type")) != "LORA":
            keys.refuse("peft_type", kind, "another kind of adapter", "LORA")
        for key, value in found.items():
            if key in _REFUSED and value not in (None, False, [], {}) and not (merged and key in _MERGED):
                way = "--merge-adapter" if key in _MERGED else "merge the adapter into its base with PEFT"
                keys.refuse(key, value, _REFUSED[key], f"null or false; or {way}")
        keys.check_others()
        return cls(
            path=path,
            rank=keys.rank("r", found.get("r")),
            alpha=keys.number("lora_alpha", found.get("lora_alpha")),
            rank_pattern=keys.pattern("rank_pattern", keys.rank),
            alpha_pattern=keys.pattern("alpha_pattern", keys.number),
            divides_by_root=keys.flag("use_rslora"),
            has_magnitudes=merged and keys.flag("use_dora"),
        )

    def rank_of(self, module: str) -> int:
        """Of a module by its name at training time."""
        return self.rank_pattern.get(_first_match(self.rank_pattern, module), self.rank)

    def scale_of(self, module: str) -> float:
        """What multiplies B(A x) of that module."""
        alpha = self.alpha_pattern.get(_first_match(self.alpha_pattern, module), self.alpha)
        rank = self.rank_of(module)
        return alpha / math.sqrt(rank) if self.divides_by_root else alpha / rank

    @property
    def largest_rank(self) -> int:
        return max(self.rank, *self.rank_pattern.values()) if self.rank_pattern else self.rank


def _first_match(pattern: Mapping[str, Any], module: str) -> str:
    """The first key that PEFT takes for a module: as a regular expression for the end of its name."""
    return next((key for key in pattern if re.match(rf"(.*\.)?({key})$", module)), "")


class _Keys:
    """The keys of one file."""

    def __init__(self, path: Path, found: Mapping[str, Any]) -> None:
        self._path, self._found = path, found

    def refuse(self, key: str, value: Any, why: str, allowed: str) -> NoReturn:
        raise ConfigError(f"{self._path}: {key} is {str(value)[:100]!r}: {why}; allowed: {allowed}")

    def check_others(self) -> None:
        """Those that are neither applied nor refused above."""
        bias = self._found.get("bias", "none")
        if bias != "none":
            self.refuse("bias", bias, "biases of the base were trained beside the adapter", "none")
        init = self._found.get("init_lora_weights", True)
        if not any(init is one or (isinstance(one, str) and init == one) for one in _KEEPS_BASE):
            self.refuse(
                "init_lora_weights",
                init,
                "the base's weights were changed when training began, and the adapter alone does not say how",
                "true, false, gaussian, eva, orthogonal or mica; PEFT converts others when it saves with "
                "path_initial_model_for_weight_conversion",
            )
        known = _INFORMATIVE | _APPLIED | _REFUSED.keys() | {"bias"}
        for key in sorted(self._found.keys() - known):
            if self._found[key] not in (None, False, [], {}, ""):
                self.refuse(key, self._found[key], "an unknown key, which may change what is computed", "null")

    def rank(self, key: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANK:
            self.refuse(key, value, "not a rank", f"1 to {MAX_RANK}")
        return value

    def number(self, key: str, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            self.refuse(key, value, "not a number", "a finite number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._found.get(key, False)
        if not isinstance(value, bool):
            self.refuse(key, value, "neither", "true or false")
        return value

    def pattern(self, key: str, read: Callable[[str, Any], Any]) -> dict[str, Any]:
        """By regular expressions for modules' names."""
        value = self._found.get(key) or {}
        if not isinstance(value, Mapping):
            self.refuse(key, value, "not by modules", "an object of numbers by modules' names")
        if len(value) > _MOST_PATTERNS:
            self.refuse(key, f"{len(value)} patterns", "too many", f"up to {_MOST_PATTERNS}")
        for one in value:
            try:
                re.compile(rf"(.*\.)?({one})$")
            except (re.error, RecursionError, OverflowError) as error:
                self.refuse(key, one, f"not a regular expression ({error})", ALLOWED)
            if not is_quick(one):
                self.refuse(key, one, "a pattern that may take long", f"{ALLOWED}; {LONGEST_PATTERN} characters")
        return {one: read(f"{key}.{one}", number) for one, number in value.items()}
