"""Pooling: what the chunks of a prompt have to return, and the vector that is computed from it."""

from __future__ import annotations

import numpy as np

from minisgl_backend.arrays import Float32Array
from minisgl_backend.request import PoolingParams
from minisgl_backend.step import Wants

_OF_LAST = {"last": Wants.LAST_STATE, "scores": Wants.SCORES, "token_logprobs": Wants.TOKEN_LOGPROBS}


def wants(pooling: PoolingParams, *, is_first: bool, is_last: bool) -> int:
    """The outputs requested of one chunk. The outputs of all chunks are summed up."""
    if pooling.kind == "mean":
        return Wants.STATE_SUM
    if pooling.kind == "cls":
        return Wants.FIRST_STATE if is_first else Wants.NOTHING
    return _OF_LAST[pooling.kind] if is_last else Wants.NOTHING


def finish(pooling: PoolingParams, total: Float32Array, num_tokens: int) -> Float32Array:
    """`total`: sum of the chunk outputs of a prompt of `num_tokens`, [width] -> the vector, [width or fewer]."""
    vector = total / np.float32(num_tokens) if pooling.kind == "mean" else total
    vector = vector[: pooling.dimensions]
    if pooling.normalize:
        vector = vector / np.maximum(np.linalg.norm(vector), np.float32(1e-12))
    return vector
