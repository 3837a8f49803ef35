"""GEMMs with GGUF's blocks as they lie, against the package gguf and float64."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch

from minisgl_backend.kernels.cpu.blocks import rows_of
from minisgl_backend.kernels.cpu.ops import CpuOps
from minisgl_backend.kernels.linear.blocks import BlockRows, BlockWeight
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.kernels import GemmDevice, LinearKernels, PlainKernels
from minisgl_backend.kernels.torch_ops import TorchOps
from minisgl_backend.number_formats import GGUF_BLOCKS
from tests.tiny_gguf import random_blocks
from tests.unit.kernels.test_cpu_kernels import EPS, numbers, ops, same_numbers  # noqa: F401


def blocks_of(kind: str, rows: int, size: int) -> tuple[BlockRows, torch.Tensor]:
    """A random weight, and its numbers in float64."""
    if kind == "plain":
        weight = numbers(rows, size, scale=0.1)
        return BlockRows(None, weight), weight.double()
    data = random_blocks(kind, (rows, size), np.random.default_rng(rows))
    values = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    return BlockRows(GGUF_BLOCKS[kind], torch.from_numpy(data)), torch.from_numpy(values).double()


def in_int8(x: torch.Tensor) -> torch.Tensor:
    """What activations become."""
    groups = x.float().unflatten(-1, (-1, 32))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(scale > 0, 127 / groups.abs().amax(-1, keepdim=True), 0.0)
    return ((groups * inverse).round().double() * scale.double()).flatten(-2)


def weight_of(*pieces: BlockRows) -> BlockWeight:
    weight = BlockWeight((sum(len(one.data) for one in pieces), 0))
    weight.fill(pieces)
    return weight


def linear(ops: CpuOps, x: torch.Tensor, weight: BlockWeight, **call: Any) -> torch.Tensor:  # noqa: F811
    device = GemmDevice(ops)
    return LinearKernels[BlockWeight]("gguf", device).linear(x, weight, GemmCall(**call))


@pytest.mark.parametrize("kind", GGUF_BLOCKS)
def test_each_type(ops: CpuOps, kind: str) -> None:  # noqa: F811
    for size in (256, 768, *([] if kind.endswith("K") else [32, 96, 608])):
        piece, exact = blocks_of(kind, 53, size)
        weight, x = weight_of(piece), numbers(70, size)
        found = linear(ops, x, weight)
        expected = in_int8(x) @ exact.t()
        assert (found - expected).abs().max() <= 4e-3 * expected.abs().max(), size
        assert (found - x.double() @ exact.t()).std() <= 2e-2 * expected.std(), size
        for rows in (1, 2, 3, 5, 64):
            assert torch.equal(linear(ops, x[:rows], weight), found[:rows]), "the same in every batch"


@pytest.mark.parametrize("kind", ["plain", *GGUF_BLOCKS])
def test_rows_are_the_numbers(ops: CpuOps, kind: str) -> None:  # noqa: F811
    piece, exact = blocks_of(kind, 9, 512)
    weight = BlockWeight((9, 512))
    weight.fill([piece])
    ids = torch.tensor([8, 0, 3, 3], dtype=torch.int32)
    torch.testing.assert_close(rows_of(GemmDevice(ops), weight, ids), exact[ids].bfloat16(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 9])
def test_what_a_call_asks_for_is_inside(ops: CpuOps, rows: int) -> None:  # noqa: F811
    """Of outputs of several types, one of them plain, whose rows are apart."""
    made = [
        blocks_of("Q4_K", 20, 512),
        blocks_of("plain", 7, 512),
        blocks_of("Q6_K", 5, 512),
        blocks_of("Q8_0", 20, 512),
    ]
    apart = BlockRows(made[0][0].type, torch.cat([made[0][0].data] * 2, dim=1)[:, : made[0][0].data.shape[1]])
    weight = weight_of(apart, *(piece for piece, _ in made[1:]))
    x = numbers(rows, 512)
    norm, bias, residual = numbers(512), numbers(52), numbers(rows, 52)
    halved = PlainKernels(GemmDevice(TorchOps()))
    calls: list[dict[str, Any]] = [
        {}, {"bias": bias}, {"residual": residual}, {"bias": bias, "residual": residual}, {"activation": "silu"},
        {"activation": "gelu_tanh"}, {"activation": "gelu"}, {"activation": "silu", "bias": bias},
    ]  # fmt: skip
    for call in calls:
        for normed in (None, norm):
            y = x if normed is None else ops.rms_norm(x, normed, EPS)
            rounded = torch.cat([(y.double() if one is made[1] else in_int8(y)) @ one[1].t() for one in made], dim=1)
            plain: dict[str, Any] = {name: one.double() if torch.is_tensor(one) else one for name, one in call.items()}
            identity = torch.eye(52, dtype=torch.float64)
            expected = halved.linear(rounded, identity, GemmCall(**plain))
            given = {name: one.clone() if torch.is_tensor(one) else one for name, one in call.items()}
            found = linear(ops, x, weight, norm_weight=normed, eps=EPS, **given)
            assert (found - expected).abs().max() <= 1e-2 * expected.abs().max(), call
    out = torch.empty(rows, 52, dtype=torch.bfloat16)
    linear(ops, x, weight, out=out)
    assert torch.equal(out, linear(ops, x, weight))
    assert linear(ops, x[:0], weight).shape == (0, 52)
