"""Output tensors with a leading batch dimension of 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = dict[str, "npt.NDArray[Any]"]  # by output name


def texts(values: Sequence[str]) -> npt.NDArray[np.object_]:
    """object [1, n] of UTF-8 bytes, which Triton sends as BYTES."""
    array = np.empty((1, len(values)), dtype=np.object_)
    for index, text in enumerate(values):
        array[0, index] = text.encode("utf-8")
    return array


def ints(values: Sequence[int]) -> npt.NDArray[np.int32]:
    """int32 [1, n]."""
    return np.asarray([values], dtype=np.int32)


def floats(values: Sequence[float]) -> npt.NDArray[np.float32]:
    """float32 [1, n]."""
    return np.asarray([values], dtype=np.float32)
