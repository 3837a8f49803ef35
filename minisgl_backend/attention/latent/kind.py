"""Attention over latents (MLA): its backends, and which to use on which GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from minisgl_backend.attention.decode_by_batch import DecodeByBatch
from minisgl_backend.attention.entry import (
    FLASHINFER,
    FLASHMLA,
    SGL_KERNEL,
    TORCH,
    TRITON,
    AttentionKind,
    BackendEntry,
    Library,
)
from minisgl_backend.attention.needs import AttentionNeeds
from minisgl_backend.errors import ConfigError
from minisgl_backend.number_formats import FP8_E4M3

# Decode on Hopper (docs/performance.md): FlashMLA's tiles have rows for this many query heads; with more,
# FlashAttention is faster. At small batch sizes `triton` is the fastest; keys are maximum numbers of query heads.
FLASHMLA_HEADS = 64
DECODE_BY_BATCH: Mapping[float, DecodeByBatch] = MappingProxyType(
    {
        16: DecodeByBatch("triton", ((2, math.inf), (4, 8192), (8, 2800))),
        32: DecodeByBatch("triton", ((1, math.inf), (2, 9000), (4, 2800))),
        math.inf: DecodeByBatch("triton", ((1, 8192), (2, 2800))),
    }
)


@dataclass(frozen=True, kw_only=True)
class MLAEntry(BackendEntry):
    """Which latents a backend serves. Page sizes and kernels are those of decode: prefill gathers latents."""

    sizes: tuple[tuple[int, int], ...] | None = None  # (kv_lora_rank, qk_rope_head_dim); None: any
    capabilities: range = range(1000)  # compute capabilities of the GPUs for which it has kernels
    fp8_capabilities: range = range(0)  # those on which it reads latents in FP8; range(0): none

    prefill_reads_pages: ClassVar[bool] = False

    def _refusal(self, needs: AttentionNeeds) -> str | None:
        assert needs.latents is not None, "the kind says so"
        if self.sizes is not None and needs.latents not in self.sizes:
            served = ", ".join(f"{rank} + {rope}" for rank, rope in self.sizes)
            return f"serves latents (MLA) of {served} numbers; this model has {needs.latents[0]} + {needs.latents[1]}"
        return None if needs.runs_in(self.capabilities) else f"has no kernels for latents (MLA){needs.on_gpu}"

    def decode_refusal(self, needs: AttentionNeeds) -> str | None:
        if not needs.fp8_cache or (self.fp8_capabilities and needs.runs_in(self.fp8_capabilities)):
            return None
        return f"cannot decode over latents (MLA) in fp8_e4m3{needs.on_gpu if self.fp8_capabilities else ''}"


def _of_deepseek(
    backend: str, library: Library, capabilities: range, page_sizes: tuple[int, ...] | None = None
) -> MLAEntry:
    """Of a library with kernels for the sizes of DeepSeek's models."""
    return MLAEntry(
        backend=backend, library=library, capabilities=capabilities, page_sizes=page_sizes, sizes=((512, 64),),
        half_only=True,
    )  # fmt: skip


BACKENDS: Mapping[str, MLAEntry] = MappingProxyType(
    {
        "fa": _of_deepseek("latent.flash_attn:FlashAttentionLatentBackend", SGL_KERNEL, range(90, 100)),
        "fi": _of_deepseek("latent.flashinfer:FlashInferLatentBackend", FLASHINFER, range(80, 1000)),
        "triton": MLAEntry(
            backend="latent.triton_attn:TritonLatentBackend", library=TRITON, fp8_capabilities=range(89, 1000)
        ),
        "flashmla": _of_deepseek("latent.flashmla:FlashMLABackend", FLASHMLA, range(90, 100), page_sizes=(64,)),
        "torch": MLAEntry(
            backend="latent.reference:TorchLatentBackend",
            library=TORCH,
            needs_gpu=False,
            default_page_size=16,
            fp8_capabilities=range(1000),
        ),
    }
)


class MLAKind(AttentionKind):
    unserved = "serves no latents (MLA)"
    backends = BACKENDS

    def check(self, needs: AttentionNeeds) -> None:
        if needs.cache_dtype not in (needs.dtype, FP8_E4M3):
            allowed = f"auto, {needs.dtype} or fp8_e4m3"
            raise ConfigError(
                f"kv_cache_dtype is {needs.cache_dtype!r}; allowed for a model that keeps latents (MLA): {allowed}"
            )

    def preferences(self, needs: AttentionNeeds) -> list[tuple[str, str]]:
        if needs.compute_capability != 90:
            return []
        if needs.fp8_cache:
            return [("fa", "triton")]
        both = [("fa", "flashmla"), ("fa", "fa")]
        return both if needs.num_q_heads <= FLASHMLA_HEADS else both[::-1]

    def decode_by_batch(self, needs: AttentionNeeds, decode: str) -> DecodeByBatch | None:
        if decode not in ("flashmla", "fa"):
            return None
        return next(choice for heads, choice in DECODE_BY_BATCH.items() if needs.num_q_heads <= heads)
