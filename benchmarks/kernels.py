"""Kernels alone on one GPU: decode attention and small-batch products against bandwidth and against cuBLAS.

    python -m benchmarks.kernels [--only attention,kv8,linear,shards,moe,sampling,chain] [--json]

Every figure is the median over replays of a CUDA graph that runs the kernel once for each of many copies of its
weights or caches, so that the L2 cache does not flatter it. TB/s counts bytes that must be read.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton

from minisgl_backend.kernels import sampling_layout as layout
from minisgl_backend.kernels.decode_attention import (
    DecodeShape,
    DecodeWorkspace,
    decode_attention,
    decode_shape,
    rotating_decode_attention,
    rotation_pays,
)
from minisgl_backend.kernels.sampling import (
    EditInputs,
    SamplingWorkspace,
    pack_logprobs,
    sample_extended,
    sample_plain,
)
from minisgl_backend.kernels.small_linear import LinearShape, LinearWorkspace, linear, linear_shape
from minisgl_backend.kernels.triton_ops import TritonOps
from minisgl_backend.request import SamplingParams
from minisgl_backend.sampling.logits_processors import TokenRules
from minisgl_backend.sampling.params import encode_params, flags_of
from minisgl_backend.sampling.penalties import PenaltyCounts

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


class Timer:
    """Times graphs; or, as one of several processes that fill the kernel cache, only compiles its share."""

    def __init__(self, share: str | None) -> None:
        self._index, self._count = (int(part) for part in share.split("/")) if share else (0, 0)
        self._calls = 0

    @property
    def compiles_only(self) -> bool:
        return self._count > 0

    def __call__(self, calls: list[Callable[[], object]], replays: int = 15) -> float:
        self._calls += 1
        if not self._count:
            return time_graph(calls, replays)
        if self._calls % self._count == self._index:
            calls[0]()
        return 1.0


def time_graph(calls: list[Callable[[], object]], replays: int = 15) -> float:
    """Median microseconds of one call, over replays of a graph that makes all calls once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times[2:])


