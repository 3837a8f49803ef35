"""Registry entries: what a backend serves and needs, known without importing it."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl_backend.attention.latent_entry import LatentEntry
from minisgl_backend.number_formats import FP8_E4M3


@dataclass(frozen=True)
class Scores:
    """Features of a model's attention scores beyond a softmax over all tokens or a window."""

    soft_cap: bool = False
    sinks: bool = False
    chunks: bool = False


PLAIN_SCORES = Scores()


@dataclass(frozen=True, kw_only=True)
class BackendEntry:
    """What a backend serves and needs."""

    module: str
    class_name: str
    package: str | None  # import name of the package that it needs in addition to torch
    remedy: str  # what to do when `package` is missing or broken
    device: str | None  # "cuda": needs a GPU; None: runs anywhere
    default_page_size: int  # tokens; used when it serves decode and the user set nothing
    page_sizes: tuple[int, ...] | None = None  # tokens; None: any
    prefill_capability: int = 0  # least compute capability (10 * major + minor) with prefill kernels
    prefill_hint: str = ""  # what to use instead on older GPUs
    kernels: str = ""  # MODULE:FUNCTION, which returns true if the package has its kernels; "": always
    half_only: bool = False  # only serves float16 and bfloat16
    head_sizes: tuple[int, ...] | None = None  # None: every multiple of head_multiple up to largest_head
    head_multiple: int = 1
    largest_head: int | None = None  # None: any
    any_kv: bool = False  # serves a cache of any dtype; else of the queries' dtype, or FP8
    fp8_capabilities: range = range(1000)  # compute capabilities on which it reads an FP8 cache
    soft_caps: bool = False  # computes scores with a soft cap
    sinks: bool = False  # likewise with sinks
    chunks: bool = False  # serves attention in chunks
    sink_kernels: str = ""  # MODULE:FUNCTION, as `kernels`, for models with sinks
    latents: LatentEntry | None = None  # None: it does not serve MLA
    only_latents: bool = False  # only serves MLA: it has no kernels for keys and values

    def refusal(
        self,
        head_dim: int,
        dtype: str,
        kv_dtype: str,
        compute_capability: int | None,
        scores: Scores = PLAIN_SCORES,
        latents: tuple[int, int] | None = None,
    ) -> str | None:
        """Why it cannot serve heads of this size with these dtypes and scores; None: it can. latents: kv_lora_rank and
        qk_rope_head_dim of a model with latents (MLA), for which head_dim is ignored."""
        if self.half_only and dtype not in ("float16", "bfloat16"):
            return f"serves float16 and bfloat16, not {dtype}"
        if latents is not None:
            entry = self.latents
            return "serves no latents (MLA)" if entry is None else entry.refusal(latents, compute_capability)
        if self.only_latents:
            return "only serves latents (MLA), which this model does not have"
        if scores.soft_cap and not self.soft_caps:
            return "computes no soft cap of attention's logits, which this model has"
        if scores.sinks and not self.sinks:
            return "computes no attention sinks, which this model has"
        if scores.chunks and not self.chunks:
            return "serves no attention in chunks, which this model has"
        if self.head_sizes is not None and head_dim not in self.head_sizes:
            return f"serves head sizes {', '.join(map(str, self.head_sizes))}; this model has {head_dim}"
        if head_dim % self.head_multiple or (self.largest_head is not None and head_dim > self.largest_head):
            divisible = f" divisible by {self.head_multiple}" if self.head_multiple > 1 else ""
            return f"serves head sizes to {self.largest_head}{divisible}; this model has {head_dim}"
        if kv_dtype not in (dtype, FP8_E4M3) and not self.any_kv:
            return f"serves a KV cache in {dtype}, as the queries are, or fp8_e4m3, not {kv_dtype}"
        if kv_dtype == FP8_E4M3 and compute_capability is not None and compute_capability not in self.fp8_capabilities:
            return f"reads no KV cache in fp8_e4m3 on a GPU of compute capability {compute_capability / 10:.1f}"
        return None
