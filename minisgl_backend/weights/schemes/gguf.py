"""Whether weights of a GGUF file are multiplied in its blocks, as they lie there. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from minisgl_backend.number_formats import GGUF_BLOCKS
from minisgl_backend.weights.formats import QuantizationConfig, SchemeRule, WeightScheme
from minisgl_backend.weights.gguf_index import INDEX, GGUFIndex

FORMAT = "gguf"
AS_THEY_LIE: Mapping[str, float] = MappingProxyType(dict.fromkeys(GGUF_BLOCKS, 1.0))


@dataclass(frozen=True)
class BlockScheme:
    """The types of a file's matrices: of blocks that are served as they lie, and others, which become 16 bits."""

    kept: tuple[str, ...]
    others: tuple[str, ...] = ()
    sizes: tuple[float, ...] = ()  # of those that are kept: their memory over that in the file

    def __str__(self) -> str:
        rest = f"; bfloat16, as {', '.join(self.others)} become" if self.others else ""
        return f"GGUF's blocks as they lie in the file ({', '.join(self.kept)}){rest}"


def with_blocks(
    formats: QuantizationConfig, folder: Path, served: Mapping[str, float] = AS_THEY_LIE
) -> QuantizationConfig:
    """`formats`, which the folder and options say, on a device that multiplies blocks of the types `served`, which take
    there so many times their memory in the file."""
    if not served or formats.rules or not (folder / INDEX).is_file():
        return formats
    types = {
        tensor.type
        for tensor in GGUFIndex.load(folder / INDEX).tensors
        if len(tensor.shape) > 1 and tensor.type not in ("F32", "F16", "BF16")
    }
    kept = tuple(sorted(types.intersection(served)))
    if not kept:
        return formats
    others = tuple(sorted(types.difference(kept)))
    return replace(
        formats,
        rules=(SchemeRule(WeightScheme(FORMAT, BlockScheme(kept, others, tuple(served[name] for name in kept)))),),
    )
