"""Sums over the ranks through memory that their GPUs share: numbers, races, and ranks that never come.

    python -m pytest -q -p no:cacheprovider tests/gpu/test_collectives.py      about two minutes on two GPUs

Each test starts a process for each rank. What hangs ends after WATCHDOG_S, with the place where each rank stood.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from minisgl_backend.kernels.torch_ops import TorchOps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

WATCHDOG_S = 60.0
SIZES = [size for size in (2, 4, 8) if size <= torch.cuda.device_count()] or [2]
EPS = 1e-6
CHAIN = 6  # sums of one captured step
REPLAYS = 1000


def on_ranks(size: int, work: Callable[..., None], *arguments: Any) -> None:
    """Runs work(tp, device, *arguments) in a process for each rank; fails where one fails or hangs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=rank_main, args=(rank, size, port, work, arguments), daemon=True) for rank in range(size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(WATCHDOG_S + 20)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    assert codes == [0] * size


def rank_main(rank: int, size: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    from minisgl_backend.tensor_parallel import TensorParallel

    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    device = torch.device("cuda", rank)
    tp = TensorParallel.connect(rank, size, "127.0.0.1", port, device, timeout_s=60)
    code = 1
    try:
        with torch.inference_mode():
            work(tp, device, *arguments)
        code = 0
    except Exception:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)  # what NCCL does at an orderly end waits for the other ranks


def reference(
    tp: Any, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """By NCCL, and added in the order of the ranks."""
    total = torch.zeros(partial.shape, device=partial.device)
    for part in tp.all_gather(partial):
        total = total + part.float()
    hidden = (total + residual.float()).to(residual.dtype)
    return hidden, TorchOps().rms_norm(hidden, weight, EPS)


def same_on_all_ranks(tp: Any, tensor: torch.Tensor) -> bool:
    gathered = tp.all_gather(tensor)
    return all(torch.equal(gathered[0], other) for other in gathered[1:])


def shapes_and_types(tp: Any, device: torch.device, hidden: int, dtype: torch.dtype) -> None:
    torch.manual_seed(100)  # the same hidden states on all ranks; the parts are a rank's own
    own = torch.Generator(device).manual_seed(tp.rank)
    tp.share_memory(hidden, dtype)
    assert tp.sums_in_norm(1)
    weight = torch.randn(hidden, device=device).to(dtype)
    for rows in (1, 2, 7, 64, 1, 200, 263, 265, 300, 1000, 3):
        if not tp.sums_in_norm(rows):
            continue
        for _ in range(3):
            partial = torch.randn(rows, hidden, device=device, generator=own).to(dtype)
            partial[0, ::3] = -0.0
            residual = torch.randn(rows, hidden, device=device).to(dtype)
            expected, expected_norm = reference(tp, partial, residual, weight)
            summed, normed = tp.sum_norm(partial, residual, weight, EPS)
            assert torch.equal(summed, expected), (rows, (summed.float() - expected.float()).abs().max())
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(normed, expected_norm, rtol=tolerance, atol=tolerance)
            assert same_on_all_ranks(tp, normed)
    tp.minimum(0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("hidden", "dtype"),
    [(5120, torch.bfloat16), (1024, torch.bfloat16), (2056, torch.float16), (1024, torch.float32)],
)
def test_sums_are_those_of_nccl(size: int, hidden: int, dtype: torch.dtype) -> None:
    on_ranks(size, shapes_and_types, hidden, dtype)


def races(tp: Any, device: torch.device, sleeper: int) -> None:
    """Captured chains of a product and a sum, in any order, with eager sums between, while one rank is late."""
    from minisgl_backend.kernels.triton_ops import TritonOps

    hidden, dtype = 1024, torch.bfloat16
    torch.manual_seed(3)
    tp.share_memory(hidden, dtype)
    ops = TritonOps(device)
    weight = 1.0 + torch.rand(hidden, device=device).to(dtype)
    own = torch.Generator(device).manual_seed(tp.rank)
    products = [
        (torch.randn(hidden, hidden, device=device, generator=own) / hidden**0.5).to(dtype) for _ in range(CHAIN)
    ]

    def chain(x: torch.Tensor, sums: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        state = x.clone()
        normed = ops.rms_norm(state, weight, EPS)
        for product in products:
            state, normed = sums(ops.linear(normed, product), state, weight, EPS)
        return torch.cat([state, normed])

    def plain(
        partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return reference(tp, partial, residual, weight)

    steps = {}
    stream = torch.cuda.Stream()
    for rows in (1, 2, 8, 100, 300):
        x = torch.zeros(rows, hidden, device=device, dtype=dtype)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            chain(x, tp.sum_norm)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                out = chain(x, tp.sum_norm)
        torch.cuda.current_stream().wait_stream(stream)
        steps[rows] = (graph, x, out)
    order, late = random.Random(1), random.Random(2)
    inputs = torch.Generator(device).manual_seed(9)  # the same on all ranks
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for turn in range(REPLAYS):
        rows = order.choice(list(steps))
        graph, x, out = steps[rows]
        x.copy_(torch.randn(rows, hidden, device=device, generator=inputs))
        if tp.rank == sleeper and late.random() < 0.2:
            torch.cuda._sleep(late.randrange(1, 400_000))  # cycles, up to 0.2 ms
        if tp.rank == sleeper and late.random() < 0.02:
            time.sleep(0.005)
        graph.replay()
        total += out.double().sum()
        if turn % 50 == 0:
            expected = chain(x, plain)
            error = (out.double() - expected.double()).norm() / expected.double().norm()
            assert error < 2e-2, (turn, rows, error)
            assert same_on_all_ranks(tp, out)
        if turn % 7 == 0:
            again = chain(x, tp.sum_norm)
            assert rows > 8 or torch.equal(again, out), (turn, rows)  # cuBLAS may choose anew for larger ones
    assert same_on_all_ranks(tp, total)
    for graph, _, _ in steps.values():
        graph.reset()
    tp.minimum(0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sleeper", [0, 1])
def test_captured_sums_with_a_late_rank(size: int, sleeper: int) -> None:
    on_ranks(size, races, sleeper)


def gives_up(tp: Any, device: torch.device) -> None:
    tp.share_memory(1024, torch.bfloat16)
    x, weight = torch.ones(4, 1024, device=device).bfloat16(), torch.ones(1024, device=device).bfloat16()
    torch.cuda.synchronize()
    tp.minimum(0)
    if tp.rank == 0:  # the others never come
        for _ in range(20):
            tp.sum_norm(x, x.clone(), weight, EPS)
        done = torch.cuda.Event()
        done.record()
        time.sleep(0.3)
        assert not done.query()
        started = time.monotonic()
        tp.abandon()
        done.synchronize()
        assert time.monotonic() - started < 5.0
    else:
        time.sleep(3.0)  # its memory stays as long as rank 0 needs it


def test_a_rank_that_never_comes_is_given_up() -> None:
    on_ranks(2, gives_up)
