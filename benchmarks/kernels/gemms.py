"""Small-batch GEMMs of dense layers, and mixtures of experts."""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
from collections.abc import Callable

import torch
import triton

from benchmarks.kernels.timing import Timer, random_weights, time_graph
from minisgl_backend.kernels.candidate import PLAIN
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.kernels import GemmDevice, PlainKernels
from minisgl_backend.kernels.linear.plain.small_rows import LinearWorkspace, linear
from minisgl_backend.kernels.linear.plain.tiling import LinearShape, linear_shape
from minisgl_backend.kernels.moe.call import Experts, MixtureCall
from minisgl_backend.kernels.moe.gpu import TritonMixtureKernels
from minisgl_backend.kernels.moe.mixtures import ExpertsKernels
from minisgl_backend.kernels.triton_ops import TritonOps

# (name, size_out, size_in, norm, residual, gated) of one decoder layer
QWEN3_06B = [
    ("qkv", 4096, 1024, True, False, False),
    ("o", 1024, 2048, False, True, False),
    ("gate_up", 3072, 1024, True, False, True),
    ("down", 1024, 3072, False, True, False),
]
QWEN3_14B = [
    ("qkv", 7168, 5120, True, False, False),
    ("o", 5120, 5120, False, True, False),
    ("gate_up", 17408, 5120, True, False, True),
    ("down", 5120, 17408, False, True, False),
]
# What one of two ranks computes of a Qwen3-32B layer where the sum over ranks has added and normed already.
QWEN3_32B_SHARDS = [
    ("qkv", 5120, 5120, False),
    ("o", 5120, 4096, False),
    ("gate_up", 12800, 5120, True),
    ("down", 5120, 12800, False),
]


