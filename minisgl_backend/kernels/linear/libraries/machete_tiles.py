"""Tiles of Machete, outputs x rows: the default for each GEMM, and those that are measured against it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# Contenders by the largest number of rows; the last entry also serves more rows.
CONTENDERS: Mapping[int, tuple[str, ...]] = MappingProxyType(
    {
        32: ("128x32", "256x32", "128x64"),
        64: ("128x64", "128x32", "256x64"),
        128: ("128x128", "128x64", "256x128"),
        256: ("128x128", "128x256", "256x128"),
        512: ("128x256", "128x128", "256x128"),
    }
)
TILES = tuple(dict.fromkeys(tile for tiles in CONTENDERS.values() for tile in tiles))


def kernel_of(tile: str) -> str:
    """Name of a tile in the table of choose.py."""
    return f"machete_{tile}"


def first_tile(rows: int, size_out: int, size_in: int) -> str:
    """The tile unless another was measured faster: vLLM's choice, except for 33 to 64 rows, where its 128x16 was
    slow."""
    if rows <= 32:
        return "128x32" if size_out <= 8192 and size_in <= 12288 else "256x32"
    if rows <= 64 or (rows <= 128 and size_out <= 8192 and size_in <= 4096):
        return "128x64"
    if rows <= 128:
        return "256x128" if size_out >= 12288 and size_in >= 8192 else "128x128"
    if rows <= 256:
        return "128x128" if size_out <= 8192 and size_in <= 8192 else "128x256"
    return "128x128" if size_out <= 4096 else "128x256"


def contenders(rows: int) -> tuple[str, ...]:
    """Tiles measured for this row count, a power of two."""
    return CONTENDERS[min(max(rows, min(CONTENDERS)), max(CONTENDERS))]
