"""Number formats, once: what options, model folders, attention backends and KV tensors call them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# Of weights and computation: named as in config.json, and in torch.
DTYPES = ("bfloat16", "float16", "float32")

# Of the KV cache: the option's value -> the name in torch. FP8 is E4M3 of Micikevicius et al. 2022, without infinities.
FP8_E4M3 = "float8_e4m3fn"
KV_CACHE_DTYPES: Mapping[str, str] = MappingProxyType(
    {"bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp8_e4m3": FP8_E4M3}
)
