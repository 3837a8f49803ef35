"""Which number format the weights of a module have, by the module's path. Needs no torch.

The formats themselves are rows of `number_formats.WEIGHT_FORMATS`; `quantization_config.py` reads what a checkpoint
says about its own.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from minisgl_backend.errors import ConfigError
from minisgl_backend.number_formats import CONVERTED_FORMATS, WEIGHT_FORMATS
from minisgl_backend.weights.names import TensorNames

# Modules with matrices that are no linear layer: paths of this project, or of checkpoints with other names.
_ALWAYS_PLAIN = ("*.gate", "*.router", "*.shared_expert_gate", "*norm")
_PLAIN_TENSORS = ("weight", "bias")
_REGEX = "re:"
_EXPERTS = re.compile(r".+\.experts")


@dataclass(frozen=True)
class WeightScheme:
    """A format, and which variant of it."""

    format: str  # of WEIGHT_FORMATS
    # What the format's reader made of quantization_config: hashable, and in words as a string. None: weights are
    # converted while they load. Its `unread`, where it has one, are suffixes of tensors that are there for nothing.
    parameters: Any = None

    def __str__(self) -> str:
        return f"{self.format}, converted while loading" if self.parameters is None else str(self.parameters)


@dataclass(frozen=True)
class SchemeRule:
    """Modules that one of the patterns matches have this scheme; None: they are plain.

    A pattern is a regular expression after `re:`, which begins to match where the path begins, or else some parts of a
    path, with * for any text: `model.layers.0.mlp`, `self_attn.*_proj`, `gate`.
    """

    scheme: WeightScheme | None
    patterns: tuple[str, ...] = ("*",)


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Formats of a model's linear layers and experts: of the first rule that matches. All else is plain."""

    rules: tuple[SchemeRule, ...] = ()
    names: TensorNames = field(default_factory=TensorNames)  # of the checkpoint, whose module names rules have

    @classmethod
    def converting(cls, option: str | None) -> QuantizationConfig:
        """Of a plain checkpoint with the option `quantization`."""
        return cls().with_option(option)

    def with_option(self, option: str | None) -> QuantizationConfig:
        """What a checkpoint says, and the option `quantization`. Raises ConfigError where both name a format."""
        if option is None:
            return self
        if option not in CONVERTED_FORMATS:
            raise ConfigError(f"quantization is {option!r}; allowed: {', '.join(CONVERTED_FORMATS)}")
        if self.schemes:
            raise ConfigError(
                f"quantization is {option!r}; allowed for this checkpoint, which is quantized already "
                f"({'; '.join(map(str, self.schemes))}): unset"
            )
        return replace(self, rules=(SchemeRule(WeightScheme(option)),))

    @property
    def schemes(self) -> tuple[WeightScheme, ...]:
        """All that are named, each once."""
        return tuple(dict.fromkeys(rule.scheme for rule in self.rules if rule.scheme is not None))

    def scheme_of(self, path: str) -> WeightScheme | None:
        """Of the module with this path, in this project's names: model.layers.0.self_attn.q_proj, or ...mlp.experts.

        Raises ConfigError where gate, up and down of experts differ.
        """
        if not self.rules:
            return None
        if not _EXPERTS.fullmatch(path):
            return self._scheme_of((path,))
        kinds = [f"{path}.{kind}" for kind in ("gate_proj", "up_proj", "down_proj")]
        found = {self._scheme_of((path, kind)): kind for kind in kinds}
        if len(found) > 1:
            text = ", ".join(f"{kind} is {scheme or 'plain'}" for scheme, kind in found.items())
            raise ConfigError(f"quantization: {text}; allowed: one format for all weights of experts")
        return next(iter(found))

    def is_unread(self, name: str) -> bool:
        """Whether a tensor is one that the formats here write and do not need."""
        suffix = name.rpartition(".")[2]
        return any(suffix in getattr(scheme.parameters, "unread", ()) for scheme in self.schemes)

    def bytes_of(self, name: str, shape: tuple[int, ...], stored: int, item_bytes: int | None) -> int:
        """Memory of a tensor [..., outputs, inputs] of a checkpoint once it is loaded, about.

        stored: bytes in the file. item_bytes: of a plain number; None: the tensor is of no floating-point format that
        plain weights have, or it is loaded as it is.
        """
        path, _, kind = name.rpartition(".")
        if item_bytes is None or (kind not in _PLAIN_TENSORS and self.rules):
            return stored
        is_matrix = kind == "weight" and len(shape) > 1 and path.startswith("model.layers.")
        is_linear = is_matrix and not any(fnmatch.fnmatchcase(path, one) for one in _ALWAYS_PLAIN)
        scheme = self._scheme_of((path,)) if is_linear else None
        numbers = math.prod(shape)
        if scheme is None or scheme.parameters is not None:
            return numbers * item_bytes
        row = WEIGHT_FORMATS[scheme.format]
        return int(numbers * row.number_bytes) + numbers // shape[-1] * row.output_bytes

    def _scheme_of(self, paths: tuple[str, ...]) -> WeightScheme | None:
        names = tuple(dict.fromkeys(name for path in paths for name in self._stored(path)))
        for rule in self.rules:
            if any(_matches(name, rule.patterns) for name in names):
                return rule.scheme
        return None

    def _stored(self, path: str) -> Iterator[str]:
        """What the module may be called: here, and in the checkpoint, where several may be one."""
        found = self.names.find(f"{path}.weight")
        here = [path]
        if found is not None:
            stored, layer, _ = found
            here.append(f"{layer}{stored.name}".removesuffix(".weight").format(expert=0))
        for name in here:
            yield name
            for theirs, ours in self.names.prefixes:
                if name.startswith(ours):
                    yield theirs + name[len(ours) :]


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    literal, expressions = _compiled(patterns)
    parts = name.split(".")
    runs = (".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))
    return any(run in literal for run in runs) or any(expression.match(name) for expression in expressions)


@lru_cache(maxsize=64)
def _compiled(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    """Those without any special character, which checkpoints list by the hundred; and the others."""
    literal = frozenset(one.strip(".") for one in patterns if not one.startswith(_REGEX) and "*" not in one)
    return literal, tuple(_expressions(one for one in patterns if one.startswith(_REGEX) or "*" in one))


def _expressions(patterns: Iterable[str]) -> Iterator[re.Pattern[str]]:
    for pattern in patterns:
        try:
            if pattern.startswith(_REGEX):
                yield re.compile(pattern.removeprefix(_REGEX))
            else:
                text = ".*".join(re.escape(part) for part in pattern.strip(".").split("*"))
                yield re.compile(rf"(?:.*\.)?{text}(?:\..*)?\Z")
        except re.error as error:
            raise ConfigError(
                f"config.json: quantization_config has the pattern {pattern!r}, which is none: {error}"
            ) from None
