"""Which kernels multiply by weights with 4 bits, or in GGUF's blocks: conditions of rows of `linear/choose.py`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.linear.call import LinearKey, representative_rows
from minisgl_backend.kernels.linear.libraries import machete_tiles

INT4_FEW_ROWS = 64  # up to this, 4-bit weights are dequantized in registers; above it, once in memory
INT4_GATED_ROWS = 256  # likewise for gated weights, which are the largest
# Of int4/many_rows.py, on Hopper: from so many rows on, up to so many, and, of a large weight, of so many numbers.
INT4_MANY_ROWS, INT4_MANY_LARGE_ROWS, INT4_LARGE = range(9, 129), range(1, 257), 64 << 20
# Kernels of vLLM with their own weight layout, the faster one first: least and greatest capability of each.
LAYOUTS: Mapping[str, tuple[tuple[int, int], tuple[int, int]]] = MappingProxyType(
    {"machete": ((9, 0), (9, 0)), "marlin": ((8, 0), (99, 9))}
)
MARLIN_ROWS = range(17, 257)  # row counts for which it was faster on an H100; at 512 dequantizing is
MARLIN_CLOSE_ROWS = 128  # above this, dequantizing may be as fast
# On an H100 it was faster from 17 rows up to all that were tried, 512, where dequantizing took 1.5 of its time and
# cuBLAS with 16-bit weights 0.9. So the two should break even near 3,000.
MACHETE_ROWS = range(17, 2049)
MACHETE_CLOSE_ROWS = range(257, 4097)


def blocks_few(key: LinearKey, facts: DeviceFacts) -> bool:
    return key.rows <= INT4_FEW_ROWS or (facts.capability == (9, 0) and key.rows in many_rows(key))


def many_rows(key: LinearKey) -> range:
    return INT4_MANY_LARGE_ROWS if key.weights >= INT4_LARGE else INT4_MANY_ROWS


def int4_many(key: LinearKey, facts: DeviceFacts) -> bool:
    # Tiles were chosen for numbers of two bytes and for Hopper's shared memory.
    return facts.capability == (9, 0) and key.dtype.itemsize == 2 and key.rows in many_rows(key)


def int4_few(key: LinearKey, facts: DeviceFacts) -> bool:
    return 0 < key.rows <= (INT4_GATED_ROWS if key.activation else INT4_FEW_ROWS)


def int4_gated(key: LinearKey, facts: DeviceFacts) -> bool:
    # Not where a library is faster anyway: our kernel would be compiled for this many rows just to be measured.
    no_library = "vllm" not in facts.libraries or key.repacked is None
    return bool(key.activation) and INT4_FEW_ROWS < key.rows <= INT4_GATED_ROWS and no_library


def marlin(key: LinearKey, facts: DeviceFacts) -> bool:
    return key.rows in MARLIN_ROWS and has_second(key, facts, "marlin")


def marlin_many(key: LinearKey, facts: DeviceFacts) -> bool:
    return marlin(key, facts) and key.rows > MARLIN_CLOSE_ROWS


def marlin_close(key: LinearKey, facts: DeviceFacts) -> bool:
    return marlin_many(key, facts) or (marlin(key, facts) and int4_many(key, facts))


def int4_many_close(key: LinearKey, facts: DeviceFacts) -> bool:
    machete = key.rows in MACHETE_ROWS and has_second(key, facts, "machete")
    return int4_many(key, facts) and (machete or marlin(key, facts))


def int4_dequantized_close(key: LinearKey, facts: DeviceFacts) -> bool:
    machete = key.rows in MACHETE_CLOSE_ROWS and has_second(key, facts, "machete")
    return int4_gated(key, facts) or marlin_many(key, facts) or machete


def layouts_on(facts: DeviceFacts) -> tuple[str, ...]:
    """Those of LAYOUTS whose kernels run on this device and may be installed, the faster one first."""
    if "vllm" not in facts.libraries or facts.capability is None:
        return ()
    return tuple(name for name, (least, most) in LAYOUTS.items() if least <= facts.capability <= most)


def has_second(key: LinearKey, facts: DeviceFacts, layout: str) -> bool:
    return key.repacked == layout and "vllm" in facts.libraries


def machete(key: LinearKey, facts: DeviceFacts, tile: str) -> bool:
    serves = has_second(key, facts, "machete") and key.rows in MACHETE_ROWS
    return serves and machete_tiles.first_tile(key.rows, key.size_out, key.size_in) == tile


def machete_rival(key: LinearKey, facts: DeviceFacts, tile: str) -> bool:
    if not has_second(key, facts, "machete"):
        return False
    contends = key.rows in MACHETE_ROWS or key.rows in MACHETE_CLOSE_ROWS
    return contends and tile in machete_tiles.contenders(representative_rows(key.rows))
