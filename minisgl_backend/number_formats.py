"""Number formats, once: what options, model folders, attention backends and KV tensors call them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

# Of weights and computation: named as in config.json, and in torch.
DTYPES = ("bfloat16", "float16", "float32")

# Of the KV cache: the option's value -> the name in torch. FP8 is E4M3 of Micikevicius et al. 2022, without infinities.
FP8_E4M3 = "float8_e4m3fn"
KV_CACHE_DTYPES: Mapping[str, str] = MappingProxyType(
    {"bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp8_e4m3": FP8_E4M3}
)


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """A number format of the weights of linear layers and experts. Weights in the model's own have none."""

    factory: str  # MODULE:CLASS of its `weights.method.MethodFactory`, imported when a model first uses it
    number_bytes: float  # of one number of a weight
    output_bytes: int  # of the scales of one output
    capability: tuple[int, int]  # of a GPU, at least


# The option `quantization` -> the format.
WEIGHT_FORMATS: Mapping[str, WeightFormat] = MappingProxyType(
    {
        "fp8": WeightFormat(
            factory="minisgl_backend.weights.fp8:Fp8Factory", number_bytes=1, output_bytes=4, capability=(8, 9)
        )
    }
)
