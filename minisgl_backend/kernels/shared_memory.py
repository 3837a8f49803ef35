"""How much shared memory a program of a kernel may have: cuts that were measured on an H200 have to fit other GPUs."""

from __future__ import annotations

from functools import cache

import torch
import triton

# Of a program, by compute capability: 227 KiB at 9.0 and 10.x, 163 at 8.0, 99 at 8.6, 8.9 and 12.x.
LARGEST = 227 << 10


def shared_memory(device: torch.device) -> int:
    """Bytes; a CPU has no limit of its own."""
    if device.type != "cuda":
        return LARGEST
    return _of_gpu(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _of_gpu(index: int) -> int:
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def stages_that_fit(num_stages: int, stage_bytes: int, shared: int) -> int:
    """As many of the stages of a pipeline as fit, where each holds stage_bytes of tiles.

    The compiler keeps one stage less than it is told. Of 16-bit GEMMs on Hopper and later it keeps all of them, for
    which there is room in every cut.
    """
    return max(1, min(num_stages, shared // stage_bytes + 1))
