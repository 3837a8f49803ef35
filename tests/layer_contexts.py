"""What layers are built in, on the CPU."""

from __future__ import annotations

import torch

from minisgl_backend.kernels.torch_ops import TorchOps
from minisgl_backend.layers.weights import LayerContext
from minisgl_backend.tensor_parallel import TensorParallel
from minisgl_backend.weights.methods import WeightMethods


def layer_context(dtype: torch.dtype, tp: TensorParallel) -> LayerContext:
    """All weights are plain."""
    device, ops = torch.device("cpu"), TorchOps()
    methods = WeightMethods.all_plain(ops, dtype=dtype, device=device)
    return LayerContext(device=device, dtype=dtype, ops=ops, tp=tp, methods=methods)
