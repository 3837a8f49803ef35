"""How much shared memory a program of a kernel may have: cuts that were measured on an H200 have to fit other GPUs."""

from __future__ import annotations

import torch

from minisgl_backend.kernels.device_facts import LARGEST_SHARED, DeviceFacts

LARGEST = LARGEST_SHARED


def shared_memory(device: torch.device) -> int:
    """Bytes; a CPU has no limit of its own."""
    return DeviceFacts.of(device).shared_memory


def stages_that_fit(num_stages: int, stage_bytes: int, shared: int) -> int:
    """As many of the stages of a pipeline as fit, where each holds stage_bytes of tiles.

    The compiler keeps one stage less than it is told. Of 16-bit GEMMs on Hopper and later it keeps all of them, for
    which there is room in every cut.
    """
    return max(1, min(num_stages, shared // stage_bytes + 1))