def bench_attention(results: dict[str, dict], tune: bool, timer: Timer) -> None:
    """Decode attention at page size 64 and 16, on the length mixes of docs/performance.md."""
    rng = random.Random(0)
    cases = {
        "1x400": [400],
        "8x1024": [1024] * 8,
        "64 mixed 500..1500": [rng.randint(500, 1500) for _ in range(64)],
        "128 mixed 200..1900": [rng.randint(200, 1900) for _ in range(128)],
        "256x1024": [1024] * 256,
        "256 mixed 200..1900": [rng.randint(200, 1900) for _ in range(256)],
    }
    for (name, lengths), page_size, (heads, kv_heads) in itertools.product(cases.items(), (64, 16), ((16, 8), (40, 8))):
        if (heads, page_size) == (40, 16):
            continue
        batch, head_dim = len(lengths), 128
        pages = [-(-length // page_size) for length in lengths]
        layers = (
            1 if timer.compiles_only else max(2, min(28, int(3e9 / (sum(pages) * page_size * kv_heads * head_dim * 4))))
        )
        num_pages = sum(pages) + 1
        caches = [
            torch.randn(2, num_pages, kv_heads, page_size, head_dim, device="cuda").bfloat16() for _ in range(layers)
        ]
        ids = torch.randperm(num_pages - 1, device="cuda").int() + 1
        table = torch.zeros(batch, max(pages), dtype=torch.int32, device="cuda")
        first = 0
        for i, count in enumerate(pages):
            table[i, :count] = ids[first : first + count]
            first += count
        kv_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        rows = torch.arange(batch, dtype=torch.int32, device="cuda")
        q = torch.randn(batch, heads, head_dim, device="cuda").bfloat16()
        workspace = DecodeWorkspace(257, heads, kv_heads, head_dim, torch.device("cuda"))
        out = torch.empty_like(q)
        num_bytes = sum(lengths) * kv_heads * head_dim * 4
        shapes = {"chosen": decode_shape(batch, kv_heads, heads // kv_heads)}
        if tune and page_size == 64 and heads == 16:
            choices = (2, 4, 8, 16, 32) if batch <= 8 else (1, 2, 4, 8)
            for splits, tile, warps, stages in itertools.product(choices, (64, 128), (2, 4), (3, 5, 7)):
                part = 64 if batch <= 8 else 256
                shapes[f"s{splits} p{part} t{tile} w{warps} st{stages}"] = DecodeShape(
                    splits, part, tile, warps, stages
                )
        rows_out: dict[str, tuple[float, float] | str] = {}
        for label, shape in shapes.items():
            try:
                us = timer([
                    functools.partial(
                        decode_attention, q, c[0], c[1], rows, kv_lens, table, workspace, shape, 0.088, out
                    )
                    for c in caches
                ])  # fmt: skip
            except Exception as error:  # a shape that does not fit the chip is a result too
                rows_out[label] = str(error)[:60]
                continue
            rows_out[label] = (round(us, 1), round(num_bytes / us / 1e6, 2))
        best = min((v for v in rows_out.values() if isinstance(v, tuple)), default=None)
        ranked = sorted(((v, k) for k, v in rows_out.items() if isinstance(v, tuple)))[:4]
        results[f"attention {heads}/{kv_heads} page {page_size} {name}"] = {
            "chosen": rows_out["chosen"],
            "best": best,
            "top": ranked,
        }
        print(
            f"attention {heads}/{kv_heads} page {page_size} {name}: chosen {rows_out['chosen']} top {ranked}",
            flush=True,
        )
        del caches
        torch.cuda.empty_cache()


def bench_linear(results: dict[str, dict], tune: bool, timer: Timer) -> None:
    """The four products of a layer, fused with norm, residual and activation, against cuBLAS's product alone."""
    workspace = LinearWorkspace(torch.device("cuda"))
    for model, products in (("0.6B", QWEN3_06B), ("14B", QWEN3_14B)):
        for name, size_out, size_in, norm, residual, gated in products:
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
                                linear, x, w, workspace, norm_weight=norm_weight, eps=1e-6, residual=extra, gated=gated,
                                shape=shape,
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
    """The products of QWEN3_32B_SHARDS, without norm and residual: as they are chosen, by our kernel, by cuBLAS."""
    device = torch.device("cuda")
    ops, workspace = TritonOps(device), LinearWorkspace(device)
    rows_of = (1, 2, 4, 8, 16, 24, 32, 64)
    for name, size_out, size_in, gated in QWEN3_32B_SHARDS:
        weight_rows = size_out * (2 if gated else 1)
        copies = max(4, int(6e8 / (weight_rows * size_in * 2)))
        weights = [torch.randn(weight_rows, size_in, device="cuda").bfloat16() * 0.02 for _ in range(copies)]
        ops.prepare_linear(weights, rows_of)
        for rows in rows_of:
            x = torch.randn(rows, size_in, device="cuda").bfloat16()
            ways: dict[str, Callable[[torch.Tensor], object]] = {
                "chosen": functools.partial(ops.linear, x, gated=gated),
                "own": functools.partial(linear, x, workspace=workspace, gated=gated, pdl=True),
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
    ops = TritonOps(torch.device("cuda"))
    router = torch.randn(experts, hidden, device="cuda").bfloat16() * 0.05
    norm = torch.ones(hidden, device="cuda").bfloat16()
    weights = (_weights(experts, 2 * size, hidden), _weights(experts, hidden, size))
    for tokens in (1, 2, 8, 16, 64, 256, 2048, 8192):
        # One set of weights and other tokens each time: a few tokens pick other experts, many read all of them.
        states = [torch.randn(tokens, hidden, device="cuda").bfloat16() for _ in range(max(4, 24 // tokens))]
        picked = [ops.route(ops.linear(x, router), k, True)[0].unique().numel() for x in states]
        us = time_graph([
            functools.partial(ops.mixture, x, router, *weights, k, True, norm_weight=norm, eps=1e-6, residual=x)
            for x in states
        ])  # fmt: skip
        read = statistics.mean(picked) * 3 * size * hidden * 2
        tflops = tokens * k * 6 * size * hidden / us / 1e6
        figures = {"us": round(us, 1), "tb_s": round(read / us / 1e6, 2), "tflop_s": round(tflops)}
        results[f"moe {tokens} tokens"] = figures
        print(f"moe {tokens} tokens: {figures}", flush=True)


# What is measured of sampling, at temperature 0.6 where nothing else is said; the values of benchmarks.gpu.
SAMPLING_OPTIONS: dict[str, dict] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_k": {"top_k": 20},
    "top_k_200": {"top_k": 200},
    "top_p": {"top_p": 0.95},
    "qwen3": {"top_k": 20, "top_p": 0.95},
    "min_p": {"min_p": 0.05},
    "repetition": {"repetition_penalty": 1.1},
    "bias": {"logit_bias": {5: 1.0}},
    "logprobs": {"logprobs": 5},
}


def bench_sampling(results: dict[str, dict], timer: Timer, tune: bool, profile: bool) -> None:
    """All that a step launches to sample, by option and rows, at vocabulary 151,936.

    Logits are bf16 and nearly flat, as a model with random weights has them: top-p keeps most of the vocabulary, which
    is the hard case. With `tune`, also by how the vocabulary is cut and searched.
    """
    shapes = {"chosen": (2048, 4, 8, 3)}  # tokens of a slice, warps, pivots, rounds
    if tune:
        for cut, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8)):
            for pivots, rounds in ((4, 4), (8, 3), (16, 2), (16, 3)):
                shapes[f"{cut} w{warps} p{pivots} r{rounds}"] = (cut, warps, pivots, rounds)
    for (name, options), rows in itertools.product(SAMPLING_OPTIONS.items(), (1, 8, 64, 256)):
        params = SamplingParams(**{"temperature": 0.6, "seed": 1, **options})
        timed = {}
        for label, (cut, warps, pivots, rounds) in shapes.items():
            if label != "chosen" and (rows not in (1, 64) or ((pivots, rounds) != (8, 3) and name != "top_p")):
                continue
            case = SamplingBench(params, rows, cut, warps, pivots, rounds)
            timed[label] = round(timer([functools.partial(case.sample, x) for x in case.logits]), 1)
            if profile and label == "chosen" and rows in (1, 64):
                profile_step(functools.partial(case.sample, case.logits[0]))
            del case
        best = sorted((us, label) for label, us in timed.items())
        results[f"sampling {name} rows {rows}"] = {"us": timed["chosen"], "top": best[:3]}
        print(f"sampling {name} rows {rows}: {timed['chosen']} us {best[:6] if tune else ''}", flush=True)
        torch.cuda.empty_cache()


class SamplingBench:
    """Rows that all want the same, and what samples them."""

    def __init__(self, params: SamplingParams, rows: int, cut: int, warps: int, pivots: int, rounds: int) -> None:
        device, vocab = torch.device("cuda"), 151936
        self.flags, self.warps = flags_of(params, vocab), warps
        self.searches = bool(self.flags & layout.RANKED) and not layout.is_complete(params.top_k, vocab)
        self.logits = [0.64 * torch.randn(rows, vocab, device=device).bfloat16() for _ in range(4)]
        line = torch.from_numpy(encode_params(params, vocab).copy())
        self.params = line.repeat(rows, 1).to(device)
        self.rows = torch.arange(rows, dtype=torch.int32, device=device)
        self.positions = torch.full((rows,), 20, dtype=torch.int32, device=device)
        self.workspace = SamplingWorkspace(rows, vocab, device, cut, pivots=pivots, rounds=rounds)
        rules, self.counts = TokenRules(rows, (), 4096, device), PenaltyCounts(rows, vocab, device)
        tokens = torch.randint(0, vocab, (rows, 512), dtype=torch.int32, device=device)
        for row in range(rows):
            rules.admit(row, params, 256)
            self.counts.reset(row, tokens[row], 256)
        rules.upload()
        self.edits = EditInputs(tokens, self.counts.counts, rules.counts, rules.rules, rules.prefixes)
        self.top = params.logprobs

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        work = (self.workspace, False, self.warps)
        out = sample_plain(logits, self.rows, self.positions, self.params, *work)
        if self.flags & layout.EXTENDED:
            sample_extended(
                logits, self.rows, self.positions, self.params, self.edits, self.flags, self.searches, out,
                self.workspace, self.warps,
            )  # fmt: skip
        if self.top is not None:
            return pack_logprobs(logits, self.rows, out[0], self.top, self.workspace, self.warps)
        return out


class PolicyOps(TritonOps):
    """TritonOps with another rule for which products take the small kernels."""

    def __init__(self, policy: str, pdl: bool) -> None:
        super().__init__(torch.device("cuda"), ChainShape.hidden)
        self._policy = policy
        self.pdl = pdl

    def _is_small(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, gated: bool, normed: bool
    ) -> bool:
        if self._policy == "cublas" or x.shape[0] > 64 or weight.shape[0] > 65536:
            return False
        if self._policy == "all":
            return True
        return super()._is_small(x, weight, residual, gated, normed)


@dataclass(frozen=True)
class ChainShape:
    """One decoder, Qwen3-0.6B unless told otherwise."""

    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 8
    dim: int = 128
    size: int = 3072
    layers: int = 28
    vocab: int = 151936
    page: int = 64
    context: int = 1024


class Chain:
    """All tensors of a decode step at one batch size."""

    def __init__(self, shape: ChainShape, batch: int) -> None:
        self.shape, self.batch, device = shape, batch, torch.device("cuda")
        pages_each = shape.context // shape.page + 1
        qkv, attended = (shape.heads + 2 * shape.kv_heads) * shape.dim, shape.heads * shape.dim
        self.stack = [
            (
                _weights(qkv, shape.hidden),
                _weights(shape.hidden, attended),
                _weights(2 * shape.size, shape.hidden),
                _weights(shape.hidden, shape.size),
            )
            for _ in range(shape.layers)
        ]
        self.norm, self.head_norm = _weights(shape.hidden), _weights(shape.dim)
        self.lm_head = _weights(shape.vocab, shape.hidden)
        self.cos_sin = torch.randn(4 * shape.context, shape.dim, device=device)
        pool = (shape.layers, 2, batch * pages_each + 1, shape.kv_heads, shape.page, shape.dim)
        self.pool = torch.randn(pool, device=device, dtype=torch.bfloat16)
        self.table = (torch.randperm(batch * pages_each, device=device) + 1).int().reshape(batch, pages_each)
        self.rows = torch.arange(batch, dtype=torch.int32, device=device)
        self.lengths = torch.full((batch,), shape.context, dtype=torch.int32, device=device)
        self.positions = self.lengths - 1
        last = shape.context - 1
        self.slots = self.table[:, last // shape.page] * shape.page + last % shape.page
        self.x = torch.randn(batch, shape.hidden, device=device).bfloat16()
        self.attention = DecodeWorkspace(max(batch, 64), shape.heads, shape.kv_heads, shape.dim, device)
        self.sampling = SamplingWorkspace(batch, shape.vocab, device)
        line = torch.from_numpy(encode_params(SamplingParams(temperature=0.6, seed=1), shape.vocab).copy())
        self.params = line.repeat(batch, 1).to(device)

    def step(self, ops: TritonOps) -> torch.Tensor:
        """The sampled tokens."""
        pdl = ops.pdl and self.batch <= 64
        cut = decode_shape(self.batch, self.shape.kv_heads, self.shape.heads // self.shape.kv_heads)
        x = self.x.clone()  # products add to the residual in place
        for layer, (qkv_weight, o_weight, gate_up_weight, down_weight) in enumerate(self.stack):
            k, v = self.pool[layer]
            qkv = ops.linear(x, qkv_weight, norm_weight=self.norm, eps=1e-6)
            norm, scale = self.head_norm, self.shape.dim**-0.5
            where = (k, v, self.rows, self.lengths, self.table, self.attention, cut, scale)
            if rotation_pays(self.batch, self.shape.kv_heads):
                attended = rotating_decode_attention(qkv, norm, norm, self.cos_sin, *where, 1e-6, pdl)
            else:
                q = ops.rope_store(
                    qkv, norm, norm, self.cos_sin, self.positions, self.slots, k, v, self.shape.heads, 1e-6
                )  # fmt: skip
                attended = decode_attention(q, *where, None, pdl)
            x = ops.linear(attended.flatten(1), o_weight, residual=x)
            gated = ops.linear(x, gate_up_weight, norm_weight=self.norm, eps=1e-6, gated=True)
            x = ops.linear(gated, down_weight, residual=x)
        logits = ops.linear(ops.rms_norm(x, self.norm, 1e-6), self.lm_head)
        return sample_plain(logits, self.rows, self.positions, self.params, self.sampling, pdl)


def _weights(*shape: int) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * 0.02).bfloat16()


def bench_chain(results: dict[str, dict], profile: bool) -> None:
    """A whole decode step of Qwen3-0.6B shapes, attention and sampling included, as one graph; no engine around it."""
    for batch in (1, 2, 8, 64, 256):
        chain = Chain(ChainShape(), batch)
        for policy, pdl in (("cublas", False), ("rule", False), ("rule", True), ("all", True)):
            if policy == "all" and batch > 64:
                continue
            step = functools.partial(chain.step, PolicyOps(policy, pdl))
            us = time_graph([step])
            key = f"chain 0.6B batch {batch} {policy} pdl {int(pdl)}"
            results[key] = {"ms": round(us / 1000, 3)}
            print(f"{key}: {us / 1000:.3f} ms", flush=True)
            if profile and policy == "rule" and pdl:
                profile_step(step)
        del chain, step
        torch.cuda.empty_cache()


def profile_step(step: Callable[[], object]) -> None:
    """Prints the time of each kernel of one step, from graph replays."""
    graph = torch.cuda.CUDAGraph()
    step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    for event in sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)[:12]:
        per_call = event.self_device_time_total / event.count
        total, count = event.self_device_time_total / 3, event.count // 3
        print(f"    {total:9.1f} us a step, {count:4d} x {per_call:7.2f}  {event.key[:80]}")


def bench_kv8(results: dict[str, dict]) -> None:
    """Decode attention over caches in bfloat16 and in FP8: microseconds, and TB/s of what must be read of each."""
    for (heads, kv_heads), batch, length, page_size in (
        ((16, 8), 1, 4096, 64),
        ((16, 8), 64, 1024, 64),
        ((16, 8), 256, 1024, 64),
        ((16, 8), 256, 1024, 16),
        ((40, 8), 64, 4096, 64),
        ((40, 8), 256, 1024, 64),
    ):
        pages = -(-length // page_size)
        ids = torch.randperm(batch * pages, device="cuda").int().reshape(batch, pages) + 1
        kv_lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        rows = torch.arange(batch, dtype=torch.int32, device="cuda")
        q = torch.randn(batch, heads, 128, device="cuda").bfloat16()
        workspace = DecodeWorkspace(257, heads, kv_heads, 128, torch.device("cuda"))
        out, found = torch.empty_like(q), {}
        for name, dtype in (("bf16", torch.bfloat16), ("fp8", torch.float8_e4m3fn)):
            chosen = decode_shape(batch, kv_heads, heads // kv_heads, can_share=name == "bf16")  # as TritonBackend
            shape = (2, batch * pages + 1, kv_heads, page_size, 128)
            num_bytes = 2 * batch * length * kv_heads * 128 * dtype.itemsize
            layers = max(2, min(28, int(3e9 / num_bytes)))  # more than fits the L2 cache
            caches = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in range(layers)]
            for label, cut in (
                (name, chosen),
                (f"{name} 7 stages", replace(chosen, num_stages=7)),
                (f"{name} tile 128", replace(chosen, tile=128, num_stages=3)),
                (f"{name} 8 warps", replace(chosen, num_warps=8)),
            ):
                us = time_graph([
                    functools.partial(decode_attention, q, c[0], c[1], rows, kv_lens, ids, workspace, cut, 0.088, out)
                    for c in caches
                ])  # fmt: skip
                found[label] = (round(us, 1), round(num_bytes / us / 1e6, 2))
            del caches
            torch.cuda.empty_cache()
        case = f"kv8 {heads}/{kv_heads} page {page_size} {batch}x{length}"
        results[case] = found
        print(f"{case}: {found}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    if "linear" in parts:
        bench_linear(results, options.tune, timer)
    if "shards" in parts:
        bench_shards(results)
    if "moe" in parts:
        bench_moe(results)
    if "sampling" in parts:
        bench_sampling(results, timer, options.tune, options.profile)
    if "chain" in parts:
        bench_chain(results, options.profile)
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
