"""Gives all kernels of a decode step the same carveout: the split of an SM's memory into L1 cache and shared memory.

A kernel with another carveout than the kernel before it waits until a multiprocessor is empty. That loses what its
early launch gains (`pdl`, see plain/small_rows.py), so all of them ask for the largest share of shared memory. In the
chain of benchmarks.kernels, a step of Qwen3-0.6B on an H200 takes 706 instead of 736 us at batch 1, and 3,046 instead
of 3,063 at 64.

It is for models with small layers, whose time goes into starts and ends of kernels. With it, a step of Qwen3-32B took
17.5 ms at batch 1, more than at batch 8. Large GEMMs of one row read through the cache, which then is small; that
this is the cause was not measured.

Mixtures of experts do without. On an H200 a layer of Qwen3-30B-A3B, over 1,024 tokens of context, takes 44.9 us without
it and 46.3 to 47.0 with it at batch 1; at batch 64, 359.0 without and 356.3 with it.
"""

from __future__ import annotations

import ctypes

import triton

KERNELS = frozenset(
    {
        "_vector_kernel", "_sliced_kernel", "_linear_kernel", "decode_kernel", "balanced_decode_kernel",
        "_rms_norm_kernel", "_activate_mul_kernel", "_rope_store_kernel", "sample_kernel", "_shrink_few_kernel",
        "_expand_few_kernel",
    }
)  # fmt: skip
_PREFERRED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_LARGEST = 100  # percent
LARGEST_HIDDEN = 2048  # hidden size of the largest dense model that was faster


def prefer_shared_memory() -> None:
    """Sets the carveout of these kernels whenever they are loaded. Best effort: a Triton without the hook is slower."""
    hook = getattr(getattr(getattr(triton, "knobs", None), "runtime", None), "kernel_load_end_hook", None)
    if hook is not None:
        hook.add(_on_load)


def _on_load(module: object, function: int, name: str, metadata: object, key: str) -> None:
    """Triton's hook; `function` is the driver's handle. Best effort: a refusal is ignored."""
    if name in KERNELS:
        ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(function), _PREFERRED_CARVEOUT, _LARGEST)
