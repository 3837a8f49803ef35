"""Tensor-parallel ranks as threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from benchmarks.served import free_ports
from minisgl_backend.tensor_parallel import TensorParallel

CPU = torch.device("cpu")


def on_ranks(size: int, work: Callable[[TensorParallel], Any]) -> list[Any]:
    """Runs `work` on every rank at once; results in rank order."""
    (port,) = free_ports(1)

    def rank_main(rank: int) -> Any:
        tp = TensorParallel.connect(rank, size, "127.0.0.1", port, CPU, timeout_s=60)
        try:
            return work(tp)
        finally:
            tp.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank_main, range(size)))