def bench_linear(results: dict[str, dict], tune: bool, timer: Timer) -> None:
    """The four GEMMs of a layer, fused with norm, residual and activation, against cuBLAS's GEMM alone."""
    workspace = LinearWorkspace(torch.device("cuda"))
    for model, gemms in (("0.6B", QWEN3_06B), ("14B", QWEN3_14B)):
        for name, size_out, size_in, norm, residual, gated in gemms:
            weight_rows = size_out * (2 if gated else 1)
            copies = 1 if timer.compiles_only else max(3, min(28, int(1.5e9 / (weight_rows * size_in * 2))))
            weights = [torch.randn(weight_rows, size_in, device="cuda").bfloat16() * 0.02 for _ in range(copies)]
            for rows in (1, 2, 4, 8, 16):
                if model == "14B" and rows in (2, 4):
                    continue
                x = torch.randn(rows, size_in, device="cuda").bfloat16()
                norm_weight = torch.randn(size_in, device="cuda").bfloat16() if norm else None
                extra = torch.randn(rows, size_out, device="cuda").bfloat16() if residual else None
                cublas = timer([functools.partial(torch.nn.functional.linear, x, w) for w in weights])
                shapes = {"chosen": linear_shape(rows, size_out, size_in, gated)}
                if tune and rows <= 8:
                    for tile_out, tile_in, warps in itertools.product((2, 4, 8, 16), (512, 1024, 2048), (2, 4, 8)):
                        if not 1024 <= tile_out * tile_in <= 16384 or tile_in > size_in:
                            continue
                        shapes[f"v o{tile_out} i{tile_in} w{warps}"] = LinearShape(tile_out, tile_in, 1, warps, 1, True)
                if tune and rows > 8:
                    for tile_out, tile_in, split, warps, stages in itertools.product(
                        (16, 32, 64), (128, 256), (1, 2, 4), (4,), (3, 5)
                    ):
                        programs = -(-size_out // tile_out) * split
                        if (gated and split > 1) or not 60 <= programs <= 1100 or size_in // split < tile_in:
                            continue
                        if rows > 16 and tile_in == 256:
                            continue
                        shapes[f"o{tile_out} i{tile_in} k{split} st{stages}"] = LinearShape(
                            tile_out, tile_in, split, warps, stages
                        )
                timed: dict[str, float | str] = {}
                for label, shape in shapes.items():
                    try:
                        us = timer([
                            functools.partial(
                                linear, x, w, workspace,
                                GemmCall(norm_weight, 1e-6, None, extra, "silu" if gated else None), shape=shape,
                            )
                            for w in weights
                        ], 7)  # fmt: skip
                    except Exception as error:
                        timed[label] = str(error)[:60]
                        continue
                    timed[label] = round(us, 2)
                good = sorted((v, k) for k, v in timed.items() if isinstance(v, float))[:3]
                tbs = weight_rows * size_in * 2 / good[0][0] / 1e6
                key = f"linear {model} {name} rows {rows}"
                results[key] = {"cublas_us": round(cublas, 2), "chosen_us": timed["chosen"], "top": good}
                print(f"{key}: cublas {cublas:.1f} chosen {timed['chosen']} top {good} ({tbs:.2f} TB/s)", flush=True)
            del weights
            torch.cuda.empty_cache()


def bench_shards(results: dict[str, dict]) -> None:
    """The GEMMs of QWEN3_32B_SHARDS, without norm and residual: as they are chosen, by our kernel, by cuBLAS."""
    device = torch.device("cuda")
    ops, workspace = PlainKernels(GemmDevice(TritonOps(device), device)), LinearWorkspace(device)
    rows_of = (1, 2, 4, 8, 16, 24, 32, 64)
    for name, size_out, size_in, gated in QWEN3_32B_SHARDS:
        weight_rows = size_out * (2 if gated else 1)
        copies = max(4, int(6e8 / (weight_rows * size_in * 2)))
        weights = [torch.randn(weight_rows, size_in, device="cuda").bfloat16() * 0.02 for _ in range(copies)]
        ops.prepare(weights, rows_of)
        for rows in rows_of:
            x = torch.randn(rows, size_in, device="cuda").bfloat16()
            asked = GemmCall(activation="silu" if gated else None)
            ways: dict[str, Callable[[torch.Tensor], object]] = {
                "chosen": functools.partial(ops.linear, x, call=asked),
                "own": functools.partial(linear, x, workspace=workspace, call=asked, pdl=True),
                "cublas": functools.partial(torch.nn.functional.linear, x),
            }
            timed = {}
            for way, call in ways.items():
                with contextlib.suppress(triton.OutOfResources):  # ours is for a few rows
                    timed[way] = round(time_graph([functools.partial(call, w) for w in weights]), 2)
            results[f"shard {name} rows {rows}"] = timed
            print(f"shard {name} rows {rows}: {timed}", flush=True)
        del weights
        torch.cuda.empty_cache()


def bench_moe(results: dict[str, dict]) -> None:
    """What follows attention in a layer of Qwen3-30B-A3B: norm, router, experts, residual.

    TB/s counts the weights of all experts that are picked.
    """
    experts, k, hidden, size = 128, 8, 2048, 768
    device = torch.device("cuda")
    plain = PlainKernels(GemmDevice(TritonOps(device), device))
    mixtures = TritonMixtureKernels(plain)
    router = torch.randn(experts, hidden, device="cuda").bfloat16() * 0.05
    norm = torch.ones(hidden, device="cuda").bfloat16()
    weights = Experts(
        gate_up=random_weights(experts, 2 * size, hidden), down=random_weights(experts, hidden, size),
        num_experts=experts, hidden_size=hidden, intermediate_size=size, experts_per_token=k,
    )  # fmt: skip
    mixture: ExpertsKernels[torch.Tensor] = ExpertsKernels(PLAIN, mixtures)
    for tokens in (1, 2, 8, 16, 64, 256, 2048, 8192):
        # One set of weights and other tokens each time: a few tokens pick other experts, many read all of them.
        states = [torch.randn(tokens, hidden, device="cuda").bfloat16() for _ in range(max(4, 24 // tokens))]
        picked = [mixtures.route(plain.linear(x, router), k, True).ids.unique().numel() for x in states]
        us = time_graph([
            functools.partial(mixture, x, weights, MixtureCall(router=router, norm_weight=norm, eps=1e-6, residual=x))
            for x in states
        ])  # fmt: skip
        read = statistics.mean(picked) * 3 * size * hidden * 2
        tflops = tokens * k * 6 * size * hidden / us / 1e6
        figures = {"us": round(us, 1), "tb_s": round(read / us / 1e6, 2), "tflop_s": round(tflops)}
        results[f"moe {tokens} tokens"] = figures
        print(f"moe {tokens} tokens: {figures}", flush=True)
