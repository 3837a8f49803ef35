"""Tensors of GGUF files as numbers, read like those of a safetensors file: by name, and by parts.

The package gguf turns blocks into float32. A part is read in pieces of a few MB, several at a time.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minisgl_backend.number_formats import GGUF_BLOCKS
from minisgl_backend.weights.gguf_header import TYPES_BY_NAME, NumberType
from minisgl_backend.weights.gguf_index import GGUFIndex, IndexedTensor, TiledHeads
from minisgl_backend.weights.parts import StoredRows

_NUMBERS_AT_ONCE = 1 << 20


class GGUFShard:
    """What `safetensors.safe_open` gives, of all files of an index. Tensors are float32, on the CPU."""

    def __init__(self, file: Path) -> None:
        self._index = GGUFIndex.load(file)
        self._maps = [np.memmap(path, np.uint8, "r") for path in self._index.files]
        self._tensors: dict[str, tuple[IndexedTensor, int | None]] = {}
        for tensor in self._index.tensors:
            if "{expert}" in tensor.name:
                names = {tensor.name.format(expert=expert): expert for expert in range(tensor.shape[0])}
                self._tensors.update({name: (tensor, expert) for name, expert in names.items()})
            else:
                self._tensors[tensor.name] = tensor, None

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> GGUFSlice:
        tensor, expert = self._tensors[name]
        return GGUFSlice(self._maps[tensor.file], tensor, expert)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.get_slice(name)[()]


class GGUFSlice:
    """One tensor, of which parts are read by index. `expert`: of a tensor that has all of them."""

    def __init__(self, data: np.ndarray, tensor: IndexedTensor, expert: int | None) -> None:
        """data: the file's bytes, mapped."""
        self._data, self._tensor, self._expert = data, tensor, expert
        self._type = TYPES_BY_NAME[tensor.type]
        self._shape = tensor.shape if expert is None else tensor.shape[1:]

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """By slices without a step, and integers."""
        if len(self._shape) == 1 and (order := self._order(self._shape[0])) is not None:  # few numbers
            stored = GGUFSlice(self._data, replace(self._tensor, heads=0, tiled=None), self._expert)[()]
            return stored[torch.from_numpy(order)][index]
        given = index if isinstance(index, tuple) else (index,)
        whole = (*given, *(slice(None),) * (len(self._shape) - len(given)))
        columns = whole[-1]
        # Every axis but the last one counts rows; what is asked for of them is few numbers, found as their places.
        rows = np.arange(int(np.prod(self._shape[:-1], dtype=np.int64))).reshape(self._shape[:-1])[whole[:-1]]
        blocks, places = self._blocks(), rows.reshape(-1)
        if (order := self._order(len(blocks))) is not None:
            places = order[places]
        width = len(range(*columns.indices(self._shape[-1]))) if isinstance(columns, slice) else 1
        values = np.empty((len(places), width), np.float32)
        step = max(1, _NUMBERS_AT_ONCE // self._shape[-1])
        pieces = [(places[start : start + step], values[start : start + step]) for start in range(0, len(places), step)]
        taken = columns if (order := self._column_order()) is None else order[columns]
        _all(partial(_fill, blocks, self._type, taken, self._tensor.add), pieces)
        if self._tensor.negated_exp:
            np.log(-values, out=values)
        result = values.reshape(*rows.shape, width)
        return torch.from_numpy(result if isinstance(columns, slice) else result[..., 0])

    def stored_rows(self, index: tuple[slice, ...]) -> StoredRows | None:
        """A part of a matrix as it lies in the file; None: it is in no blocks that are served so, or would cut them.

        Rows are mapped, but for those whose order is another in checkpoints."""
        rows, columns = index[0], index[-1]
        start, stop, _ = columns.indices(self._shape[-1])
        if self._type.name not in GGUF_BLOCKS or len(index) != 2 or start % self._type.size or stop % self._type.size:
            return None
        if self._column_order() is not None:
            return None
        order = self._order(self._shape[0])
        blocks = self._blocks()[rows if order is None else order[rows]]
        first, last = (at // self._type.size * self._type.nbytes for at in (start, stop))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return StoredRows(self._type.name, torch.from_numpy(blocks[:, first:last]))

    def _order(self, num_rows: int) -> np.ndarray | None:
        """For each row of a checkpoint its place in the file; None: the same."""
        if self._tensor.heads:
            return _apart(num_rows, self._tensor.heads)
        tiled = self._tensor.tiled
        return None if tiled is None or tiled.columns else _in_turns(num_rows, tiled)

    def _column_order(self) -> np.ndarray | None:
        """Likewise of columns."""
        tiled = self._tensor.tiled
        return _in_turns(self._shape[-1], tiled) if tiled is not None and tiled.columns else None

    def _blocks(self) -> np.ndarray:
        """[rows, bytes of a row], uint8, mapped."""
        num_rows = int(np.prod(self._shape[:-1], dtype=np.int64))
        row_bytes = self._shape[-1] // self._type.size * self._type.nbytes
        offset = self._tensor.offset + (self._expert or 0) * num_rows * row_bytes
        return self._data[offset : offset + num_rows * row_bytes].reshape(num_rows, row_bytes)


def _fill(blocks: np.ndarray, kind: NumberType, columns: Any, add: float, piece: tuple[np.ndarray, np.ndarray]) -> None:
    from gguf import GGMLQuantizationType, dequantize

    places, values = piece
    numbers = dequantize(np.ascontiguousarray(blocks[places]), GGMLQuantizationType[kind.name])
    np.add(numbers[:, columns].reshape(values.shape), np.float32(add), out=values)


def _apart(num_rows: int, heads: int) -> np.ndarray:
    """For each row of a checkpoint's queries or keys, its place among llama.cpp's: there the two that are rotated
    together are adjacent, in checkpoints half a head apart."""
    return np.arange(num_rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _in_turns(count: int, heads: TiledHeads) -> np.ndarray:
    """For each row, or column, of a checkpoint its place among those of `heads`."""
    places, of_values = np.arange(count), count - heads.first
    by_turn = places[:of_values].reshape(-1, heads.key_heads, heads.size) + heads.first
    places[heads.first :] = by_turn.swapaxes(0, 1).reshape(-1)
    return places


def _all(fill: Callable[[Any], None], pieces: list[Any]) -> None:
    threads = min(8, os.cpu_count() or 1, len(pieces))
    if threads <= 1:
        for piece in pieces:
            fill(piece)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(fill, pieces))  # raises what a thread raised
