"""Attention over keys and values: its backends, and which to use on which GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from minisgl_backend.attention.entry import (
    FLASHINFER,
    SGL_KERNEL,
    TORCH,
    TRITON,
    AttentionKind,
    BackendEntry,
    WhyMissing,
)
from minisgl_backend.attention.needs import AttentionNeeds


@dataclass(frozen=True, kw_only=True)
class MHAEntry(BackendEntry):
    """Which keys and values a backend serves."""

    prefill_capability: int = 0  # least compute capability (10 * major + minor) with prefill kernels
    prefill_hint: str = ""  # what to use instead on older GPUs
    head_sizes: tuple[int, ...] | None = None  # None: every multiple of head_multiple up to largest_head
    head_multiple: int = 1
    largest_head: int | None = None  # None: any
    any_kv: bool = False  # serves a cache of any dtype; else of the queries' dtype, or FP8
    fp8_capabilities: range = range(1000)  # compute capabilities on which it reads an FP8 cache
    soft_caps: bool = False  # computes scores with a soft cap
    sinks: bool = False  # likewise with sinks
    chunks: bool = False  # serves attention in chunks
    not_causal: bool = False  # its prefill serves queries that see later tokens
    sink_kernels: str = ""  # MODULE:FUNCTION, which returns true if the package has kernels with sinks; "": always

    def failure(self, needs: AttentionNeeds, missing: WhyMissing) -> str | None:
        reason = super().failure(needs, missing)
        if reason is not None or not (needs.scores.sinks and self.sink_kernels):
            return reason
        if (reason := missing(self.sink_kernels)) is None:
            return None
        package = self.library.package
        return f"needs kernels with attention sinks, which this version of {package} does not have ({reason})"

    def _refusal(self, needs: AttentionNeeds) -> str | None:
        if needs.scores.soft_cap and not self.soft_caps:
            return "computes no soft cap of attention's logits, which this model has"
        if needs.scores.sinks and not self.sinks:
            return "computes no attention sinks, which this model has"
        if needs.scores.chunks and not self.chunks:
            return "serves no attention in chunks, which this model has"
        for head_dim in needs.head_dims:
            if self.head_sizes is not None and head_dim not in self.head_sizes:
                return f"serves head sizes {', '.join(map(str, self.head_sizes))}; this model has {head_dim}"
            if head_dim % self.head_multiple or (self.largest_head is not None and head_dim > self.largest_head):
                divisible = f" divisible by {self.head_multiple}" if self.head_multiple > 1 else ""
                return f"serves head sizes to {self.largest_head}{divisible}; this model has {head_dim}"
        if needs.fp8_cache:
            return None if needs.runs_in(self.fp8_capabilities) else f"reads no KV cache in fp8_e4m3{needs.on_gpu}"
        if needs.cache_dtype != needs.dtype and not self.any_kv:
            return f"serves a KV cache in {needs.dtype}, as the queries are, or fp8_e4m3, not {needs.cache_dtype}"
        return None

    def prefill_refusal(self, needs: AttentionNeeds) -> str | None:
        if needs.scores.not_causal and not self.not_causal:
            return "serves no images whose tokens see each other, as this model's do (encoder_cache_mib 0: text alone)"
        if needs.compute_capability is None or needs.compute_capability >= self.prefill_capability:
            return None
        return (
            f"has no prefill kernel for compute capability {needs.compute_capability / 10:.1f} (needs "
            f"{self.prefill_capability / 10:.1f}); a pair that works here: {self.prefill_hint}"
        )


# Default page sizes: measured ones: docs/performance.md. On CPU 16 keeps gathered chunks large
# enough to copy fast and wastes little of a short sequence's last page.
BACKENDS: Mapping[str, MHAEntry] = MappingProxyType(
    {
        "fa": MHAEntry(
            backend="flash_attn:FlashAttentionBackend",
            library=SGL_KERNEL,
            fp8_capabilities=range(90, 100),
            half_only=True,
            head_multiple=8,
            largest_head=256,
            soft_caps=True,
            sinks=True,
            sink_kernels="minisgl_backend.attention.flash_attn:serves_sinks",
            not_causal=True,
        ),
        "fi": MHAEntry(
            backend="flashinfer:FlashInferBackend",
            library=FLASHINFER,
            half_only=True,
            head_sizes=(64, 128, 256),
            fp8_capabilities=range(80, 1000),
            soft_caps=True,
        ),
        "trtllm": MHAEntry(
            backend="trtllm:TrtllmBackend",
            library=FLASHINFER,
            page_sizes=(16, 32, 64),
            fp8_capabilities=range(90, 100),  # the kernels of later GPUs need the queries in FP8, too
            prefill_capability=100,
            prefill_hint="fa,trtllm or triton,trtllm",
            half_only=True,
            head_sizes=(64, 128, 256),
        ),
        "triton": MHAEntry(
            backend="triton_attn:TritonBackend",
            library=TRITON,
            largest_head=256,
            any_kv=True,
            fp8_capabilities=range(89, 1000),  # GPUs that convert FP8 numbers
            soft_caps=True,
            sinks=True,
            chunks=True,
            not_causal=True,
        ),
        "torch": MHAEntry(
            backend="reference:TorchBackend",
            library=TORCH,
            needs_gpu=False,
            default_page_size=16,
            any_kv=True,
            soft_caps=True,
            sinks=True,
            chunks=True,
            not_causal=True,
        ),
    }
)


class MHAKind(AttentionKind):
    unserved = "only serves latents (MLA), which this model does not have"
    backends = BACKENDS

    def preferences(self, needs: AttentionNeeds) -> list[tuple[str, str]]:
        capability = needs.compute_capability or 0
        if 100 <= capability < 110:
            return [("trtllm", "trtllm"), ("fi", "fi")]
        if capability == 90:
            # FlashAttention would need the queries in FP8, too. The project's own decode kernel reads 4.3 TB/s where
            # FlashInfer's reads 3.8 (docs/performance.md), and needs no compilation by nvcc at first use.
            return [] if needs.fp8_cache else [("fa", "triton")]
        return [("fi", "fi")] if capability >= 80 else []
