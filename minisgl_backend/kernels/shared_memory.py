"""How much shared memory a program of a kernel may have: cuts that were measured on an H200 have to fit other GPUs."""

from __future__ import annotations

from functools import cache

import torch
import triton

LARGEST = (
    227 << 10
)  # of Hopper and of Blackwell for data centres; 163 KiB of an A100, 99 of compute capability 8.6, 8.9, 12


def shared_memory(device: torch.device) -> int:
    """Bytes; what is no GPU has no limit of its own."""
    if device.type != "cuda":
        return LARGEST
    return _of_gpu(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _of_gpu(index: int) -> int:
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def stages_that_fit(num_stages: int, stage_bytes: int, shared: int) -> int:
    """As many of the stages of a pipeline as fit, where each holds so many bytes of tiles.

    The compiler keeps one stage less than it is told. Of 16-bit products on Hopper and later it keeps all of them, for
    which there is room in every cut.
    """
    return max(1, min(num_stages, shared // stage_bytes + 1))
