"""Names for the types of NumPy arrays, and the empty ones: once for all rooms."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
UInt8Array = npt.NDArray[np.uint8]
Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
IdArray = Int32Array | Int64Array  # of tokens, and of what they stand for (`cache.content_ids`)
IndexArray = npt.NDArray[np.intp]  # what NumPy indexes with, without a conversion

NO_INT32: Int32Array = np.empty(0, dtype=np.int32)
NO_INT64: Int64Array = np.empty(0, dtype=np.int64)
NO_INT32.setflags(write=False)
NO_INT64.setflags(write=False)
