"""Parameters of 4-bit weights, of linear layers and of experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minisgl_backend.kernels.linear.int4.reference import MIDDLE, Int4Weight, padded_inputs
from minisgl_backend.weights.int4_checkpoint import (
    Int4Groups,
    Int4Slice,
    groups_in_order,
    numbers_part,
    scales_part,
    zeros_part,
)
from minisgl_backend.weights.layer import NOISE, empty_parameter
from minisgl_backend.weights.parts import WeightPart
from minisgl_backend.weights.schemes.int4 import Int4Scheme

_DEVIATION = 4.6  # of a random number of 0 to 15


def empty_parameters(
    experts: Sequence[int],
    outputs: int,
    inputs: int,
    scheme: Int4Scheme,
    groups: Int4Groups,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[torch.nn.Parameter, torch.nn.Parameter, torch.nn.Parameter | None]:
    """Words, scales and zero points: see `Int4Weight`."""
    words = padded_inputs(inputs, groups.plane) // 8
    of_groups = (*experts, groups.count(inputs), outputs)
    return (
        empty_parameter(*experts, outputs, words, dtype=torch.int32, device=device),
        empty_parameter(*of_groups, dtype=dtype, device=device),
        None if scheme.symmetric else empty_parameter(*of_groups, dtype=torch.uint8, device=device),
    )


def weight_of(
    words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, size_in: int, groups: Int4Groups
) -> Int4Weight:
    """Parameters are filled in place."""
    return Int4Weight(
        words=words, scales=scales, zeros=zeros, size_in=size_in, group=groups.group, plane=groups.plane
    )  # fmt: skip


def parts_of_weight(
    scheme: Int4Scheme,
    groups: Int4Groups,
    of: Int4Slice,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
) -> list[WeightPart]:
    found = [numbers_part(scheme, groups, of, words), scales_part(scheme, groups, of, scales)]
    return found if zeros is None else [*found, zeros_part(scheme, groups, of, zeros)]


def is_in_order(groups: torch.Tensor, size: int) -> bool:
    """Whether input i is in group i // size."""
    return torch.equal(groups, groups_in_order(len(groups), size, groups.device).to(groups.dtype))


def fill_with_noise(
    words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, generator: torch.Generator
) -> None:
    words.data.random_(-(2**31), 2**31, generator=generator)
    scales.data.fill_(NOISE / _DEVIATION)
    if zeros is not None:
        zeros.data.fill_(MIDDLE)
