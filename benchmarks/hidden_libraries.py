"""Hides published kernel libraries from a process, as if they were not installed: what is left is torch and Triton."""

from __future__ import annotations

import sys

# Top-level packages of kernels: those of attention backends, and what they take kernels from. Triton comes with torch.
LIBRARIES = ("sgl_kernel", "flashinfer", "flashinfer_jit_cache", "flashinfer_cubin", "flash_mla", "flash_attn", "vllm")


def hide_libraries() -> None:
    """To be called before any of them is imported: importing one then raises ModuleNotFoundError, and find_spec finds
    none. Raises RuntimeError where one is imported already."""
    imported = [name for name in LIBRARIES if sys.modules.get(name) is not None]
    if imported:
        raise RuntimeError(f"imported already, and so not to be hidden: {', '.join(imported)}")
    sys.modules.update(dict.fromkeys(LIBRARIES))  # type: ignore[arg-type]  # None is what halts an import
