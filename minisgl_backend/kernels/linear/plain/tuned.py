"""GEMMs by the cuBLASLt algorithm that was measured fastest on this device.

At 16 to 256 rows a GEMM of a large model is two or three waves of blocks over the device, so its speed is decided by
how well the tiles fill the last wave: 88 x 192 tiles cut [34816 outputs, 192 rows] into 396 blocks, three full waves of
132 multiprocessors. The library has hundreds of tile sizes, but its own choice tries few of them: on an H200 the four
GEMMs of a Qwen3-14B layer take 250 us at 192 rows as torch calls them, 225 us with the best tiles, against a floor
of 161 (docs/performance.md has more). So candidates are the library's suggestions and the tiles that a simple count of
waves favours; all are measured, once for a device and a version of the library, then read from a file.

GEMMs of prompts are measured too, of some numbers of rows, each of which stands for those near it: on an H100 at
4,096 rows those of a rank of Qwen3-32B over two GPUs become 2 to 4% faster. Runs as short as these do not reach the
power limit, which slows these GEMMs down after some milliseconds: tiles of 256 x 160 won there when each candidate ran
for half a second.

Only algorithms without atomics are used, so that results do not depend on timing. As with torch's choice, rounding may
depend on the number of rows, since some algorithms add partial sums and others do not.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import torch

from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.linear.choose import is_tunable
from minisgl_backend.kernels.linear.plain.cublaslt import ALIGNMENT, CLUSTERS, CublasLt, Gemm, Launch, tile_sizes
from minisgl_backend.kernels.linear.tuning.choices_file import ChoicesFile
from minisgl_backend.kernels.linear.tuning.timing import GraphTimer, MeasuringStream, cold, is_close, take_turns

log = logging.getLogger(__name__)

ROWS_STEP = 16  # row counts up to the next multiple of it share a choice
PROMPT_ROWS = (512, 1024, 2048, 3072, 4096, 6144, 8192, 16384)  # typical rows of steps with prompts
LEAST_LONG = 1920  # from this row count on, a choice serves all row counts within NEAR of the measured one
NEAR = 1 / 16  # relative
SUGGESTIONS = 8
TILES, CLUSTERS_EACH = 12, 2  # measured in addition to the suggestions
# Likewise for LEAST_LONG rows or more: they fill the device in any case, so tiles matter less.
LONG_TILES = ((256, 160), (128, 256), (256, 128), (192, 192), (128, 192))
LONG_CLUSTERS = (3, 5)
WORTH = 0.98  # of torch's time: a smaller gain is noise

Shape = tuple[int, int]  # size_out, size_in
_ALGORITHM = re.compile(r"([0-9a-f]{128})?")  # 64 bytes; or nothing, where torch's choice is the fastest


class _Key(NamedTuple):
    """What a launch depends on, apart from its algorithm."""

    shape: Shape
    dtype: torch.dtype
    rows: int
    stride: int  # row stride of the result, in numbers
    alignment: int  # of the result's address in bytes, at most ALIGNMENT


class TunedLinear:
    """The choices of one device. `tune` comes first; GEMMs that were not tuned, or gain nothing, are the caller's."""

    def __init__(self, device: torch.device, choices: Path | None) -> None:
        """`choices`: the file that caches them; None: they are measured at each start."""
        self._device = device
        self._file = ChoicesFile(choices)
        self._lt: CublasLt | None = None
        self._failed = False
        self.stream = MeasuringStream(device)
        self._algorithms: dict[tuple[Shape, torch.dtype, int], bytes] = {}  # by `measured_rows`
        self._launchers: dict[_Key, Launch | None] = {}  # None: not allowed

    def tune(self, weights: Sequence[torch.Tensor], rows: Sequence[int]) -> None:
        """Chooses for weights [size_out, size_in] of one shape and dtype, and for each number of rows.

        Takes some milliseconds for each ROWS_STEP of rows where nothing is cached, and up to a second for thousands of
        rows; synchronises with the device.
        Where the library or the memory for measuring is missing, torch keeps these GEMMs: that is no error.
        """
        weight = weights[0]
        shape, dtype = (weight.shape[0], weight.shape[1]), weight.dtype
        if not is_tunable(*shape, dtype):
            return
        lt = self.library()
        if lt is None or not all(map(_is_plain, weights)):
            return
        kind = f"{torch.cuda.get_device_name(self._device)} cublasLt {lt.version} {dtype} {shape[0]}x{shape[1]}"
        remembered = self._file.read(kind, _ALGORITHM)
        steps = sorted({step for count in rows if (step := measured_rows(count))})
        missing = [step for step in steps if str(step) not in remembered]
        if missing:
            measured = self._measure(lt, weights, missing)
            remembered = {**remembered, **measured}
            self._file.add(kind, measured)
        for step in steps:
            if chosen := remembered.get(str(step)):
                self._algorithms[shape, dtype, step] = bytes.fromhex(chosen)

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """x [rows, size_in] @ weight.T, added into `residual` where it is given; None: not tuned, the caller should."""
        if not self._algorithms:
            return None
        key = _Key((weight.shape[0], weight.shape[1]), weight.dtype, x.shape[0], weight.shape[0], ALIGNMENT)
        if self._launcher(key) is None or not _is_plain(x) or not _is_plain(weight):
            return None
        if residual is None:
            out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
        elif _is_plain(residual):
            out = residual
        else:
            return None
        return out if self._launch(key, weight, x, out, residual is not None) else None

    def linear_into(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> bool:
        """x [rows, size_in] @ weight.T, written to out [rows, size_out], whose rows may be strided; False: not tuned,
        the caller should."""
        if not self._algorithms or out.stride(1) != 1 or not _is_plain(x) or not _is_plain(weight):
            return False
        (rows, size_out), address = out.shape, out.data_ptr()
        stride = out.stride(0) if rows > 1 else size_out
        alignment = min(ALIGNMENT, address & -address)  # the largest power of two that divides it
        return self._launch(
            _Key((size_out, weight.shape[1]), weight.dtype, rows, stride, alignment), weight, x, out, False
        )

    def _launch(self, key: _Key, weight: torch.Tensor, x: torch.Tensor, out: torch.Tensor, add: bool) -> bool:
        launch = self._launcher(key)
        if launch is None:
            return False
        try:
            launch(weight, x, out, add)
        except RuntimeError as error:  # despite the library's check it may fail to launch; nothing was written
            log.warning("a GEMM of %d x %d, %d rows, is left to torch: %s", *key.shape, key.rows, error)
            self._launchers[key] = None
            return False
        return True

    def _launcher(self, key: _Key) -> Launch | None:
        if key in self._launchers:
            return self._launchers[key]
        algorithm = self._algorithms.get((key.shape, key.dtype, measured_rows(key.rows)))
        if algorithm is None or self._lt is None:
            return None
        self._launchers[key] = _allowed(self._lt, key, algorithm)
        return self._launchers[key]

    def library(self) -> CublasLt | None:
        """None: there is none, and torch keeps its GEMMs."""
        if self._lt is None and not self._failed:
            try:
                self._lt = CublasLt(self._device)
            except (OSError, RuntimeError) as error:
                self._failed = True
                log.warning("GEMMs are left to torch: %s", error)
        return self._lt

    def _measure(self, lt: CublasLt, weights: Sequence[torch.Tensor], steps: Sequence[int]) -> dict[str, str]:
        """The fastest algorithm in hexadecimal for each number of rows; "" where torch's is the fastest. Row counts
        whose measurement fails are left out."""
        weight, best = weights[0], {}
        some = weights[: cold(len(weights), weight.nbytes)]
        with self.stream.current():
            for rows in reversed(steps):  # the largest first: the others fit into its memory
                try:
                    best[str(rows)] = _fastest(lt, self.stream.randn(rows, weight.shape[1], weight.dtype), some)
                except RuntimeError as error:  # e.g. out of memory
                    self.stream.recover()
                    log.warning("GEMMs of %d x %d, %d rows, are left to torch: %s", *weight.shape, rows, error)
        return best


def prompt_rows(longest: int) -> list[int]:
    """Those of PROMPT_ROWS whose choices serve some number of rows up to `longest`."""
    return [size for size in PROMPT_ROWS if size <= longest or size == measured_rows(longest)]


def measured_rows(rows: int) -> int:
    """The number of rows whose measured choice serves `rows`; 0: none does."""
    if rows < LEAST_LONG:
        return -(-rows // ROWS_STEP) * ROWS_STEP
    return next((size for size in PROMPT_ROWS if abs(rows - size) <= NEAR * size), 0)


def _allowed(lt: CublasLt, key: _Key, algorithm: bytes) -> Launch | None:
    """Launcher of a GEMM by an algorithm that was chosen for a contiguous result; None where it does not fit `key`."""
    rows_touch = key.stride == key.shape[0]
    gemm = Gemm(lt, key.rows, *key.shape, key.dtype, None if rows_touch else key.stride)
    if not gemm.allows(algorithm):
        return None
    if not rows_touch or key.alignment < ALIGNMENT:  # the library has only checked it for an aligned result
        needed = gemm.out_alignment(algorithm)
        if key.alignment % needed or key.stride * key.dtype.itemsize % needed:
            return None
    return gemm.launcher(algorithm)


def _fastest(lt: CublasLt, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> str:
    (rows, size_in), size_out = x.shape, weights[0].shape[0]
    gemm = Gemm(lt, rows, size_out, size_in, x.dtype)
    out = torch.empty(rows, size_out, dtype=x.dtype, device=x.device)
    expected = x @ weights[0].t()

    def by(algorithm: bytes) -> GraphTimer | None:
        launch = gemm.launcher(algorithm)
        try:
            launch(weights[0], x, out.fill_(float("nan")), False)  # libraries load kernels now, not under capture
        except RuntimeError:
            return None
        if not is_close(out, expected):
            return None
        return GraphTimer([partial(launch, weight, x, out, False) for weight in weights])

    tried = candidates(gemm, DeviceFacts.of(x.device).multiprocessors)
    found = [(timed, algorithm) for algorithm in tried if (timed := by(algorithm)) is not None]
    if tried and not found:
        raise RuntimeError("no candidate gave the right result")
    found = sorted(found, key=lambda pair: pair[0].first)[:4]
    torch_timed = GraphTimer([partial(torch.mm, x, weight.t(), out=out) for weight in weights])
    take_turns([torch_timed, *(timed for timed, _ in found)])
    if not found:
        return ""
    best, algorithm = min(found, key=lambda pair: pair[0].median)
    log.debug(
        "[%d, %d] x %d rows: %.1f us by torch, %.1f us by %s", size_out, size_in, rows, torch_timed.median,
        best.median, algorithm[:32].hex(),
    )  # fmt: skip
    return algorithm.hex() if best.median < WORTH * torch_timed.median else ""


def candidates(gemm: Gemm, num_sms: int) -> list[bytes]:
    """The library's suggestions, then those variants of its first one whose tiles fill the device best."""
    suggested = gemm.suggestions(SUGGESTIONS)
    if not suggested:
        return []
    sizes, rows, size_out, size_in = tile_sizes(), gemm.rows, gemm.size_out, gemm.size_in
    if rows >= LEAST_LONG:
        tiles = (tile for tile, size in sizes.items() if size in LONG_TILES)
        others = chain.from_iterable(_variants(gemm, suggested[0], tile, LONG_CLUSTERS) for tile in tiles)
        return list(dict.fromkeys([*suggested, *others]))
    known = (tile for tile in gemm.tiles(suggested[0]) if tile in sizes)
    costs = {tile: predicted_us(rows, size_out, size_in, sizes[tile], num_sms) for tile in known}
    likely = sorted((tile for tile in costs if math.isfinite(costs[tile])), key=costs.__getitem__)
    # Most tiles have no kernel with most clusters, and asking takes time: only what is measured is asked for.
    variants = (list(islice(_variants(gemm, suggested[0], tile, CLUSTERS), CLUSTERS_EACH)) for tile in likely)
    return list(dict.fromkeys([*suggested, *chain.from_iterable(islice(filter(None, variants), TILES))]))


def _variants(gemm: Gemm, algorithm: bytes, tile: int, clusters: Sequence[int]) -> Iterator[bytes]:
    """`algorithm` with this tile and each of these clusters for which there is a kernel."""
    return filter(None, (gemm.with_tile(algorithm, tile, cluster) for cluster in clusters))


def predicted_us(rows: int, size_out: int, size_in: int, tile: tuple[int, int], num_sms: int) -> float:
    """A rough time, good enough to rank tiles (outputs, rows): whole waves of blocks, or the weights' share of memory.

    The figures are an H200's: 6 TFLOP/s for each multiprocessor, 4.6 TB/s for all of them.
    """
    tile_out, tile_rows = tile
    if tile_out * tile_rows < 1024 or min(tile) > max(64, 2 * rows):
        return math.inf
    blocks = -(-size_out // tile_out) * -(-rows // tile_rows)
    waves = -(-blocks // num_sms)
    # A small tile loads more bytes per operation.
    compute = waves * 2 * tile_out * tile_rows * size_in / 6e6 * (1 + 24 / tile_out + 24 / tile_rows)
    idle = waves * num_sms / blocks if blocks >= num_sms else max(1.0, 0.8 * num_sms / blocks)
    return max(compute, size_out * size_in * 2 / 4.6e6 * idle)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0
