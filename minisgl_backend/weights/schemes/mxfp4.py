"""What config.json says of weights in MXFP4, as gpt-oss is published. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl_backend.weights.schemes.keys import SchemeKeys


@dataclass(frozen=True)
class Mxfp4Scheme:
    """Experts in E2M1 with a scale in E8M0 for each 32 inputs; there are no variants."""

    def __str__(self) -> str:
        return "MXFP4 experts, blocks of 32; activations as they are"


def read_mxfp4(keys: SchemeKeys) -> Mxfp4Scheme:
    """quant_method mxfp4."""
    keys.choice("dequantize", (False,))
    return Mxfp4Scheme()
