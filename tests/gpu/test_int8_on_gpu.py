"""INT8 weights on a GPU against the same integers on the CPU."""

from __future__ import annotations

import pytest
import torch

from minisgl_backend.kernels.linear import int8
from minisgl_backend.kernels.torch_ops import TorchOps

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("sizes", [(2048, 5120), (1003, 777)])
@pytest.mark.parametrize("rows", [1, 17, 33, 300])
def test_linear(rows: int, sizes: tuple[int, int]) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, sizes[1]), torch.randint(-127, 128, sizes, dtype=torch.int8)
    scale, residual = torch.rand(sizes[0]) / 5000 + 1e-5, torch.randn(rows, sizes[0])
    expected = int8.linear(TorchOps(), x, weight, scale, residual=residual)
    found = int8.linear(TorchOps(), x.cuda(), weight.cuda(), scale.cuda(), residual=residual.cuda()).cpu()
    assert (found - expected).norm() / expected.norm() < 1e-3
