"""Sums over the GPUs of one host, and ends of decode steps, in microseconds: through memory that they share, and by
NCCL.

    python -m benchmarks.collectives [--ranks 2] [--hidden 5120] [--rows 1,8,64,256,1024,2048,4096] [--vocab 151936]
                                     [--json]

Each figure is the median over replays of a graph of CALLS sums of [rows, hidden] bfloat16 numbers, as decode steps run
them. `peers` is one kernel that sums, adds to the hidden states and norms, `two_shots` another one, where each row is
summed by one rank; `nccl` is the all-reduce alone, and `nccl_norm` that with the norm's kernel behind it, which is what
the first replaces.

Of decode steps of LOGITS_ROWS rows, `end` is all behind the last norm but the sampling: the GEMM with this rank's
part of the vocabulary, logits to rank 0, tokens back. `tokens` is the last of these alone, `product` the first, so that
`peers` and `nccl` less `product` is what communication takes. --vocab 0 leaves these out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from minisgl_backend.tensor_parallel import TensorParallel

CALLS = 32
REPLAYS = 30
LOGITS_ROWS = (8, 64, 256)
ROWS = (1, 2, 8, 16, 64, 128, 256, 512, 1024, 2048, 4096)


def measure(rank: int, size: int, port: int, hidden: int, rows: list[int], vocab: int) -> dict[str, float]:
    """The figures of one rank; all call this at the same time. Names are WHAT_ROWS_KIND_us: sum, end, tokens."""
    from minisgl_backend.kernels import elementwise as fused
    from minisgl_backend.kernels.collectives.peer_memory import Peers
    from minisgl_backend.kernels.collectives.peer_sums import PDL_ROWS, PeerSums

    device = torch.device("cuda", rank)
    tp = TensorParallel.connect(rank, size, "127.0.0.1", port, device, timeout_s=60)
    torch.manual_seed(rank)
    weight = torch.ones(hidden, dtype=torch.bfloat16, device=device)
    try:
        # Two shots of rows that do not divide evenly among the ranks: the next multiple.
        most = {"max_rows": max(rows), "two_shot_rows": -(-max(rows) // size) * size}
        ranks = Peers(rank, size, device, tp.all_gather, tp.minimum)
        peers = PeerSums.open(ranks, hidden, torch.bfloat16, **most)
    except OSError as error:
        print(f"no shared memory: {error}", file=sys.stderr)
        peers = None
    results = {}
    for count in rows:
        partial = torch.randn(count, hidden, device=device).bfloat16()
        residual = torch.randn(count, hidden, device=device).bfloat16()

        def by_nccl(partial: torch.Tensor = partial) -> None:
            _summed(tp, partial)

        def by_nccl_and_norm(partial: torch.Tensor = partial) -> None:
            _summed(tp, partial)
            fused.rms_norm(partial, weight, 1e-6, len(partial) <= PDL_ROWS)

        kinds: dict[str, Callable[[], None]] = {"nccl": by_nccl, "nccl_norm": by_nccl_and_norm}
        if peers is not None:
            reduce_norm = peers.reduce_norm

            def by_peers(partial: torch.Tensor = partial, residual: torch.Tensor = residual) -> None:
                reduce_norm(partial, residual, weight, 1e-6, 1)

            def by_two_shots(partial: torch.Tensor = partial, residual: torch.Tensor = residual) -> None:
                reduce_norm(partial, residual, weight, 1e-6, 2)

            kinds |= {"peers": by_peers, "two_shots": by_two_shots}
        for kind, call in kinds.items():
            results[f"sum_{count}_{kind}_us"] = round(_time(call, tp), 2)
            partial.zero_()  # sums of sums grow
            residual.zero_()
    if vocab:
        results |= _ends(tp, device, hidden, vocab)
    torch.cuda.synchronize()
    tp.minimum(0)
    return results


def _ends(tp: TensorParallel, device: torch.device, hidden: int, vocab: int) -> dict[str, float]:
    from minisgl_backend.kernels.triton_ops import TritonOps
    from minisgl_backend.layers.embedding import ParallelLMHead
    from minisgl_backend.layers.weights import LayerContext
    from minisgl_backend.weights.methods import WeightMethods

    ops = TritonOps(device)
    methods = WeightMethods.all_plain(ops, dtype=torch.bfloat16, device=device)
    place = LayerContext(device=device, dtype=torch.bfloat16, ops=ops, tp=tp, methods=methods)
    head = ParallelLMHead(vocab, hidden, "lm_head", place, None)
    for weight in head.method.parameters():
        weight.data.normal_(0.0, 0.02)
    head.method.prepare([head.method], LOGITS_ROWS)
    tp.share_logits(max(LOGITS_ROWS), vocab, torch.bfloat16)
    shares = tp.logits_columns(1, 0, 1) is not None
    results = {}
    for count in LOGITS_ROWS:
        x = torch.randn(count, hidden, device=device).bfloat16()
        tokens = torch.zeros(2, count, dtype=torch.int32, device=device)

        def product(x: torch.Tensor = x) -> None:
            head.method.apply_weights(x)

        def by_nccl(x: torch.Tensor = x, tokens: torch.Tensor = tokens) -> None:
            head(x)
            tp.broadcast(tokens)

        def tokens_by_nccl(tokens: torch.Tensor = tokens) -> None:
            tp.broadcast(tokens)

        def by_peers(x: torch.Tensor = x, tokens: torch.Tensor = tokens) -> None:
            head.on_rank_0(x)
            tp.share_tokens(tokens)  # without which a rank would write its next logits over these

        def tokens_by_peers(tokens: torch.Tensor = tokens) -> None:
            tp.share_tokens(tokens)

        kinds = {"end_nccl": by_nccl, "end_product": product, "tokens_nccl": tokens_by_nccl}
        if shares:
            kinds |= {"end_peers": by_peers, "tokens_peers": tokens_by_peers}
        for kind, call in kinds.items():
            what, how = kind.split("_")
            results[f"{what}_{count}_{how}_us"] = round(_time(call, tp), 2)
    return results


def _time(call: Callable[[], None], tp: Any) -> float:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(REPLAYS + 3):
        tp.minimum(0)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()  # brings the ranks together
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS)
    graph.reset()
    return statistics.median(times[3:])


def _summed(tp: TensorParallel, partial: torch.Tensor) -> None:
    arrival = tp.begin_all_reduce(partial)
    if arrival is not None:
        arrival()


def _rank_main(rank: int, size: int, port: int, hidden: int, rows: list[int], vocab: int, results: Any) -> None:
    results.put((rank, measure(rank, size, port, hidden, rows, vocab)))


def run(
    size: int = 2, hidden: int = 5120, rows: tuple[int, ...] = ROWS, vocab: int = 151936, timeout_s: float = 180.0
) -> dict[str, float]:
    """Figures of rank 0. Raises RuntimeError where the ranks do not end in time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=_rank_main, args=(rank, size, port, hidden, list(rows), vocab, results), daemon=True)
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    try:
        found = dict(results.get(timeout=timeout_s) for _ in ranks)
    except Exception as error:
        raise RuntimeError(f"the ranks did not end within {timeout_s:g} s: {error!r}") from error
    finally:
        for process in ranks:
            process.kill()
            process.join()
    figures: dict[str, float] = found[0]
    return figures


