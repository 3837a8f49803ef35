"""Registry entries of backends' kernels for latents (MLA)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LatentEntry:
    """Which latents (MLA) a backend serves. Page sizes and kernels are those of decode: prefill gathers latents."""

    module: str
    class_name: str
    page_sizes: tuple[int, ...] | None = None  # tokens; None: any
    sizes: tuple[tuple[int, int], ...] | None = None  # (kv_lora_rank, qk_rope_head_dim); None: any
    capabilities: range = range(1000)  # compute capabilities of the GPUs for which it has kernels
    fp8_capabilities: range = range(0)  # those on which it reads latents in FP8; range(0): none
    kernels: str = ""  # MODULE:FUNCTION, as in `BackendEntry`

    def refusal(self, sizes: tuple[int, int], compute_capability: int | None) -> str | None:
        """As in `BackendEntry`; sizes: kv_lora_rank and qk_rope_head_dim."""
        if self.sizes is not None and sizes not in self.sizes:
            served = ", ".join(f"{rank} + {rope}" for rank, rope in self.sizes)
            return f"serves latents (MLA) of {served} numbers; this model has {sizes[0]} + {sizes[1]}"
        if compute_capability is not None and compute_capability not in self.capabilities:
            found = f"{compute_capability / 10:.1f}"
            return f"has no kernels for latents (MLA) on a GPU of compute capability {found}"
        return None

    def fp8_refusal(self, compute_capability: int | None) -> str | None:
        """Why it cannot decode over latents in FP8; None: it can. Prefill works on gathered latents."""
        if self.fp8_capabilities and (compute_capability is None or compute_capability in self.fp8_capabilities):
            return None
        where = "" if compute_capability is None else f" on a GPU of compute capability {compute_capability / 10:.1f}"
        return f"cannot decode over latents (MLA) in fp8_e4m3{where if self.fp8_capabilities else ''}"
