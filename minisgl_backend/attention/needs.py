"""What a model asks of attention backends on one machine, as one value."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl_backend.number_formats import FP8_E4M3

MHA, MLA = "mha", "mla"  # kinds of attention: over keys and values, and over latents


@dataclass(frozen=True)
class Scores:
    """Features of a model's attention scores beyond a softmax over all tokens or a window."""

    soft_cap: bool = False
    sinks: bool = False
    chunks: bool = False
    not_causal: bool = False  # an image's tokens see each other


PLAIN_SCORES = Scores()


@dataclass(frozen=True, kw_only=True)
class AttentionNeeds:
    """Of a model's layers on one rank."""

    compute_capability: int | None  # 10 * major + minor of the GPU; None: on CPU, or on any GPU
    dtype: str = "bfloat16"  # of queries
    kv_dtype: str | None = None  # of the KV cache; None: dtype
    head_dims: tuple[int, ...] = (128,)  # of all layers; not looked at with latents
    num_q_heads: int = 1
    scores: Scores = PLAIN_SCORES
    latents: tuple[int, int] | None = None  # kv_lora_rank and qk_rope_head_dim with latents (MLA)

    @property
    def kind(self) -> str:
        return MHA if self.latents is None else MLA

    @property
    def cache_dtype(self) -> str:
        return self.kv_dtype or self.dtype

    @property
    def fp8_cache(self) -> bool:
        return self.cache_dtype == FP8_E4M3

    @property
    def on_gpu(self) -> str:
        """Words for the GPU; none on CPU."""
        return (
            ""
            if self.compute_capability is None
            else f" on a GPU of compute capability {self.compute_capability / 10:.1f}"
        )

    def runs_in(self, capabilities: range) -> bool:
        """Whether the GPU is one of these compute capabilities; true where none is named."""
        return self.compute_capability is None or self.compute_capability in capabilities
