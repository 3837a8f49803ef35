"""INT8 checkpoints: what compressed-tensors writes about weights and activations in 8-bit integers (W8A8).

Source: compressed-tensors' QuantizationArgs.
"""

from __future__ import annotations

from dataclasses import dataclass

from minisgl_backend.weights.schemes.arguments import QuantizationArgs
from minisgl_backend.weights.schemes.keys import SchemeKeys


@dataclass(frozen=True, kw_only=True)
class Int8Scheme:
    """Symmetric weights with a scale an output or a tensor; activations with a scale a token, made when they come."""

    grain: str  # channel or tensor
    unread: tuple[str, ...] = ()

    @property
    def column(self) -> bool:
        """Scales of channels are stored as [outputs, 1]."""
        return self.grain == "channel"

    def __str__(self) -> str:
        return f"INT8 weights, a scale {'an output' if self.column else 'a tensor'}; activations INT8, a scale a token"


def read_compressed_tensors(keys: SchemeKeys) -> Int8Scheme | None:
    """A group of compressed-tensors."""
    weights = QuantizationArgs.read(keys, "weights")
    activations = QuantizationArgs.read(keys, "input_activations")
    if weights is None or activations is None or (weights.type, weights.num_bits) != ("int", 8):
        return None
    keys.choice("format", ("int-quantized", "naive-quantized"))
    weights.allow(symmetric=(True,), dynamic=(False,), strategy=("channel", "tensor"))
    activations.allow(symmetric=(True,), type=("int",), num_bits=(8,), dynamic=(True,), strategy=("token",))
    for one in (weights, activations):
        one.check_unread("group_size", "actorder", "block_structure")
    return Int8Scheme(grain=weights.strategy)
