"""The gated delta rule: windows and folds of a decode step against the bytes that they move, chunks of prompts in
tokens a second, and the largest error of each against torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.kernels.timing import time_graph
from benchmarks.limits import Limits
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.recurrent import reference
from minisgl_backend.kernels.recurrent.calls import (
    ChunkBatch,
    ChunkSpan,
    DeltaLayer,
    FoldBatch,
    WindowBatch,
    chunk_tables,
)
from minisgl_backend.kernels.recurrent.choose import recurrent_kernels
from minisgl_backend.kv.state import StateLayout, StatePool
from minisgl_backend.kv.state_config import StateConfig

CONFIG = StateConfig(num_k_heads=16, num_v_heads=32, k_dim=128, v_dim=128, conv_width=4)  # Qwen3.5-9B, Qwen3-Next
PAGE, LAYERS, MODEL_LAYERS = 32, 4, 24
ROWS = (1, 8, 32, 64, 128, 256, 512)
PROMPTS = ((1, 1024), (2, 4096), (1, 8192), (8, 8192))  # sequences, tokens of each


class _Case:
    """Some layers with random states, and a row for each slot."""

    def __init__(self, num_rows: int, num_layers: int, max_drafts: int = 0) -> None:
        self.device = torch.device("cuda")
        self.kernels = recurrent_kernels(DeviceFacts.of(self.device))
        layout = StateLayout((CONFIG,) * num_layers, torch.bfloat16)
        self.pool = StatePool(
            layout, page_size=PAGE, max_drafts=max_drafts, num_slots=num_rows, num_rows=num_rows + 1, device=self.device
        )
        for tensor in self.pool.stacks[0]:
            tensor.normal_()
        self.pool.stacks[0].tail_g.fill_(-0.1)
        heads = CONFIG.num_v_heads
        self.layers = [
            DeltaLayer(
                config=CONFIG,
                conv_weight=self.random(CONFIG.conv_width, CONFIG.conv_channels),
                a_log=self.random(heads).float() - 2,
                dt_bias=self.random(heads).float(),
                norm_weight=self.random(CONFIG.v_dim),
                norm_eps=1e-6,
                state=self.pool.layer(index),
                page_size=PAGE,
            )
            for index in range(num_layers)
        ]

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).bfloat16()

    def ints(self, values: Any) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32).to(self.device)


def bench_states(results: dict[str, dict], tune: bool) -> None:
    """Microseconds of a layer, and shares of the bandwidth that this GPU has for a kernel that only reads. tune: other
    cuts than the chosen ones, too."""
    rate = Limits.measured(torch.device("cuda")).bytes_per_s
    for what, of in (("window", _windows), ("fold", _folds), ("chunk", _chunks)):
        results[f"states {what}"] = of(rate)
    if tune:
        results["states tuned"] = _tuned()


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(f"{(found.float() - expected.float()).norm() / expected.float().norm():.1e}")


def _windows(rate: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for num_rows in ROWS:
        for drafts in (0, 3) if num_rows in (8, 64) else (0,):
            case = _Case(num_rows, LAYERS if num_rows >= 32 else 8 * LAYERS, drafts)
            rows = torch.arange(num_rows).repeat_interleave(1 + drafts)
            # Half a page of tail: rows are at all places of a page.
            lens = 1 + torch.arange(num_rows).repeat_interleave(1 + drafts) % PAGE + PAGE
            lens += torch.arange(1 + drafts).repeat(num_rows)
            slots, borders = torch.arange(1, num_rows + 2), torch.full((num_rows + 1,), PAGE)
            entries, kv_lens, slots, borders = map(case.ints, (rows, lens, slots, borders))
            batch = WindowBatch(entries, kv_lens, slots, borders, has_drafts=drafts > 0)
            x = case.random(len(rows), CONFIG.num_inputs)
            window = case.kernels.delta_window
            error = _error(window(x, case.layers[0], batch, None), reference.delta_window(x, case.layers[0], batch))
            us = time_graph([functools.partial(window, x, layer, batch, None) for layer in case.layers])
            tail = float((torch.arange(num_rows) % PAGE).float().sum())
            entry = CONFIG.num_k_heads * CONFIG.k_dim * 2 + CONFIG.num_v_heads * (CONFIG.v_dim + 1) * 4
            moved = num_rows * CONFIG.num_v_heads * CONFIG.k_dim * CONFIG.v_dim * 4 + (tail + len(rows)) * entry
            moved += len(rows) * (CONFIG.num_inputs + CONFIG.num_v_heads * CONFIG.v_dim) * 2
            share = moved / us / 1e-6 / rate
            name = f"{num_rows} rows" + f" x {1 + drafts}" * (drafts > 0)
            found[name] = {"us": round(us, 1), "share": round(share, 3), "error": error}
            print(
                "delta_window",
                name,
                found[name],
                f"{MODEL_LAYERS * us / 1000:.2f} ms in {MODEL_LAYERS} layers",
                flush=True,
            )
            del case
    return found


def _folds(rate: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for count in (1, 2, 8, 32):
        case = _Case(count, MODEL_LAYERS)
        rows, slots = torch.arange(count), torch.arange(1, count + 1)
        batch = FoldBatch(*map(case.ints, (rows, slots, slots, 0 * rows, 0 * slots + PAGE)))
        stack = case.pool.stacks[0]
        expected = stack._replace(states=stack.states.clone(), conv=stack.conv.clone())
        reference.delta_fold(expected, batch, PAGE)
        case.kernels.delta_fold(stack, batch, PAGE)
        error = _error(stack.states, expected.states)
        us = time_graph([functools.partial(case.kernels.delta_fold, stack, batch, PAGE)])
        state = CONFIG.num_v_heads * CONFIG.k_dim * CONFIG.v_dim * 4
        entry = CONFIG.num_k_heads * CONFIG.k_dim * 2 + CONFIG.num_v_heads * (CONFIG.v_dim + 1) * 4
        share = MODEL_LAYERS * count * (2 * state + PAGE * entry) / us / 1e-6 / rate
        found[f"{count} rows"] = {"us": round(us, 1), "share": round(share, 3), "error": error}
        print(f"delta_fold {count} rows, {MODEL_LAYERS} layers", found[f"{count} rows"], flush=True)
    return found


def _chunks(rate: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for count, tokens in PROMPTS:
        case = _Case(count, 1)
        layer = case.layers[0]
        spans = [ChunkSpan(i, 0, tokens, 0, i + 1) for i in range(count)]
        batch = ChunkBatch(*map(case.ints, chunk_tables(spans, PAGE)))
        x = case.random(count * tokens, CONFIG.num_inputs)
        kernels = case.kernels
        mixed = kernels.conv_prefill(x, layer, batch)
        o = kernels.delta_chunk(mixed, x, layer, batch)
        one: dict[str, Any] = {}
        if count * tokens <= 8192:
            states = layer.state.states.clone()
            one["error"] = _error(o, reference.delta_chunk(mixed, x, layer, batch))
            one["error of states"] = _error(states[1:], layer.state.states[1:])
        calls: dict[str, Callable[[], object]] = {
            "conv": functools.partial(kernels.conv_prefill, x, layer, batch),
            "chunk": functools.partial(kernels.delta_chunk, mixed, x, layer, batch),
            "norm": functools.partial(kernels.gated_norm, o, x, layer, None),
        }
        for name, call in calls.items():
            us = time_graph([call], 5)
            one |= {f"{name} us": round(us, 1), f"{name} ns a token": round(1000 * us / (count * tokens), 1)}
        whole = sum(one[f"{name} us"] for name in calls) * MODEL_LAYERS
        one["tokens/s, all layers"] = round(count * tokens / whole * 1e6)
        found[f"{count} x {tokens}"] = one
        print(f"prompts {count} x {tokens}", one, flush=True)
    return found


def _tuned() -> dict[str, Any]:
    from minisgl_backend.kernels.recurrent.chunk import ChunkShape, delta_chunk
    from minisgl_backend.kernels.recurrent.window import delta_window

    found: dict[str, Any] = {}
    for num_rows in (1, 8, 64, 256):
        case = _Case(num_rows, LAYERS if num_rows > 8 else 8 * LAYERS)
        rows = torch.arange(num_rows)
        slots, borders = torch.arange(1, num_rows + 2), torch.full((num_rows + 1,), PAGE)
        entries, lens, slots, borders = map(case.ints, (rows, 1 + rows % PAGE + PAGE, slots, borders))
        window = WindowBatch(entries, lens, slots, borders)
        x = case.random(num_rows, CONFIG.num_inputs)
        for streams in (False, True):
            calls: list[Callable[[], object]] = [
                functools.partial(delta_window, x, layer, window, None, streams) for layer in case.layers
            ]
            name = f"window, {num_rows} rows, {'streamed' if streams else 'whole'}"
            found[name] = round(time_graph(calls, 5), 1)
            print(name, found[name], flush=True)
    for count, tokens in ((1, 8192), (2, 4096)):
        case = _Case(count, 1)
        spans = [ChunkSpan(i, 0, tokens, 0, i + 1) for i in range(count)]
        batch = ChunkBatch(*map(case.ints, chunk_tables(spans, PAGE)))
        x = case.random(count * tokens, CONFIG.num_inputs)
        mixed = case.kernels.conv_prefill(x, case.layers[0], batch)
        for cut in ((16, 4, 5), (32, 4, 1), (32, 4, 3), (32, 4, 5), (32, 8, 5), (64, 4, 3), (64, 8, 3), (64, 8, 5)):
            call = functools.partial(delta_chunk, mixed, x, case.layers[0], batch, ChunkShape(*cut))
            name = f"{count} x {tokens} tile {cut[0]} warps {cut[1]} stages {cut[2]}"
            try:
                found[name] = round(time_graph([call], 5), 1)
            except Exception as error:  # a cut that does not fit the chip is a result too
                found[name] = f"{type(error).__name__} {error}"[:60]
            print(name, found[name], flush=True)
    return found
