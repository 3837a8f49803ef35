"""Shared memory of a kernel's program: tilings that were measured on an H200 have to fit other GPUs."""

from __future__ import annotations

import torch

from minisgl_backend.kernels.device_facts import LARGEST_SHARED, DeviceFacts

LARGEST = LARGEST_SHARED


def shared_memory(device: torch.device) -> int:
    """Bytes; a CPU has no limit of its own."""
    return DeviceFacts.of(device).shared_memory


def stages_that_fit(num_stages: int, stage_bytes: int, shared: int) -> int:
    """Stages of a pipeline that fit into `shared` bytes, at most `num_stages`; each holds stage_bytes of tiles.

    The compiler keeps one stage less than it is told, except for 16-bit GEMMs on Hopper and later, where all of them
    fit in every tiling.
    """
    return max(1, min(num_stages, shared // stage_bytes + 1))
