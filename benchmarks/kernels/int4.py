"""GEMMs with 4-bit weights: the four of a Qwen3-14B layer, with activation and residual inside."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from benchmarks.kernels.gemms import QWEN3_14B
from benchmarks.kernels.timing import Timer
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.gguf.packed import BLOCK, FACTORED, PackedBlocks
from minisgl_backend.kernels.linear.int4 import dequantized, few_rows, many_rows
from minisgl_backend.kernels.linear.int4.few_rows import Int4Shape, int4_shape
from minisgl_backend.kernels.linear.int4.many_rows import ManyShape, many_shape
from minisgl_backend.kernels.linear.int4.reference import Int4Weight, num_groups
from minisgl_backend.kernels.linear.kernels import GemmDevice
from minisgl_backend.kernels.triton_ops import TritonOps

_ROWS = (1, 8, 16, 32, 64, 128)
_GROUP, _PLANE = 128, 32
_BYTES = 1 << 29  # of the copies of a weight, which the L2 cache does not hold


def bench_int4(results: dict[str, dict], tune: bool, timer: Timer) -> None:
    """Microseconds of each GEMM of a layer; with `tune` of many cuts, else of the chosen ones."""
    device = GemmDevice(TritonOps(torch.device("cuda")), torch.device("cuda"))
    for name, size_out, size_in, norm, residual, gated in QWEN3_14B:
        width = size_out * (2 if gated else 1)
        copies = 1 if timer.compiles_only else max(3, _BYTES // (width * size_in // 2))
        weights = [random_weight(width, size_in) for _ in range(copies)]
        for rows in _ROWS:
            call = GemmCall(
                residual=random(rows, size_out) if residual else None, activation="silu" if gated else None,
                norm_weight=random(size_in) if norm else None, eps=1e-6,
            )  # fmt: skip
            timed: dict[str, float | str] = {}
            for label, way in ways(device, random(rows, size_in), call, width, size_in, tune).items():
                try:
                    timed[label] = round(timer([functools.partial(way, one) for one in weights], 5), 1)
                except Exception as error:
                    timed[label] = str(error)[:60]
            best = sorted((us, label) for label, us in timed.items() if isinstance(us, float))[:6]
            results[f"int4 {name} rows {rows}"] = timed
            floor = round(width * size_in * 0.52 / 3.1e6, 1)
            others = {label: us for label, us in timed.items() if label.startswith(("few", "many", "dequantized"))}
            print(f"int4 {name} rows {rows}: floor {floor}, {others}, best {best}", flush=True)
        del weights
        torch.cuda.empty_cache()


def bench_blocks(results: dict[str, dict], timer: Timer) -> None:
    """The same of GGUF's blocks, many cuts."""
    device = GemmDevice(TritonOps(torch.device("cuda")), torch.device("cuda"))
    for kind, (name, size_out, size_in, _, residual, gated) in itertools.product(("Q4_K", "Q8_0"), QWEN3_14B[:3]):
        width = size_out * (2 if gated else 1)
        copies = 1 if timer.compiles_only else max(3, _BYTES // (width * size_in // 2))
        weights = [random_blocks(kind, width, size_in) for _ in range(copies)]
        for rows in (1, 8, 64):
            call = GemmCall(residual=random(rows, size_out) if residual else None, activation="silu" if gated else None)
            x = random(rows, size_in)
            timed: dict[str, float | str] = {}
            for shape in cuts(rows):
                way = functools.partial(_blocks_by, x, call=call, shape=shape, device=device)
                try:
                    timed[name_of(shape)] = round(timer([functools.partial(way, one) for one in weights], 5), 1)
                except Exception as error:
                    timed[name_of(shape)] = str(error)[:60]
            best = sorted((us, label) for label, us in timed.items() if isinstance(us, float))
            results[f"{kind} {name} rows {rows}"] = timed
            floor = round(weights[0].kind.nbytes / 3.1e6, 1)
            print(f"{kind} {name} rows {rows}: floor {floor}, best {best}", flush=True)
        del weights
        torch.cuda.empty_cache()


def _blocks_by(
    x: torch.Tensor, weight: PackedBlocks, *, call: GemmCall, shape: ManyShape, device: GemmDevice
) -> torch.Tensor:
    return many_rows.linear(x, weight, device.workspace, call, shape, device.facts.multiprocessors, len(x) <= 64)


def random_blocks(kind: str, size_out: int, size_in: int) -> PackedBlocks:
    """Scales of numbers about as small as a model's."""

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, device="cuda").int()

    fields = FACTORED if kind == "Q4_K" else 4
    scales = torch.full((size_in // BLOCK, fields, size_out), 0x3A803A80, dtype=torch.int32, device="cuda")
    low = words(size_out, size_in // 8) if kind == "Q8_0" else None
    return PackedBlocks(words(size_out, size_in // 8), low, scales, size_in)


def name_of(shape: ManyShape) -> str:
    of_program = f"{shape.tile}x{shape.rows} w{shape.num_warps} s{shape.num_stages}"
    return f"{of_program} c{shape.count} p{shape.programs} l{shape.least}"


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def random_weight(size_out: int, size_in: int) -> Int4Weight:
    of_groups = num_groups(size_in, _GROUP, _PLANE), size_out
    words = torch.randint(-(2**31), 2**31, (size_out, size_in // 8), dtype=torch.int64, device="cuda").int()
    return Int4Weight(
        words=words, scales=0.01 * random(*of_groups), zeros=torch.randint(0, 16, of_groups, device="cuda").byte(),
        size_in=size_in, group=_GROUP, plane=_PLANE,
    )  # fmt: skip


def ways(
    device: GemmDevice, x: torch.Tensor, call: GemmCall, size_out: int, size_in: int, tune: bool
) -> Mapping[str, Callable[[Int4Weight], Any]]:
    """What can compute a call, by name."""
    rows, gated = len(x), call.activation is not None
    found: dict[str, Callable[[Int4Weight], Any]] = {}
    bare = call._replace(norm_weight=None)

    def few(shape: Int4Shape, asked: GemmCall) -> Callable[[Int4Weight], Any]:
        return lambda weight: few_rows.linear(x, weight, device.workspace, asked, shape, True)

    def many(shape: ManyShape) -> Callable[[Int4Weight], Any]:
        sms = device.facts.multiprocessors
        return lambda weight: many_rows.linear(x, weight, device.workspace, bare, shape, sms, rows <= 64)

    if rows <= 64:
        cut = int4_shape(rows, size_out // 2 if gated else size_out, size_in, gated)
        found["few"] = few(cut, bare)
        if rows <= 8:
            for early in (1, 2):
                found[f"few, early {early}"] = few(replace(cut, early=early), bare)
    found["many"] = many(many_shape(rows, size_out * size_in))
    if rows >= 64:
        found["dequantized"] = lambda weight: dequantized.run(device, x, weight, bare)
    if tune:
        for shape in cuts(rows):
            found[name_of(shape)] = many(shape)
    return found


def cuts(rows: int) -> list[ManyShape]:
    """Tile, rows, warps, stages, planes of a product, programs of a multiprocessor, least steps of one."""
    if rows <= 8:
        found = [(64, 8, 2, 3, 4, 6), (64, 8, 2, 3, 4, 6, 2), (128, 8, 4, 3, 4, 3), (256, 8, 8, 3, 4, 1, 2)]
    elif rows <= 32:
        tile_rows = 16 if rows <= 16 else 32
        found = [(128, tile_rows, 4, 3, 2, 2), (128, tile_rows, 4, 4, 4, 2), (256, tile_rows, 8, 4, 2, 1)]
    elif rows <= 64:
        found = [(128, 64, 4, 3, 2, 1), (128, 64, 4, 2, 2, 2), (128, 64, 8, 3, 2, 1), (256, 64, 8, 3, 2, 1)]
    else:
        found = [(128, 128, 8, 2, 4, 1), (128, 128, 8, 2, 2, 1), (256, 128, 8, 2, 2, 1)]
    return [ManyShape(*one) for one in found]
