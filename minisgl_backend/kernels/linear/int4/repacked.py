"""Second layouts of 4-bit weights, for kernels of an installed vLLM: which there are, and trials of their results.

A weight that one of these kernels serves is in memory twice, since this project's kernels are faster for few rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.linear.int4.reference import (
    Int4Weight,
    Repacked,
    dequantize,
    num_groups,
    pack,
    plane_size,
)
from minisgl_backend.kernels.linear.int4.served import layouts_on
from minisgl_backend.kernels.linear.libraries import machete, marlin
from minisgl_backend.kernels.linear.libraries import vllm as vllm_library

log = logging.getLogger(__name__)

_MOST_ERROR = 0.02  # relative error of the trial: rounding to bfloat16 gives 0.002
_TRIAL_ROWS, _TRIAL_OUT, _TRIAL_IN, _TRIAL_GROUP = 24, 256, 256, 64


class Repacker(Protocol):
    def repack(self, weight: Int4Weight) -> Repacked | None:
        """None: the layout cannot represent it. Synchronises with the device."""


class Layout(NamedTuple):
    fits: Callable[[Int4Weight], bool]
    bytes: Callable[[Int4Weight], int]
    repacker: Callable[[Any, torch.device], Repacker]
    compiled: frozenset[torch.dtype] = frozenset()  # dtypes for which the library has no machine code for Hopper


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        machete.LAYOUT: Layout(machete.fits_machete, machete.machete_bytes, machete.Machete),
        marlin.LAYOUT: Layout(marlin.fits_marlin, marlin.marlin_bytes, marlin.Marlin, frozenset({torch.float16})),
    }
)


def fitting_layouts(weight: Int4Weight) -> tuple[str, ...]:
    """Layouts that can represent a weight like this one, whatever the device."""
    return tuple(name for name, layout in LAYOUTS.items() if layout.fits(weight))


def layout_of(weight: Int4Weight, device: torch.device, facts: DeviceFacts) -> tuple[Layout, Repacker] | None:
    """The fastest layout on this device; None: there is none. Where a library was tried, the log says why."""
    fitting = fitting_layouts(weight)
    for name in layouts_on(facts):
        if name in fitting:
            repacker = open_layout(name, device, weight.scales.dtype, weight.zeros is not None)
            if repacker is not None:
                return LAYOUTS[name], repacker
    return None


@cache
def open_layout(name: str, device: torch.device, dtype: torch.dtype, has_zeros: bool) -> Repacker | None:
    """A layout for weights with scales in dtype, once a trial of its kernels was right; None: none, see the log."""
    operators = vllm_library.operators(name)
    if operators is None:
        return None
    if dtype in LAYOUTS[name].compiled:
        log.info("trying %s in %s, which a GPU newer than its machine code compiles first: up to a minute", name, dtype)
    repacker = LAYOUTS[name].repacker(operators, device)
    try:
        error = trial_error(repacker, device, dtype, has_zeros)
    except Exception as failure:  # compiled packages fail in many ways
        refusal = f"its first call fails: {type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
    else:
        if error <= _MOST_ERROR:
            return repacker
        refusal = f"its first call is wrong by {error:.3f}"
    log.warning("%s of vllm is not used, since %s; %s", name, refusal, vllm_library.REMEDY)
    return None


def trial_error(repacker: Repacker, device: torch.device, dtype: torch.dtype, has_zeros: bool) -> float:
    """The largest relative error of one GEMM over all kernels of a layout."""
    generator = torch.Generator().manual_seed(0)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(0, 16, shape, dtype=torch.uint8, generator=generator)

    plane = plane_size(_TRIAL_IN, _TRIAL_GROUP)
    shape = num_groups(_TRIAL_IN, _TRIAL_GROUP, plane), _TRIAL_OUT
    weight = Int4Weight(
        words=pack(integers(_TRIAL_OUT, _TRIAL_IN), plane).to(device),
        scales=(torch.rand(shape, generator=generator) + 0.5).to(device, dtype),
        zeros=integers(*shape).to(device) if has_zeros else None,
        size_in=_TRIAL_IN,
        group=_TRIAL_GROUP,
        plane=plane,
    )
    repacked = repacker.repack(weight)
    if repacked is None:
        raise RuntimeError("no layout for the trial's weight")
    x = torch.randn(_TRIAL_ROWS, _TRIAL_IN, generator=generator).to(device, dtype)
    expected = x.float() @ dequantize(weight, torch.float32).t()
    errors = [(repacked.linear(x, kernel).float() - expected).norm() / expected.norm() for kernel in repacked.kernels]
    return float(torch.stack(errors).max())
