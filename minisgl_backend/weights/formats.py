"""Which number format the weights of a module have, by the module's path. Needs no torch.

The formats themselves are rows of `number_formats.WEIGHT_FORMATS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from minisgl_backend.errors import ConfigError
from minisgl_backend.number_formats import WEIGHT_FORMATS

# Modules with matrices that are no linear layer: paths of this project, or of checkpoints with other names.
_ALWAYS_PLAIN = ("*.gate", "*.router", "*.shared_expert_gate", "*norm")


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Formats of a model's linear layers and experts. Embeddings, LM head and routers are plain."""

    format: str | None = None  # of WEIGHT_FORMATS; None: plain
    exceptions: Mapping[str, str | None] = field(default_factory=dict)  # pattern of module paths (fnmatch) -> format

    def __post_init__(self) -> None:
        for name in (self.format, *self.exceptions.values()):
            if name is not None and name not in WEIGHT_FORMATS:
                raise ConfigError(f"quantization is {name!r}; allowed: {', '.join(WEIGHT_FORMATS)}")

    def format_of(self, path: str) -> str | None:
        """Of the module with this path, such as model.layers.0.self_attn.q_proj."""
        for pattern, name in self.exceptions.items():
            if fnmatchcase(path, pattern):
                return name
        return self.format

    def bytes_of(self, name: str, shape: tuple[int, ...], item_bytes: int) -> int:
        """Memory of a tensor [..., outputs, inputs] of a checkpoint once it is loaded, about; item_bytes: of a plain
        number."""
        path, _, kind = name.rpartition(".")
        is_matrix = kind == "weight" and len(shape) > 1 and path.startswith("model.layers.")
        found = self.format_of(path) if is_matrix and not any(fnmatchcase(path, one) for one in _ALWAYS_PLAIN) else None
        numbers = math.prod(shape)
        if found is None:
            return numbers * item_bytes
        row = WEIGHT_FORMATS[found]
        return int(numbers * row.number_bytes) + numbers // shape[-1] * row.output_bytes
