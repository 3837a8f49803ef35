"""Random 4-bit weights for tests of kernels."""

from __future__ import annotations

import torch

from minisgl_backend.kernels.linear.int4.reference import Int4Weight, num_groups, pack, padded_inputs, plane_size


def random_weight(
    *shape: int,
    group: int,
    zeros: bool,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    plane: int | None = None,
) -> Int4Weight:
    """shape: ([num_experts,] size_out, size_in). group -1: one scale an output."""
    size_in = shape[-1]
    plane = plane or plane_size(size_in, group if group > 0 else 128)
    group = group if group > 0 else padded_inputs(size_in, plane)
    of_groups = (*shape[:-2], num_groups(size_in, group, plane), shape[-2])
    numbers = torch.randint(0, 16, shape, dtype=torch.uint8, device=device)
    scales = (torch.rand(of_groups, device=device) + 0.5) / (4.6 * size_in**0.5)
    points = torch.randint(0, 16, of_groups, dtype=torch.uint8, device=device)
    return Int4Weight(
        words=pack(numbers, plane),
        scales=scales.to(dtype),
        zeros=points if zeros else None,
        size_in=size_in,
        group=group,
        plane=plane,
    )


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()
