"""How decode.py splits a batch of sequences over programs: a table, read from the top. Needs no Triton.

The splits were measured best on an H200 (benchmarks/kernels). Few sequences are split finely, to use every
multiprocessor; many are split only where one is much longer than the rest, since each part costs a partial result. In
between, programs share all tiles evenly if they can (no window, no FP8 cache): otherwise some programs would still run
when all others have ended. Shared memory holds the tiles in flight: of 64 tokens, a multiprocessor has room for three
programs of five stages, or for five of three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

from minisgl_backend.kernels.launch import next_power_of_2

MAX_EARLY_BATCH = 64  # above this, a kernel that starts early (`pdl`) takes room from the one still running
WIDE_HEAD = 256  # numbers: tiles of such keys take twice the room
# With more query heads per KV head, registers allow fewer programs at once, which read further ahead.
WIDE_GROUP = 2


@dataclass(frozen=True)
class DecodeShape:
    """How one batch size is split into programs."""

    num_splits: int  # most parts of a sequence
    min_part: int  # tokens; shorter sequences are not split. Shapes that only differ in it share a compiled kernel
    tile: int  # tokens per loop step
    num_warps: int
    num_stages: int  # page numbers take every second one: (num_stages - 1) // 2 tiles are in flight
    early: bool = False  # rotating kernel: read the first tile before waiting for the previous kernel
    # Programs of a KV head that run at once and share all tiles evenly; 0, or with a window: one for each part.
    workers: int = 0
    registers: int = 0  # at most per thread of these programs, so that they do run at once
    merged_at_once: int = 4  # parts in flight while they are merged, each of which takes registers

    def workers_of(self, batch: int, parts: int) -> int:
        """Workers for `batch` sequences, where the workspace has room for `parts` parts; each sequence may add one."""
        return max(0, min(self.workers, parts - batch))

    def splits_of(self, batch: int, parts: int) -> int:
        """Most parts of a sequence where each part has its own program; arguments as in `workers_of`."""
        return max(1, min(self.num_splits, parts // batch))


class DecodeKey(NamedTuple):
    """Key by which a split is chosen."""

    batch: int
    num_kv_heads: int
    group: int  # query heads of a KV head
    num_sms: int
    can_share: bool  # neither a window nor an FP8 cache

    @property
    def programs(self) -> int:
        """Number of programs if no sequence is split."""
        return self.batch * self.num_kv_heads

    @property
    def is_wide(self) -> bool:
        return self.group > WIDE_GROUP

    @property
    def splits(self) -> int:
        """Parts of each of few sequences: no more than run at once, two per multiprocessor."""
        splits = 4
        while splits < 32 and self.programs * splits * 2 <= 2 * self.num_sms:
            splits *= 2
        return splits

    @property
    def fits_at_once(self) -> bool:
        """Whether all parts run at once, so that a first tile in registers costs no occupancy."""
        return self.programs * self.splits <= 2 * self.num_sms


class SplitKV(NamedTuple):
    """A row of the table."""

    why: str
    serves: Callable[[DecodeKey], bool]
    shape: Callable[[DecodeKey], DecodeShape]


def _fills(key: DecodeKey, times: int) -> bool:
    return key.programs >= times * key.num_sms


def _fills_twice(key: DecodeKey) -> bool:
    return key.programs >= 2 * key.num_sms - key.num_sms // 8


def _shared(key: DecodeKey, each: int, tile: int, num_stages: int, registers: int) -> DecodeShape:
    """each: programs per multiprocessor."""
    workers = each * key.num_sms // key.num_kv_heads
    return DecodeShape(4, 1024, tile, num_warps=4, num_stages=num_stages, registers=registers, workers=workers)


_THREE = partial(_shared, each=3, tile=64, num_stages=3, registers=168)


def _one_sequence(key: DecodeKey) -> DecodeShape:
    early = key.fits_at_once
    merged = 16 if early else 4
    return DecodeShape(key.splits, 64, 64, num_warps=8, num_stages=3, early=early, merged_at_once=merged)


def _few(key: DecodeKey) -> DecodeShape:
    part = 128 if key.batch >= 8 else 64
    return DecodeShape(key.splits, part, 64, num_warps=4, num_stages=5, early=True, merged_at_once=8)


SPLITS = (
    SplitKV(
        "many sequences: some wait in any case",
        lambda key: _fills(key, 8),
        lambda key: DecodeShape(4, 2048, 64, num_warps=4, num_stages=5),
    ),
    SplitKV(
        "tiles are shared by four programs on a multiprocessor",
        # With few queries more programs fit and a second wave is short: sequences are then better not split.
        lambda key: _fills(key, 3) and key.can_share and (key.is_wide or _fills(key, 4)),
        lambda key: _shared(key, each=4, tile=32, num_stages=5, registers=128),
    ),
    SplitKV(
        "long sequences are cut",
        lambda key: _fills(key, 3),
        lambda key: DecodeShape(4, 1024, 64, num_warps=4, num_stages=5 if key.is_wide else 3),
    ),
    SplitKV(
        "tiles are shared by two programs on a multiprocessor",
        lambda key: _fills_twice(key) and key.can_share and key.is_wide,
        lambda key: _shared(key, each=2, tile=64, num_stages=5, registers=255),
    ),
    SplitKV(
        "tiles are shared by three programs on a multiprocessor",
        lambda key: _fills_twice(key) and key.can_share,
        _THREE,
    ),
    SplitKV(
        "long sequences are cut; many query heads",
        lambda key: _fills_twice(key) and key.group >= 8,
        lambda key: DecodeShape(4, 1024, 64, num_warps=4, num_stages=5),
    ),
    SplitKV(
        "longer sequences are cut, in short tiles",
        _fills_twice,
        lambda key: DecodeShape(4, 512, 32, num_warps=2, num_stages=4),
    ),
    SplitKV("one sequence is cut finely, with eight warps a program", lambda key: key.batch == 1, _one_sequence),
    SplitKV(
        "tiles are shared by three programs on a multiprocessor",
        lambda key: not key.fits_at_once and key.can_share and key.is_wide,
        _THREE,
    ),
    SplitKV(
        "a few sequences are cut finely",
        lambda key: not key.fits_at_once,
        lambda key: DecodeShape(key.splits, 64, 64, num_warps=4, num_stages=3),
    ),
    SplitKV("a few sequences are cut finely; their first tiles are loaded early", lambda key: True, _few),
)


def split_kv(key: DecodeKey) -> SplitKV:
    """The row of the table that serves a key."""
    return next(cut for cut in SPLITS if cut.serves(key))


@lru_cache(maxsize=4096)
def decode_shape(
    batch: int, num_kv_heads: int, group: int, num_sms: int = 132, can_share: bool = True, head_dim: int = 128
) -> DecodeShape:
    """The split of a batch; see `DecodeKey`."""
    key = DecodeKey(batch, num_kv_heads, group, num_sms, can_share)
    shape = split_kv(key).shape(key)
    return _of_wide_heads(key, shape) if head_dim >= WIDE_HEAD else shape


def _of_wide_heads(key: DecodeKey, shape: DecodeShape) -> DecodeShape:
    """Instead of a shape for heads of 128, where another was measured to be faster."""
    if shape.workers:
        return _shared(key, each=3, tile=32, num_stages=3, registers=168)
    return replace(shape, num_warps=8, num_stages=3) if shape.early else shape


def distinct_batches(
    max_batch: int, num_kv_heads: int, group: int, num_sms: int, can_share: bool, parts: int, head_dim: int = 128
) -> tuple[int, ...]:
    """Batch sizes up to max_batch, ascending: the smallest for each distinct compiled kernel.

    `parts`: of the workspace; the rest as in decode_shape.
    """
    found: dict[object, int] = {}
    for batch in range(1, max_batch + 1):
        shape = decode_shape(batch, num_kv_heads, group, num_sms, can_share, head_dim)
        workers, splits = shape.workers_of(batch, parts), shape.splits_of(batch, parts)
        if workers:
            shape = replace(shape, num_splits=0, min_part=0, workers=next_power_of_2(workers))
        else:
            shape = replace(shape, num_splits=splits, min_part=0, workers=0)
        found.setdefault((shape, rotation_pays(batch, num_kv_heads, num_sms), batch <= MAX_EARLY_BATCH), batch)
    return tuple(found.values())


def rotation_pays(batch: int, num_kv_heads: int, num_sms: int = 132) -> bool:
    """Whether rotating_decode_attention beats a kernel for the rotation and decode_attention, measured on an H200.

    With many programs the registers for the rotation cost more than the saved launch.
    """
    return batch * num_kv_heads < 3 * num_sms
