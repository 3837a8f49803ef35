"""INT8 checkpoints: what compressed-tensors writes about weights and activations in 8-bit integers (W8A8).

Source: compressed-tensors' QuantizationArgs.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    weights, activations = keys.child("weights"), keys.child("input_activations")
    if weights is None or activations is None or (weights.get("type"), weights.get("num_bits")) != ("int", 8):
        return None
    keys.choice("format", ("int-quantized", "naive-quantized"))
    for one in (weights, activations):
        one.choice("symmetric", (True,))
        one.without_effect(
            "observer", "observer_kwargs", "group_size", "zp_dtype", "scale_dtype", "actorder", "block_structure"
        )
    weights.choice("dynamic", (False,))
    grain = weights.choice("strategy", ("channel", "tensor"))
    activations.choice("type", ("int",))
    activations.choice("num_bits", (8,))
    activations.choice("dynamic", (True,), False)
    activations.choice("strategy", ("token",), "tensor")
    weights.check_unread()
    activations.check_unread()
    return Int8Scheme(grain=grain)
