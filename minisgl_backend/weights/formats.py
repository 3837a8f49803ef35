"""Which number format the weights of a module have: one table, by the module's path. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType

from minisgl_backend.errors import ConfigError

PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """One row of the table."""

    factory: str  # MODULE:CLASS of its `MethodFactory`, imported when it is first used


FORMATS: Mapping[str, WeightFormat] = MappingProxyType(
    {PLAIN: WeightFormat(factory="minisgl_backend.weights.plain:PlainFactory")}
)


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Formats of a model's linear layers and experts. Embeddings, LM head and routers are plain."""

    format: str = PLAIN
    exceptions: Mapping[str, str] = field(default_factory=dict)  # pattern of module paths (fnmatch) -> format

    def __post_init__(self) -> None:
        for name in (self.format, *self.exceptions.values()):
            if name not in FORMATS:
                raise ConfigError(f"quantization is {name!r}; allowed: {', '.join(FORMATS)}")

    def format_of(self, path: str) -> str:
        """Of the module with this path, such as model.layers.0.self_attn.q_proj."""
        for pattern, name in self.exceptions.items():
            if fnmatchcase(path, pattern):
                return name
        return self.format
