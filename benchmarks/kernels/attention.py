"""Decode attention over caches in bfloat16 and in FP8."""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import replace

import torch

from benchmarks.kernels.timing import Timer, time_graph
from minisgl_backend.kernels.attention.calls import CachedLayer
from minisgl_backend.kernels.attention.choose import DecodeShape, decode_shape
from minisgl_backend.kernels.attention.decode import DecodeBatch, DecodeWorkspace, decode_attention
from minisgl_backend.kv.layout import LayerKV


def bench_attention(results: dict[str, dict], tune: bool, timer: Timer) -> None:
    """Decode attention at page size 64 and 16, on the length mixes of docs/performance.md."""
    rng = random.Random(0)
    cases = {
        "1x400": [400],
        "8x1024": [1024] * 8,
        "24 mixed 200..1900": [rng.randint(200, 1900) for _ in range(24)],
        "48 mixed 200..1900": [rng.randint(200, 1900) for _ in range(48)],
        "64 mixed 500..1500": [rng.randint(500, 1500) for _ in range(64)],
        "128 mixed 200..1900": [rng.randint(200, 1900) for _ in range(128)],
        "256x1024": [1024] * 256,
        "256 mixed 200..1900": [rng.randint(200, 1900) for _ in range(256)],
    }
    all_heads = ((16, 8), (40, 8), (32, 4))
    for (name, lengths), page_size, (heads, kv_heads) in itertools.product(cases.items(), (64, 16), all_heads):
        if heads > 16 and page_size == 16:
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
                        decode_attention, q, CachedLayer(kv=LayerKV(*c), scale=0.088),
                        DecodeBatch(rows, kv_lens, table, workspace, shape), out,
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
                    functools.partial(
                        decode_attention, q, CachedLayer(kv=LayerKV(*c), scale=0.088),
                        DecodeBatch(rows, kv_lens, ids, workspace, cut), out,
                    )
                    for c in caches
                ])  # fmt: skip
                found[label] = (round(us, 1), round(num_bytes / us / 1e6, 2))
            del caches
            torch.cuda.empty_cache()
        case = f"kv8 {heads}/{kv_heads} page {page_size} {batch}x{length}"
        results[case] = found
        print(f"{case}: {found}", flush=True)
