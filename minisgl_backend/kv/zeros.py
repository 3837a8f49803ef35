"""Zeros of which much may never be used: keys and values, and what is kept for each of many rows."""

from __future__ import annotations

import math
import mmap

import torch


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU memory that the system gives, as zeros, where it is first written. It is this process's own: shared
    memory is limited and counted otherwise. Raises MemoryError."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"can't allocate memory: {size} bytes") from error
    return torch.frombuffer(memory, dtype=dtype).view(shape)