def print_table(figures: dict[str, float], hidden: int) -> None:
    """One line for each number of rows."""
    counts = sorted({int(name.split("_")[1]) for name in figures if name.startswith("sum_")})
    print(f"{'rows':>6} {'KiB':>8} {'peers':>9} {'two shots':>10} {'nccl':>9} {'nccl+norm':>10}   us", file=sys.stderr)
    for count in counts:
        kinds = ("peers", "two_shots", "nccl", "nccl_norm")
        cells = [figures.get(f"sum_{count}_{kind}_us", float("nan")) for kind in kinds]
        print(
            "{:>6} {:>8.0f} {:>9.2f} {:>10.2f} {:>9.2f} {:>10.2f}".format(count, count * hidden * 2 / 1024, *cells),
            file=sys.stderr,
            flush=True,
        )
    counts = sorted({int(name.split("_")[1]) for name in figures if name.startswith("end_")})
    if counts:
        print(
            f"{'rows':>6} {'end: peers':>12} {'nccl':>9} {'product':>9} {'tokens: peers':>14} {'nccl':>9}   us",
            file=sys.stderr,
        )
    for count in counts:
        names = ("end_{}_peers", "end_{}_nccl", "end_{}_product", "tokens_{}_peers", "tokens_{}_nccl")
        cells = [figures.get(f"{name.format(count)}_us", float("nan")) for name in names]
        print("{:>6} {:>12.2f} {:>9.2f} {:>9.2f} {:>14.2f} {:>9.2f}".format(count, *cells), file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=5120)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object, last line")
    arguments = parser.parse_args()
    rows = tuple(int(count) for count in arguments.rows.split(","))
    figures = run(arguments.ranks, arguments.hidden, rows, arguments.vocab)
    print_table(figures, arguments.hidden)
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
