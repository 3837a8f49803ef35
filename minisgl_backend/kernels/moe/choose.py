"""Which kernels compute a mixture of experts: one table for all weight formats, read from the top.

It works like linear/choose.py, which also chooses the router's GEMM where no kernel here includes the router.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

import torch

from minisgl_backend.kernels.candidate import PLAIN, Candidate, Chooser, Table
from minisgl_backend.kernels.device_facts import LARGEST_SHARED, DeviceFacts

MAX_FEW_TOKENS = 64  # for few_tokens.py
MAX_EXPERTS = 256  # that one program can rank
MAX_EARLY_SIZE = 8192  # numbers of a row of weights, which a program of early_router.py holds in registers
MIN_WIDE_PAIRS = 48  # per expert, on average; with fewer, half a tile of grouped_tma.py would be empty
WIDE_TILE_IN = 64  # inputs per step of both its GEMMs, whose inputs are not padded


class ExpertsKey(NamedTuple):
    """Key by which the kernels of a layer's experts are chosen: x [tokens, hidden_size], gate_up [num_experts, 2 *
    intermediate_size, hidden_size]."""

    tokens: int
    num_experts: int
    experts_per_token: int
    hidden_size: int
    intermediate_size: int  # of one expert, of one rank
    dtype: torch.dtype  # of x
    routed: bool = False  # including the router, norm and residual
    o_proj_inputs: int = 0  # inputs of the o_proj, where it is included, too; 0: it is not
    bias: bool = False
    activation: str = "silu"  # layers.config.Activation
    unit_stride: bool = True  # the rows of x are contiguous
    aligned: bool = True  # weights are aligned to 16 bytes

    @property
    def pairs(self) -> int:
        """Of tokens and experts."""
        return self.tokens * self.experts_per_token


def _on_gpu(key: ExpertsKey, facts: DeviceFacts) -> bool:
    return facts.kind == "cuda" and facts.own_kernels


def _early_router(key: ExpertsKey, facts: DeviceFacts) -> bool:
    # Logits that are not yet divided by the RMS may overflow float16.
    fits = max(key.hidden_size, key.o_proj_inputs) <= MAX_EARLY_SIZE and key.num_experts <= MAX_EXPERTS
    one = key.tokens == 1 and key.o_proj_inputs > 0
    return _on_gpu(key, facts) and one and key.dtype == torch.bfloat16 and fits


def _ranks(key: ExpertsKey, facts: DeviceFacts) -> bool:
    """Tiles of one_token.py and few_tokens.py were chosen for numbers of two bytes."""
    fits = key.unit_stride and key.dtype.itemsize == 2 and key.num_experts <= MAX_EXPERTS
    return _on_gpu(key, facts) and key.routed and not key.o_proj_inputs and fits


def _one_token(key: ExpertsKey, facts: DeviceFacts) -> bool:
    return _ranks(key, facts) and key.tokens == 1


def _few_tokens(key: ExpertsKey, facts: DeviceFacts) -> bool:
    return _ranks(key, facts) and 1 < key.tokens <= MAX_FEW_TOKENS


def _int4_few_tokens(key: ExpertsKey, facts: DeviceFacts) -> bool:
    return _ranks(key, facts) and 0 < key.tokens <= MAX_FEW_TOKENS


def _grouped_tma(key: ExpertsKey, facts: DeviceFacts) -> bool:
    # Tiles were chosen for numbers of two bytes and for all the shared memory of an H200.
    has_room = facts.tensor_memory and facts.shared_memory >= LARGEST_SHARED and key.dtype.itemsize == 2
    whole = key.hidden_size % WIDE_TILE_IN == 0 and key.intermediate_size % WIDE_TILE_IN == 0
    many = key.pairs > MIN_WIDE_PAIRS * key.num_experts
    return _on_gpu(key, facts) and many and has_room and whole and key.unit_stride and key.aligned


def _always(key: ExpertsKey, facts: DeviceFacts) -> bool:
    return True


_Row = Candidate[ExpertsKey]
CANDIDATES: Table[ExpertsKey] = MappingProxyType(
    {
        PLAIN: (
            _Row("early_router", "one token: the router runs in parallel with o_proj", _early_router),
            _Row("one_token", "one token: bound by weights' bytes; router, norm and residual inside", _one_token),
            _Row("few_tokens", "an expert's weights are read once; the router plans the tiles", _few_tokens),
            _Row("grouped_tma", "many pairs per expert: compute-bound; tiles are loaded by TMA", _grouped_tma),
            _Row("grouped", "pairs sorted by expert, two grouped GEMMs", _on_gpu),
            _Row("torch", "torch's grouped GEMM, or one expert after the other", _always),
        ),
        "fp8": (
            _Row("grouped", "tokens are quantized, pairs sorted by expert, two grouped GEMMs in FP8", _on_gpu),
            _Row("torch", "one expert after the other, in float32", _always),
        ),
        "int8": (
            _Row("grouped", "torch quantizes tokens, pairs sorted by expert, two grouped GEMMs in INT8", _on_gpu),
            _Row("torch", "one expert after the other, of integers", _always),
        ),
        "int4": (
            _Row("few_tokens", "an expert's weights are read once; the router plans the tiles", _int4_few_tokens),
            _Row("grouped", "pairs sorted by expert; weights become operands in registers", _on_gpu),
            _Row("torch", "one expert after the other, dequantized", _always),
        ),
        "mxfp4": (
            _Row("one_token", "one token: without matrix units; router, norm and residual inside", _one_token),
            _Row("few_tokens", "an expert's weights are read once; the router plans the tiles", _few_tokens),
            _Row("grouped", "pairs sorted by expert; weights become bfloat16 in registers", _on_gpu),
            _Row("torch", "one picked expert after the other, dequantized", _always),
        ),
    }
)


def experts_chooser(weight_format: str, facts: DeviceFacts) -> Chooser[ExpertsKey]:
    """The choices for experts of one weight format on one device."""
    return Chooser(CANDIDATES, weight_format, facts)
