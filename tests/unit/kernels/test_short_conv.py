"""The gated short convolution over pages, in torch and by Triton's interpreter, against a convolution over whole
sequences: rows in chunks of pages, beside others that decode, with drafts that are rejected."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from minisgl_backend.kernels.recurrent.short_conv import ShortConvCall, ShortConvKernel, short_conv_in_torch

CHANNELS, ROWS, MOST = 24, 5, 240


def by_triton(call: ShortConvCall) -> None:
    pytest.importorskip("triton", reason="pip install triton; tests/conftest.py turns its interpreter on")
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs the kernels compiled")
    from minisgl_backend.kernels.recurrent.short_conv_kernel import short_conv

    short_conv(call)


KERNELS = pytest.mark.parametrize("kernel", [short_conv_in_torch, by_triton])


class Rows:
    """Rows over a pool whose pages hold no number until they are written."""

    def __init__(self, kernel: ShortConvKernel, width: int, page_size: int, drafts: int, bias: bool) -> None:
        self.kernel, self.page_size = kernel, page_size
        draw = torch.Generator().manual_seed(width + page_size)
        self.inputs = torch.randn(ROWS, MOST, 3 * CHANNELS, generator=draw)
        self.weight = torch.randn(CHANNELS, width, generator=draw)
        self.bias = torch.randn(CHANNELS, generator=draw) if bias else None
        columns = -(-MOST // page_size)
        pages = torch.randperm(ROWS * columns, generator=draw).int() + 1
        self.table = F.pad(pages.view(ROWS, columns), (0, 0, 0, 1))  # the last row pads
        length = min(width + drafts, page_size)
        self.ring = torch.full((ROWS * columns + 1, length, CHANNELS), torch.nan)
        b, c, x = self.inputs.chunk(3, dim=2)
        mixed = F.conv1d((b * x).transpose(1, 2), self.weight[:, None], self.bias, padding=width - 1, groups=CHANNELS)
        self.expected = c * mixed[..., :MOST].transpose(1, 2)

    def step(self, parts: list[tuple[int, int, int]], wrong: int = 0, padding: int = 0) -> None:
        """Parts: (row, begin, end); the last `wrong` tokens of each are rejected drafts."""
        tokens = [(row, at, at >= end - wrong) for row, begin, end in parts for at in range(begin, end)]
        inputs = torch.stack([self.inputs[row, at] * (-3.0 if is_wrong else 1.0) for row, at, is_wrong in tokens])
        rows = torch.tensor([row for row, _, _ in tokens] + [ROWS] * padding, dtype=torch.int32)
        ends = torch.tensor([at + 1 for _, at, _ in tokens] + [1] * padding, dtype=torch.int32)
        inputs = F.pad(inputs, (0, 0, 0, padding))
        out = torch.empty(len(inputs), CHANNELS)
        self.kernel(
            ShortConvCall(inputs, self.weight, self.bias, rows, ends, self.table, self.page_size, self.ring, out)
        )
        for (row, at, is_wrong), found in zip(tokens, out, strict=False):
            if not is_wrong:
                torch.testing.assert_close(found, self.expected[row, at], atol=1e-5, rtol=1e-5)


@KERNELS
@pytest.mark.parametrize(("width", "page_size"), [(3, 1), (3, 2), (3, 16), (7, 4), (4, 64)])
def test_chunks_of_pages_and_rows_that_decode(kernel: ShortConvKernel, width: int, page_size: int) -> None:
    rows = Rows(kernel, width, page_size, drafts=0, bias=width == 7)
    whole = 2 * page_size * -(-9 // page_size)
    rows.step([(0, 0, 1), (1, 0, whole), (2, 0, page_size)])
    rows.step([(1, whole, whole + page_size + 3), (2, page_size, page_size + 2), (0, 1, 2)], padding=3)
    for at in range(9):
        first, second, third = whole + page_size + 3 + at, page_size + 2 + at, 2 + at
        rows.step([(2, second, second + 1), (0, third, third + 1), (1, first, first + 1)], padding=at % 3)


@KERNELS
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_rejected_drafts_leave_nothing(kernel: ShortConvKernel, page_size: int) -> None:
    drafts, rng = 3, random.Random(page_size)
    rows = Rows(kernel, 3, page_size, drafts, bias=False)
    lengths = {0: 1, 3: 2 * page_size + 1}
    rows.step([(row, 0, length) for row, length in lengths.items()])
    for _ in range(14):
        proposed, accepted = rng.randrange(drafts + 1), rng.randrange(drafts + 1)
        wrong = max(0, proposed - accepted)
        rows.step([(row, at, at + 1 + proposed) for row, at in lengths.items()], wrong=wrong)
        lengths = {row: at + 1 + proposed - wrong for row, at in lengths.items()}


@KERNELS
def test_a_step_can_be_repeated(kernel: ShortConvKernel) -> None:
    rows = Rows(kernel, 3, 4, drafts=2, bias=False)
    for parts in ([(0, 0, 8), (1, 0, 6)], [(0, 8, 13), (1, 6, 9)], [(0, 13, 14), (1, 9, 12)]):
        for _ in range(2):
            rows.step(parts)


@KERNELS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(kernel: Callable[[ShortConvCall], None], dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    rows, ends = torch.zeros(70, dtype=torch.int32), torch.arange(1, 71, dtype=torch.int32)
    inputs, weight = (torch.randn(shape, generator=draw).to(dtype) for shape in ((70, 900), (300, 3)))
    ring, out = torch.full((6, 3, 300), torch.nan, dtype=dtype), torch.empty(70, 300, dtype=dtype)
    kernel(ShortConvCall(inputs, weight, None, rows, ends, torch.arange(1, 6).int()[None], 16, ring, out))
    b, c, x = (part.float() for part in inputs.chunk(3, dim=1))
    mixed = F.conv1d((b * x).T, weight.float()[:, None], padding=2, groups=300)[:, :70].T
    torch.testing.assert_close(out.float(), c * mixed, atol=0.05, rtol=0.02)
    torch.testing.assert_close(ring[5, 4 % 3].isnan().any(), torch.tensor(False))
