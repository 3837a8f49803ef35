"""vLLM's Marlin without a GPU: its layout."""

from __future__ import annotations

import pytest
import torch

from minisgl_backend.kernels.linear.int4.reference import dequantize
from minisgl_backend.kernels.linear.libraries.marlin import Marlin, fits_marlin, marlin_bytes
from tests.unit.kernels.int4_weights import random_weight
from tests.unit.kernels.marlin_reference import MarlinReference

CPU, BF16 = torch.device("cpu"), torch.bfloat16


@pytest.mark.parametrize(
    ("size_out", "size_in", "group", "zeros"),
    [(128, 384, 128, True), (64, 256, 96, False), (192, 256, 32, True), (64, 256, -1, True), (64, 384, 256, False)],
)
def test_the_layout(size_out: int, size_in: int, group: int, zeros: bool) -> None:
    """Groups larger than its largest are cut, and those of 96 inputs as well."""
    weight = random_weight(size_out, size_in, group=group, zeros=zeros, dtype=BF16)
    assert fits_marlin(weight)
    repacked = Marlin(MarlinReference(), CPU).repack(weight)
    assert repacked is not None
    found = repacked.linear(torch.eye(size_in, dtype=BF16), "marlin")
    assert torch.equal(found, dequantize(weight, BF16).t())
    held = [repacked.words, repacked.scales, *([] if repacked.zeros is None else [repacked.zeros])]
    assert marlin_bytes(weight) == sum(one.numel() * one.element_size() for one in held)


@pytest.mark.parametrize(
    ("size_out", "size_in", "group", "dtype"),
    [(96, 256, 32, BF16), (64, 320, 32, BF16), (64, 128, 64, BF16), (64, 256, 16, BF16), (64, 256, 32, torch.float32)],
)
def test_what_does_not_fit(size_out: int, size_in: int, group: int, dtype: torch.dtype) -> None:
    weight = random_weight(size_out, size_in, group=group, zeros=False, dtype=dtype)
    assert not fits_marlin(weight)
    assert Marlin(MarlinReference(), CPU).repack(weight) is None


def test_a_zero_point_of_16() -> None:
    """GPTQ's first version can say so; four bits cannot."""
    weight = random_weight(64, 256, group=64, zeros=True, dtype=BF16)
    assert weight.zeros is not None
    weight.zeros[1, 7] = 16
    assert Marlin(MarlinReference(), CPU).repack(weight) is None
