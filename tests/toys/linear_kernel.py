"""A kernel for GEMMs: one file, and one row of the table."""

from __future__ import annotations

import torch

from minisgl_backend.kernels.candidate import PLAIN, Candidate, Table
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.linear.call import GemmCall, LinearKey
from minisgl_backend.kernels.linear.choose import CANDIDATES
from minisgl_backend.kernels.linear.kernels import GemmDevice


def _one_row(key: LinearKey, facts: DeviceFacts) -> bool:
    return key.rows == 1 and key.is_bare


def linear(device: GemmDevice, x: torch.Tensor, weight: torch.Tensor, call: GemmCall) -> torch.Tensor:
    """In float64."""
    return (x.double() @ weight.double().t()).to(x.dtype)


ROW: Candidate[LinearKey] = Candidate("exact", "one row: in float64", _one_row, run="tests.toys.linear_kernel:linear")
WITH_ROW: Table[LinearKey] = {**CANDIDATES, PLAIN: (ROW, *CANDIDATES[PLAIN])}
