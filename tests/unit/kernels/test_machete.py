"""vLLM's Machete without a GPU: what its operators are given."""

from __future__ import annotations

import pytest
import torch

from minisgl_backend.kernels.linear.int4.reference import dequantize
from minisgl_backend.kernels.linear.libraries.machete import SCHEDULES, Machete, fits_machete, machete_bytes
from minisgl_backend.kernels.linear.libraries.machete_tiles import TILES
from tests.unit.kernels import machete_reference
from tests.unit.kernels.int4_weights import random_weight, relative
from tests.unit.kernels.machete_reference import MacheteReference

CPU, BF16, FP16 = torch.device("cpu"), torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("size_out", "size_in", "group", "zeros", "dtype"),
    [
        (128, 384, 128, True, BF16),
        (256, 192, 192, False, FP16),
        (128, 320, 64, True, FP16),
        (384, 256, -1, True, BF16),
        (128, 384, 128, False, BF16),
    ],
)
def test_the_layout(size_out: int, size_in: int, group: int, zeros: bool, dtype: torch.dtype) -> None:
    """Groups larger than its largest are cut, and those of 192 inputs as well; others share the scales."""
    weight = random_weight(size_out, size_in, group=group, zeros=zeros, dtype=dtype)
    assert fits_machete(weight)
    repacked = Machete(MacheteReference(), CPU).repack(weight)
    assert repacked is not None
    for kernel in repacked.kernels:
        found = repacked.linear(torch.eye(size_in, dtype=dtype), kernel)
        assert relative(found, dequantize(weight, dtype).t()) < (5e-3 if dtype == BF16 else 1e-3)
    is_shared = repacked.scales.data_ptr() == weight.scales.data_ptr()
    assert is_shared == (weight.group in (64, 128))
    held = [
        repacked.words,
        *([] if is_shared else [repacked.scales]),
        *([] if repacked.zeros is None else [repacked.zeros]),
    ]
    assert machete_bytes(weight) == sum(one.numel() * one.element_size() for one in held)


def test_numbers_are_exact() -> None:
    """Each of the 16 with each zero point, also that of 16, which GPTQ's first version can say."""
    weight = random_weight(128, 256, group=64, zeros=True, dtype=BF16)
    assert weight.zeros is not None
    weight.scales.fill_(0.5)
    weight.zeros[1, 7] = 16
    repacked = Machete(MacheteReference(), CPU).repack(weight)
    assert repacked is not None
    assert torch.equal(repacked.linear(torch.eye(256, dtype=BF16), "machete_128x64"), dequantize(weight, BF16).t())


@pytest.mark.parametrize(
    ("size_out", "size_in", "group", "dtype"),
    [
        (192, 256, 64, BF16),
        (128, 288, 64, BF16),
        (128, 256, 32, BF16),
        (128, 192, 96, BF16),
        (128, 256, 64, torch.float32),
    ],
)
def test_what_does_not_fit(size_out: int, size_in: int, group: int, dtype: torch.dtype) -> None:
    weight = random_weight(size_out, size_in, group=group, zeros=False, dtype=dtype)
    assert not fits_machete(weight)
    assert Machete(MacheteReference(), CPU).repack(weight) is None


def test_each_tile_has_a_schedule_of_the_library() -> None:
    assert len(SCHEDULES) == len(TILES)
    assert set(SCHEDULES.values()) == set(machete_reference.SCHEDULES)
