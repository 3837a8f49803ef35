"""A slow and obvious sampler: one row at a time, Python integers and float64."""

from __future__ import annotations

import math

import numpy as np

from minisgl_backend.request import SamplingParams

WORD = 2**32


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D % WORD
    x ^= x >> 15
    x = x * 0x846CA68B % WORD
    return x ^ x >> 16


def gumbel(seed: int, position: int, token: int) -> float:
    a = mix(seed % WORD ^ mix((position * 0x9E3779B9 + 1) % WORD))
    key0 = mix(a ^ seed // WORD)
    key1 = mix((key0 + 0x9E3779B9) % WORD)
    h = token * 0x9E3779B9 % WORD ^ key0
    h ^= h >> 16
    h = h * 0x7FEB352D % WORD ^ key1
    h ^= h >> 15
    h = h * 0x846CA68B % WORD
    h ^= h >> 16
    uniform = min((np.float64(np.float32(h % 2**31)) + 0.5) * 2.0**-31, 1 - 2.0**-24)
    return -math.log(-math.log1p(-uniform))


def edited(
    logits: np.ndarray, params: SamplingParams, tokens: list[int], prompt_len: int, eos: tuple[int, ...]
) -> np.ndarray:
    """Logits [vocab_size] after penalties, bias, bad words and min_tokens, for the token after `tokens`."""
    x = logits.astype(np.float64)
    answer = tokens[prompt_len:]
    for token in set(tokens):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(answer):
        x[token] -= params.frequency_penalty * answer.count(token) + params.presence_penalty
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for word in params.bad_words_token_ids:
        *before, last = word
        if len(before) <= len(tokens) and tokens[len(tokens) - len(before) :] == before:
            x[last] = -math.inf
    if len(answer) < params.min_tokens:
        for token in (*eos, *params.stop_token_ids):
            x[token] = -math.inf
    return x


def kept(x: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Scaled logits with everything outside min-p, top-k and top-p forbidden."""
    x = x / params.temperature
    x[x < x.max() + (math.log(params.min_p) if params.min_p else -math.inf)] = -math.inf
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if params.top_k:
        x[order[params.top_k :]] = -math.inf
    probabilities = np.exp(x - x.max())
    probabilities /= probabilities.sum()
    mass = 0.0
    for rank, token in enumerate(order):
        if rank and params.top_p < 1 and mass >= params.top_p:
            x[token] = -math.inf
        mass += probabilities[token]
    return x


def sample(
    logits: np.ndarray, params: SamplingParams, tokens: list[int], prompt_len: int, eos: tuple[int, ...] = ()
) -> int:
    x = edited(logits, params, tokens, prompt_len, eos)
    if params.temperature == 0 or params.top_k == 1:
        return int(x.argmax())
    assert params.seed is not None
    x = kept(x, params)
    return int(np.argmax([value + gumbel(params.seed, len(tokens), token) for token, value in enumerate(x)]))
