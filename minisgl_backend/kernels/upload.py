"""Uploads that do not wait for the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[np.generic] | npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """On a GPU a copy, in stream order, through pinned memory: a copy from pageable memory would wait for the step. On
    the CPU the array itself."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
