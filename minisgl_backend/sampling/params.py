"""A request's sampling options as one row of the parameter table; `kernels.sampling.layout` names its columns."""

from __future__ import annotations

import struct

import numpy as np

from minisgl_backend.arrays import Int32Array
from minisgl_backend.kernels.sampling import layout
from minisgl_backend.request import SamplingParams

SMALLEST_TEMPERATURE = 1e-5  # below it, a distribution is greedy in float32 anyway


def is_greedy(params: SamplingParams) -> bool:
    """True where the most likely token is always taken."""
    return params.greedy or params.temperature < SMALLEST_TEMPERATURE


def flags_of(params: SamplingParams, vocab_size: int) -> int:
    """The FLAGS column: which parts of the sampler the row needs."""
    flags = 0
    if not is_greedy(params):
        flags |= layout.RANDOM
        flags |= layout.USES_MIN_P if params.min_p > 0 else 0
        flags |= layout.RANKED if 0 < params.top_k < vocab_size or np.float32(params.top_p) < 1 else 0
    flags |= layout.PENALTIES if params.has_penalties else 0
    flags |= layout.RULES if params.logit_bias or params.bad_words_token_ids or params.min_tokens else 0
    flags |= layout.GRAMMAR if params.is_guided else 0
    flags |= layout.LOGPROBS if params.logprobs is not None else 0
    flags |= layout.PROMPT_LOGPROBS if params.prompt_logprobs is not None else 0
    return flags


def encode_params(params: SamplingParams, vocab_size: int) -> Int32Array:
    """One row of the table, int32 [NUM_PARAMS]. Greedy is temperature 0 with every truncation off."""
    seed = params.seed or 0
    temperature, top_k, top_p, min_p = 0.0, 0, 1.0, 0.0
    if not is_greedy(params):
        temperature, top_p, min_p = params.temperature, params.top_p, params.min_p
        top_k = params.top_k if params.top_k < vocab_size else 0
    row = struct.pack(
        "=fifffffIIi",
        temperature,
        top_k,
        top_p,
        min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        seed & 0xFFFFFFFF,
        seed >> 32,
        flags_of(params, vocab_size),
    )
    return np.frombuffer(row, dtype=np.int32)
