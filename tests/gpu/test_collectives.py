"""Sums, logits and tokens through memory that the ranks' GPUs share: numbers, races, and ranks that never come.

    python -m pytest -q -p no:cacheprovider tests/gpu/test_collectives.py      about three minutes on two GPUs

Each test starts a process for each rank. What hangs ends after WATCHDOG_S, with the place where each rank stood.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.served import free_ports
from minisgl_backend.kernels.linear.kernels import GemmDevice, PlainKernels
from minisgl_backend.kernels.torch_ops import TorchOps
from minisgl_backend.tensor_parallel import AllReduce

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

WATCHDOG_S = 60.0
SIZES = [size for size in (2, 4, 8) if size <= torch.cuda.device_count()] or [2]
EPS = 1e-6
CHAIN = 6  # sums of one captured step
REPLAYS = 1000
LONG = 8448  # rows of the longest pass


def on_ranks(size: int, work: Callable[..., None], *arguments: Any) -> None:
    """Runs work(tp, device, *arguments) in a process for each rank; fails where one fails or hangs."""
    (port,) = free_ports(1)
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
    tp.share_memory(hidden, dtype, 0)
    assert tp.all_reduce_for(1, captured=True) is AllReduce.FUSED_IN_NORM
    weight = torch.randn(hidden, device=device).to(dtype)
    for rows in (1, 2, 7, 64, 1, 200, 263, 265, 300, 1000, 3):
        if tp.all_reduce_for(rows, captured=True) is AllReduce.NCCL:
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
    tp.share_memory(hidden, dtype, 0)
    ops = TritonOps(device)
    kernels = PlainKernels(GemmDevice(ops, device))
    weight = 1.0 + torch.rand(hidden, device=device).to(dtype)
    own = torch.Generator(device).manual_seed(tp.rank)
    products = [
        (torch.randn(hidden, hidden, device=device, generator=own) / hidden**0.5).to(dtype) for _ in range(CHAIN)
    ]

    def chain(x: torch.Tensor, sums: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        state = x.clone()
        normed = ops.rms_norm(state, weight, EPS)
        for product in products:
            state, normed = sums(kernels.linear(normed, product), state, weight, EPS)
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


def sent_ahead(tp: Any, device: torch.device, hidden: int, dtype: torch.dtype, sleeper: int) -> None:
    """Chains of a product and a sum in two lanes, one beside the other, while one rank is late: what the ranks' own
    collectives give for each sum, from the same parts."""
    torch.manual_seed(3)
    tp.share_memory(hidden, dtype, LONG)
    weight = 1.0 + torch.rand(hidden, device=device).to(dtype)
    own = torch.Generator(device).manual_seed(tp.rank)
    product = (torch.randn(hidden, hidden, device=device, generator=own) / hidden**0.5).to(dtype)
    late = random.Random(2)
    for turn, rows in enumerate((4096, 5000, LONG, 4097, 4096)):
        assert tp.all_reduce_for(rows, captured=False) is AllReduce.COPY_ENGINE
        assert tp.all_reduce_for(rows, captured=True) is AllReduce.NCCL
        x = torch.randn(rows, hidden, device=device, dtype=dtype)
        lanes = x.split(tp.micro_batches(rows))
        states, normed, sent, parts = [lane.clone() for lane in lanes], list(lanes), [None, None], [None, None]
        for step in range(20):
            for lane in (0, 1):
                if tp.rank == sleeper and late.random() < 0.2:
                    torch.cuda._sleep(late.randrange(1, 2_000_000))  # cycles, up to 1 ms
                if sent[lane] is not None:
                    before = states[lane].clone()
                    _, normed[lane] = tp.sum_norm(parts[lane], states[lane], weight, EPS, sent[lane])
                    if step % 5 == 0:
                        expected, expected_norm = reference(tp, parts[lane], before, weight)
                        assert torch.equal(states[lane], expected), (turn, step, lane)
                        torch.testing.assert_close(normed[lane], expected_norm, rtol=2e-2, atol=2e-2)
                parts[lane] = normed[lane] @ product
                sent[lane] = tp.send_ahead(parts[lane], AllReduce.COPY_ENGINE)
        for lane in (0, 1):
            tp.sum_norm(parts[lane], states[lane], weight, EPS, sent[lane])
            assert same_on_all_ranks(tp, states[lane])
    tp.minimum(0)


@pytest.mark.parametrize("sleeper", [0, 1])
@pytest.mark.parametrize(("hidden", "dtype"), [(5120, torch.bfloat16), (1024, torch.float32)])
def test_sums_that_are_sent_ahead(hidden: int, dtype: torch.dtype, sleeper: int) -> None:
    on_ranks(2, sent_ahead, hidden, dtype, sleeper)


def gives_up(tp: Any, device: torch.device, rows: int) -> None:
    tp.share_memory(1024, torch.bfloat16, LONG)
    x, weight = torch.ones(rows, 1024, device=device).bfloat16(), torch.ones(1024, device=device).bfloat16()
    torch.cuda.synchronize()
    tp.minimum(0)
    if tp.rank == 0:  # the others never come
        for _ in range(20):
            tp.sum_norm(x, x.clone(), weight, EPS, tp.send_ahead(x, tp.all_reduce_for(2 * rows, captured=False)))
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


@pytest.mark.parametrize(("size", "rows"), [(2, 4), (2, 2048), *((size, 1000) for size in SIZES if size == 4)])
def test_a_rank_that_never_comes_is_given_up(size: int, rows: int) -> None:
    on_ranks(size, gives_up, rows)


LOGITS_ROWS = (1, 3, 8, 64, 256)
INPUTS = 3  # of each number of rows


def logits_to_rank_0(tp: Any, device: torch.device, vocab_size: int, dtype: torch.dtype, sleeper: int) -> None:
    """Captured ends of decode steps, in any order, while one rank is late; nothing but a sum holds the ranks together.

    All numbers are small integers, so that each algorithm has the same result.
    """
    from minisgl_backend.kernels.triton_ops import TritonOps
    from minisgl_backend.layers.embedding import ParallelLMHead
    from minisgl_backend.layers.weights import LayerContext
    from minisgl_backend.weights.methods import WeightMethods

    hidden = 1024
    inputs = torch.Generator(device).manual_seed(9)  # the same on all ranks
    tp.share_memory(hidden, dtype, 0)
    tp.share_logits(max(LOGITS_ROWS), vocab_size, dtype)
    assert tp.logits_columns(1, 0, 1) is not None
    assert tp.logits_columns(max(LOGITS_ROWS) + 1, 0, 1) is None
    ops = TritonOps(device)
    methods = WeightMethods.all_plain(ops, dtype=dtype, device=device)
    place = LayerContext(device=device, dtype=dtype, ops=ops, tp=tp, methods=methods)
    head = ParallelLMHead(vocab_size, hidden, "lm_head", place, None)
    (part,) = head.method.weight_parts()
    for start in range(0, vocab_size, 8192):  # a row of the vocabulary is the same on whichever rank it lies
        lines = torch.randint(-1, 2, (8192, hidden), device=device, generator=inputs).to(dtype)
        first, last = max(start, part.start), min(start + 8192, part.start + len(part.target), vocab_size)
        if first < last:
            part.target.data[first - part.start : last - part.start] = lines[first - start : last - start]
    head.method.prepare([head.method], LOGITS_ROWS)
    norm = torch.ones(hidden, device=device, dtype=dtype)

    def end_of_step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tp.sum_norm(x[:1].clone(), x[:1].clone(), norm, EPS)
        logits = head.on_rank_0(x)
        if tp.rank == 0 and sleeper == 0:
            torch.cuda._sleep(100_000)  # the others write the next ones as soon as they may
        kept = logits.clone()
        tokens = torch.full((2, len(x)), -7, dtype=torch.int32, device=device)
        if tp.rank == 0:
            tokens[0], tokens[1] = kept[:, 0], kept[:, -1]
        first = tp.share_tokens(tokens).clone()
        if tp.rank == 0:
            tokens.add_(1)
        return kept, first, tp.share_tokens(tokens)

    steps: dict[int, Any] = {}
    expected: dict[int, list[Any]] = {}
    stream = torch.cuda.Stream()
    for rows in LOGITS_ROWS:
        expected[rows] = []
        for _ in range(INPUTS):
            x = torch.randint(-1, 2, (rows, hidden), device=device, generator=inputs).to(dtype)
            logits = head(x)
            tokens = torch.stack([logits[:, 0], logits[:, -1]]).to(torch.int32)
            expected[rows].append((x, logits if tp.rank == 0 else logits[:, :0], tokens))
        x = expected[rows][0][0].clone()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            kept, first, second = end_of_step(x)
            stream.synchronize()
            assert torch.equal(kept, expected[rows][0][1]), rows
            assert torch.equal(first, expected[rows][0][2]), rows
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                kept, first, second = end_of_step(x)
        torch.cuda.current_stream().wait_stream(stream)
        steps[rows] = (graph, x, kept, first, second)
    order, late = random.Random(1), random.Random(2)
    wrong = torch.zeros(3, dtype=torch.int64, device=device)
    for _ in range(REPLAYS):
        rows = order.choice(LOGITS_ROWS)
        graph, x, kept, first, second = steps[rows]
        given, logits, tokens = order.choice(expected[rows])
        x.copy_(given)
        if tp.rank == sleeper and late.random() < 0.2:
            torch.cuda._sleep(late.randrange(1, 400_000))  # cycles, up to 0.2 ms
        graph.replay()
        wrong += torch.stack([(kept != logits).sum(), (first != tokens).sum(), (second != tokens + 1).sum()])
    assert wrong.tolist() == [0, 0, 0]
    for graph, *_ in steps.values():
        graph.reset()
    tp.minimum(0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sleeper", [0, 1])
@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(151936, torch.bfloat16), (32003, torch.float16), (1001, torch.float32)]
)
def test_logits_are_those_of_an_all_gather(size: int, vocab_size: int, dtype: torch.dtype, sleeper: int) -> None:
    on_ranks(size, logits_to_rank_0, vocab_size, dtype, sleeper)


def waits_in_vain(tp: Any, device: torch.device) -> None:
    tp.share_logits(4, 1000, torch.bfloat16)
    tokens = torch.zeros(2, 4, dtype=torch.int32, device=device)
    torch.cuda.synchronize()
    tp.minimum(0)
    if tp.rank == 0:  # for logits, and the others for tokens
        tp.collect_logits(4)
    else:
        tp.share_tokens(tokens)
    done = torch.cuda.Event()
    done.record()
    time.sleep(0.3)
    assert not done.query()
    started = time.monotonic()
    tp.abandon()
    done.synchronize()
    assert time.monotonic() - started < 5.0
    assert tokens.tolist() == [[0] * 4] * 2
    time.sleep(3.0)  # the memory stays as long as another rank needs it


def test_logits_and_tokens_that_never_come_are_given_up() -> None:
    on_ranks(2, waits_in_vain)
