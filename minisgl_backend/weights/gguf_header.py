"""What a GGUF file says before its tensors: metadata and where each tensor lies. Needs neither torch nor gguf.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl_backend.errors import ConfigError
from minisgl_backend.weights.gguf_index import parts_of

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class NumberType:
    """How a tensor's numbers are stored: blocks of `size` numbers in `nbytes` bytes."""

    name: str
    size: int
    nbytes: int

    def bytes_of(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) // self.size * self.nbytes


NUMBER_TYPES: Mapping[int, NumberType] = {  # those that the package gguf turns into numbers, by their id in files
    0: NumberType("F32", 1, 4),
    1: NumberType("F16", 1, 2),
    2: NumberType("Q4_0", 32, 18),
    3: NumberType("Q4_1", 32, 20),
    6: NumberType("Q5_0", 32, 22),
    7: NumberType("Q5_1", 32, 24),
    8: NumberType("Q8_0", 32, 34),
    10: NumberType("Q2_K", 256, 84),
    11: NumberType("Q3_K", 256, 110),
    12: NumberType("Q4_K", 256, 144),
    13: NumberType("Q5_K", 256, 176),
    14: NumberType("Q6_K", 256, 210),
    16: NumberType("IQ2_XXS", 256, 66),
    17: NumberType("IQ2_XS", 256, 74),
    18: NumberType("IQ3_XXS", 256, 98),
    19: NumberType("IQ1_S", 256, 50),
    20: NumberType("IQ4_NL", 32, 18),
    21: NumberType("IQ3_S", 256, 110),
    22: NumberType("IQ2_S", 256, 82),
    23: NumberType("IQ4_XS", 256, 136),
    29: NumberType("IQ1_M", 256, 56),
    30: NumberType("BF16", 1, 2),
    34: NumberType("TQ1_0", 256, 54),
    35: NumberType("TQ2_0", 256, 66),
    39: NumberType("MXFP4", 32, 17),
}
TYPES_BY_NAME = {kind.name: kind for kind in NUMBER_TYPES.values()}
_OTHER_TYPES: Mapping[int, str] = {  # that llama.cpp has or had
    **{4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"},
    **{40: "NVFP4", 41: "Q1_0", 42: "Q2_0"},
}
_JOINED = "parts joined by cat are no model: keep them apart, or join them by llama-gguf-split --merge"


@dataclass(frozen=True, kw_only=True)
class GGUFTensor:
    """Where one tensor lies."""

    file: Path
    type: NumberType
    shape: tuple[int, ...]  # as in torch: rows first
    offset: int  # bytes from the file's start

    @property
    def nbytes(self) -> int:
        return self.type.bytes_of(self.shape)


@dataclass(frozen=True, kw_only=True)
class GGUFHeader:
    """Of one model, which may be split over files."""

    files: tuple[Path, ...]
    metadata: Mapping[str, Any]  # of the first file; lists of strings as they are
    tensors: Mapping[str, GGUFTensor]

    @classmethod
    def read(cls, path: Path) -> GGUFHeader:
        """`path`: of a file, or of any part of one that is split.

        Raises ConfigError for files that are missing, damaged or cut off, and for number types that are not read.
        """
        files = parts_of(path)
        headers = [_read(file) for file in files]
        tensors: dict[str, GGUFTensor] = {}
        for _, part in headers:
            for name, tensor in part.items():
                if name in tensors:
                    raise ConfigError(f"{path}: {name} is in two files: {tensors[name].file.name}, {tensor.file.name}")
                tensors[name] = tensor
        metadata = headers[0][0]
        count = metadata.get("split.count", len(files))
        if count not in (0, len(files)):
            raise ConfigError(
                f"{path}: split.count is {count}, so that the model is that many files; allowed: names that end in "
                f"-00001-of-{count:05}.gguf; {_JOINED}"
            )
        expected = metadata.get("split.tensors.count", len(tensors)) if count else len(tensors)
        if expected != len(tensors):
            raise ConfigError(f"{path}: split.tensors.count is {expected}, but its files have {len(tensors)} tensors")
        return cls(files=files, metadata=metadata, tensors=tensors)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data).header(path)
    except (OSError, ValueError, struct.error, OverflowError, MemoryError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{path} cannot be read as a GGUF file: {reason}") from None


class _Cursor:
    """Reads one value after the other. Raises ValueError and struct.error for what no GGUF file has."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def header(self, path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if self._take(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._scalar("I")
        if version not in (2, 3):
            big = ", as of a big-endian file" if version in (2 << 24, 3 << 24) else ""
            raise ValueError(f"its version is {version}{big}; allowed: 2, 3")
        num_tensors, num_values = self._scalar("Q"), self._scalar("Q")
        metadata = {}
        for _ in range(num_values):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        entries = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment}; allowed: 1 or more")
        start = -(-self._at // alignment) * alignment
        tensors = {}
        for name, shape, number, offset in entries:
            if number not in NUMBER_TYPES:
                served = ", ".join(known.name for known in NUMBER_TYPES.values())
                told = _OTHER_TYPES.get(number, f"{number}, which is not known")
                raise ConfigError(f"{path}: {name} has the quantization type {told}; allowed: {served}")
            kind = NUMBER_TYPES[number]
            if not shape or min(shape) < 1 or shape[-1] % kind.size:
                raise ValueError(f"{name!r:.100} has shape {shape}, in blocks of {kind.size}")
            tensors[name] = GGUFTensor(file=path, type=kind, shape=shape, offset=start + offset)
        end = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=0)
        if end > len(self._data):
            raise ValueError(f"it has {len(self._data)} bytes of {end}, so that its end is missing")
        end = max(end, self._at)
        if self._data.find(b"GGUF", end, end + alignment + 4) >= 0:
            raise ValueError(f"behind its {end} bytes another one begins; {_JOINED}")
        return metadata, tensors

    def _take(self, count: int) -> bytes:
        found = self._data[self._at : self._at + count]
        if len(found) != count:
            raise ValueError("its header is damaged or cut off")
        self._at += count
        return found

    def _scalar(self, code: str) -> Any:
        size = struct.calcsize(f"<{code}")
        return struct.unpack(f"<{code}", self._take(size))[0]

    def _string(self) -> str:
        return self._take(self._scalar("Q")).decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"its header has a value of type {kind}; allowed: 0 to 12")
        inner, count = self._scalar("I"), self._scalar("Q")
        if inner in _SCALARS:
            code = _SCALARS[inner]
            data = self._take(count * struct.calcsize(f"<{code}"))
            return list(struct.unpack(f"<{count}{code}", data))
        return [self._value(inner) for _ in range(count)]

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self._string(), self._scalar("I")
        if num_dims > 4:
            raise ValueError(f"{name!r:.100} has {num_dims} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(num_dims))
        return name, shape[::-1], self._scalar("I"), self._scalar("Q")
