"""vLLM's operators of Marlin in torch, element by element: what its repacking makes, and what its GEMM reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

_EVEN_FIRST = (0, 2, 4, 6, 1, 3, 5, 7)


class MarlinReference:
    """Has the operators as attributes, as torch.ops._C has them."""

    def gptq_marlin_repack(
        self, words: torch.Tensor, order: torch.Tensor, size_k: int, size_n: int, bits: int, is_a_8bit: bool
    ) -> torch.Tensor:
        assert (words.shape, order.shape) == ((size_k // 8, size_n), (0,))
        assert (bits, is_a_8bit) == (4, False)
        numbers = torch.stack([words >> 4 * i & 15 for i in range(8)], 1).reshape(size_k, size_n)
        tiles = numbers.reshape(size_k // 16, 16, size_n // 64, 64).long()
        packed = torch.zeros(size_k // 16, size_n // 64, 128, dtype=torch.int64)
        for word, nibble, k, n in _places():
            packed[:, :, word] |= tiles[:, k, :, n] << 4 * nibble
        return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32).flatten(1)

    def marlin_gemm(
        self, a: torch.Tensor, out: None, words: torch.Tensor, bias: None, scales: torch.Tensor, a_scales: None,
        global_scale: None, zeros: torch.Tensor | None, order: None, permutation: None, locks: torch.Tensor, kind: int,
        size_m: int, size_n: int, size_k: int, is_k_full: bool, atomic: bool, in_float32: bool, is_zero_float: bool,
    ) -> torch.Tensor:  # fmt: skip
        assert (a.shape, words.shape) == ((size_m, size_k), (size_k // 16, 2 * size_n))
        assert a.is_contiguous()
        assert kind == 1125899906843648 + (0 if zeros is not None else 8 << 17)  # scalar_types.uint4, uint4b8
        tiles = torch.zeros(size_k // 16, 16, size_n // 64, 64)
        packed = words.reshape(size_k // 16, size_n // 64, 128)
        for word, nibble, k, n in _places():
            tiles[:, k, :, n] = (packed[:, :, word] >> 4 * nibble & 15).float()
        group = size_k // len(scales)
        points = torch.full(scales.shape, 8.0)
        if zeros is not None:
            points = points.clone()
            for i, place in enumerate(_EVEN_FIRST):
                points[:, place::8] = (zeros >> 4 * i & 15).float()
            points = _in_order(points)
        numbers = tiles.reshape(size_k, size_n) - points.repeat_interleave(group, 0)
        weight = numbers * _in_order(scales.float()).repeat_interleave(group, 0)
        return (a.float() @ weight).to(a.dtype)


def _places() -> Iterator[tuple[int, int, int, int]]:
    """Of a tile of 16 inputs and 64 outputs: word, nibble, input and output of each number. A thread's operand of a
    tensor core has inputs 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of one output, and the same 8 outputs further."""
    for thread, tile, nibble in itertools.product(range(32), range(4), range(8)):
        value = _EVEN_FIRST[nibble]
        k = 2 * (thread % 4) + (0, 1, 8, 9)[value % 4]
        yield 4 * thread + tile, nibble, k, 16 * tile + thread // 4 + 8 * (value // 4)


def _in_order(of_outputs: torch.Tensor) -> torch.Tensor:
    """From the order of scales of groups to that of outputs."""
    order = torch.tensor([i + 8 * j for i in range(8) for j in range(8)])
    found = torch.empty_like(of_outputs)
    found.view(len(of_outputs), -1, 64)[..., order] = of_outputs.view(len(of_outputs), -1, 64)
    return found
