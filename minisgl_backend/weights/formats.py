"""Which number format the weights of a module have, by the module's path. Needs no torch.

The formats themselves are rows of `number_formats.WEIGHT_FORMATS`; `quantization_config.py` reads what a checkpoint
says about its own.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from minisgl_backend.errors import ConfigError
from minisgl_backend.number_formats import CONVERTED_FORMATS, WEIGHT_FORMATS
from minisgl_backend.weights.module_patterns import MATCHERS, ModuleNames
from minisgl_backend.weights.names import TensorNames

# Modules with matrices that are no linear layer: paths of this project, or of checkpoints with other names.
_ALWAYS_PLAIN = ("*.gate", "*.router", "*.shared_expert_gate", "*norm")
_PLAIN_TENSORS = ("weight", "bias")
_EXPERTS = re.compile(r".+\.experts")
_EACH_EXPERT = "{expert}"
# What names of text models begin with inside of models for images, whatever a file of theirs has.
_TEXT_MODELS = (("model.language_model.", "model."), ("language_model.model.", "model."))
# Layers that others multiply together, and by whose names some config files call them.
_MERGED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}


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
    """Modules that one of the patterns matches have this scheme; None: they are plain."""

    scheme: WeightScheme | None
    patterns: tuple[str, ...] | None = None  # None: all modules
    matches: str = "path parts"  # of MATCHERS: how patterns are meant


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Formats of a model's linear layers and experts: of the first rule that matches. All else is plain."""

    rules: tuple[SchemeRule, ...] = ()
    names: TensorNames = field(default_factory=TensorNames)  # of the checkpoint, whose module names rules have
    # Why an FP8 cache cannot have the checkpoint's scales; None: it can.
    cache_refusal: str | None = None

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

    @property
    def stored_types(self) -> dict[str, float]:
        """Number types of tensors that stay in the blocks of files, and how many times their memory there they take."""
        of = [scheme.parameters for scheme in self.schemes if hasattr(scheme.parameters, "kept")]
        return {kept: size for one in of for kept, size in zip(one.kept, one.sizes, strict=True)}

    def scheme_of(self, path: str) -> WeightScheme | None:
        """Of the module with this path, in this project's names: model.layers.0.self_attn.q_proj, or ...mlp.experts.

        Raises ConfigError where gate, up and down of experts differ.
        """
        if not self.rules:
            return None
        if not _EXPERTS.fullmatch(path):
            return self._scheme_of(path)
        kinds = [f"{path}.{kind}" for kind in ("gate_proj", "up_proj", "down_proj")]
        found = {self._scheme_of(kind, experts=path): kind for kind in kinds}
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
        scheme = self._scheme_of(path) if is_linear else None
        numbers = math.prod(shape)
        if scheme is None or scheme.parameters is not None:
            return numbers * item_bytes
        row = WEIGHT_FORMATS[scheme.format]
        return int(numbers * row.number_bytes) + numbers // shape[-1] * row.output_bytes

    def _scheme_of(self, path: str, experts: str | None = None) -> WeightScheme | None:
        """experts: the module around an expert's weight."""
        merged = _MERGED.get(path.rpartition(".")[2])
        stored = self._in_checkpoint(path)
        names = ModuleNames(
            own=tuple(dict.fromkeys(self._with_prefixes(path, stored))),
            experts=tuple(self._with_prefixes(experts)) if experts is not None else (),
            merged=tuple(self._with_prefixes(f"{path.rpartition('.')[0]}.{merged}")) if merged and not experts else (),
            holds_experts=_EACH_EXPERT not in (stored or ""),
        )
        for rule in self.rules:
            if rule.patterns is None or MATCHERS[rule.matches](names, rule.patterns):
                return rule.scheme
        return None

    def _in_checkpoint(self, path: str) -> str | None:
        """The module's name there, where it is another one."""
        found = self.names.find(f"{path}.weight")
        return None if found is None else f"{found[1]}{found[0].name}".removesuffix(".weight")

    def _with_prefixes(self, *names: str | None) -> Iterator[str]:
        """Each name, and what it is called where the checkpoint's names have another beginning."""
        for name in filter(None, names):
            name = name.format(expert=0)
            yield name
            for theirs, ours in (*self.names.prefixes, *_TEXT_MODELS):
                if name.startswith(ours):
                    yield theirs + name[len(ours) :]
