"""Pooling: what a prompt's chunks are asked for, and the vector that is made of what they give."""

from __future__ import annotations

import numpy as np

from minisgl_backend.arrays import Float32Array
from minisgl_backend.request import PoolingParams
from minisgl_backend.step import Wants

_OF_LAST = {"last": Wants.LAST_STATE, "scores": Wants.SCORES, "token_logprobs": Wants.TOKEN_LOGPROBS}


def wants(pooling: PoolingParams, *, is_first: bool, is_last: bool) -> int:
    """What one chunk is asked for. What all chunks give is added up."""
    if pooling.kind == "mean":
        return Wants.STATE_SUM
    if pooling.kind == "cls":
        return Wants.FIRST_STATE if is_first else Wants.NOTHING
    return _OF_LAST[pooling.kind] if is_last else Wants.NOTHING


def finish(pooling: PoolingParams, total: Float32Array, num_tokens: int) -> Float32Array:
    """`total`: what the chunks of a prompt of so many tokens gave, [width] -> the vector, [width or fewer]."""
    vector = total / np.float32(num_tokens) if pooling.kind == "mean" else total
    vector = vector[: pooling.dimensions]
    if pooling.normalize:
        vector = vector / np.maximum(np.linalg.norm(vector), np.float32(1e-12))
    return vector
