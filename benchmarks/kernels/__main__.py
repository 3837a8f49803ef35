"""Kernels alone on one GPU: decode attention and small-batch GEMMs against bandwidth and against cuBLAS.

    python -m benchmarks.kernels
        [--only attention,kv8,latents,linear,int4,blocks,shards,moe,sampling,chain,states] [--json]

Every figure is the median over replays of a CUDA graph that runs the kernel once for each of many copies of its
weights or caches, so that the L2 cache does not flatter it. TB/s counts bytes that must be read.
"""

from __future__ import annotations

import argparse
import json

from benchmarks.kernels.attention import bench_attention, bench_kv8
from benchmarks.kernels.chain import bench_chain
from benchmarks.kernels.gemms import bench_linear, bench_moe, bench_shards
from benchmarks.kernels.int4 import bench_blocks, bench_int4
from benchmarks.kernels.latents import bench_latents
from benchmarks.kernels.sampling import bench_sampling
from benchmarks.kernels.states import bench_states
from benchmarks.kernels.timing import Timer


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="attention,linear")
    parser.add_argument("--tune", action="store_true", help="try many cuts, not only the chosen one")
    parser.add_argument("--profile", action="store_true", help="with chain or sampling: the time of each kernel")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--compile-share", metavar="I/N", help="only compile every N-th kernel, starting at I")
    options = parser.parse_args()
    timer = Timer(options.compile_share)
    results: dict[str, dict] = {}
    parts = options.only.split(",")
    if "attention" in parts:
        bench_attention(results, options.tune, timer)
    if "kv8" in parts:
        bench_kv8(results)
    if "latents" in parts:
        bench_latents(results, options.tune, timer)
    if "linear" in parts:
        bench_linear(results, options.tune, timer)
    if "int4" in parts:
        bench_int4(results, options.tune, timer)
    if "blocks" in parts:
        bench_blocks(results, timer)
    if "shards" in parts:
        bench_shards(results)
    if "moe" in parts:
        bench_moe(results)
    if "sampling" in parts:
        bench_sampling(results, timer, options.tune, options.profile)
    if "chain" in parts:
        bench_chain(results, options.profile)
    if "states" in parts:
        bench_states(results, options.tune)
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
