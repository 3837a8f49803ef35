"""Which kernels compute a mixture of experts: one table for all weight formats, read from the top.

It works like linear/choose.py, which also chooses the router's GEMM where no kernel here includes the router.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch

from minisgl_backend.kernels.candidate import PLAIN, Candidate, Chooser, Table, always, anywhere, on_cpu, on_gpu
from minisgl_backend.kernels.device_facts import LARGEST_SHARED, SGL_EXPERTS, DeviceFacts
from minisgl_backend.kernels.linear.choose import CPU_ACTIVATIONS, CPU_LANES
from minisgl_backend.kernels.moe.call import Experts, MixtureCall, Weight, blocks_of

MAX_FEW_TOKENS = 64  # for few_tokens.py
MAX_FEW_SCALED = 16  # likewise, of FP8: for more, GEMMs in FP8 are as fast
MAX_FEW_QUANTIZED = 32  # likewise, in blocks, by few_quantized.py: for more, planning takes what launches do
PLANNED_BLOCKS = (32, 64, 128)  # inputs that share a scale of such an expert: a step of its tiles
MAX_EXPERTS = 256  # that one program can rank
MAX_EARLY_SIZE = 8192  # numbers of a row of weights, which a program of early_router.py holds in registers
MAX_BLOCK_IN = 256  # inputs that share a scale in FP8: a tile of one_token.py has as many
MIN_WIDE_PAIRS = 48  # per expert, on average; with fewer, half a tile of grouped_tma.py would be empty
WIDE_TILE_IN = 64  # inputs per step of both its GEMMs, whose inputs are not padded
LIBRARY_BLOCK = 128  # outputs and inputs that share a scale, of fp8_library.py
FP8_WEIGHTS_ALONE = "fp8_weights_alone"  # FP8 whose activations have no format


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
    blocks: frozenset[tuple[int, int]] = frozenset()  # outputs and inputs that share a scale, of FP8 weights

    @classmethod
    def of(cls, x: torch.Tensor, experts: Experts[Weight], call: MixtureCall) -> ExpertsKey:
        """Of a call."""
        early, k = call.early, experts.experts_per_token
        return cls(
            len(x), experts.num_experts, k if call.picked is None else call.picked.ids.shape[1], experts.hidden_size,
            experts.intermediate_size, x.dtype, call.picked is None, 0 if early is None else early.o_proj.shape[1],
            experts.gate_up_bias is not None, experts.activation, x.stride(1) == 1, experts.aligned,
            experts.blocks if early is None else experts.blocks | blocks_of(early.o_proj),
        )  # fmt: skip

    @property
    def pairs(self) -> int:
        """Of tokens and experts."""
        return self.tokens * self.experts_per_token


def _early(key: ExpertsKey, facts: DeviceFacts) -> bool:
    # Logits that are not yet divided by the RMS may overflow float16.
    fits = max(key.hidden_size, key.o_proj_inputs) <= MAX_EARLY_SIZE and key.num_experts <= MAX_EXPERTS
    one = key.tokens == 1 and key.o_proj_inputs > 0
    return one and key.dtype == torch.bfloat16 and fits and _whole_blocks(key)


def _ranks(key: ExpertsKey, facts: DeviceFacts) -> bool:
    """Tiles of one_token.py and few_tokens.py were chosen for numbers of two bytes."""
    fits = key.unit_stride and key.dtype.itemsize == 2 and key.num_experts <= MAX_EXPERTS
    return key.routed and not key.o_proj_inputs and fits and _whole_blocks(key)


def _whole_blocks(key: ExpertsKey) -> bool:
    """Whether a tile's inputs are whole blocks of an FP8 weight."""
    return all(size_in & (size_in - 1) == 0 and 16 <= size_in <= MAX_BLOCK_IN for _, size_in in key.blocks)


def _one_token(key: ExpertsKey, facts: DeviceFacts) -> bool:
    return _ranks(key, facts) and key.tokens == 1


def _few_tokens(key: ExpertsKey, facts: DeviceFacts) -> bool:
    return _ranks(key, facts) and 1 < key.tokens <= MAX_FEW_TOKENS


def _few_scaled(key: ExpertsKey, facts: DeviceFacts) -> bool:
    return _few_tokens(key, facts) and key.tokens <= MAX_FEW_SCALED


def _few_quantized(key: ExpertsKey, facts: DeviceFacts) -> bool:
    fits = bool(key.blocks) and all(size_in in PLANNED_BLOCKS for _, size_in in key.blocks) and not key.bias
    return _few_tokens(key, facts) and key.tokens <= MAX_FEW_QUANTIZED and fits


def _int4_few_tokens(key: ExpertsKey, facts: DeviceFacts) -> bool:
    return _ranks(key, facts) and 0 < key.tokens <= MAX_FEW_TOKENS


def _grouped_tma(key: ExpertsKey, facts: DeviceFacts) -> bool:
    # Tiles were chosen for numbers of two bytes and for all the shared memory of an H200.
    has_room = facts.tensor_memory and facts.shared_memory >= LARGEST_SHARED and key.dtype.itemsize == 2
    whole = key.hidden_size % WIDE_TILE_IN == 0 and key.intermediate_size % WIDE_TILE_IN == 0
    many = key.pairs > MIN_WIDE_PAIRS * key.num_experts
    return many and has_room and whole and key.unit_stride and key.aligned


def _fp8_library(key: ExpertsKey, facts: DeviceFacts) -> bool:
    has = SGL_EXPERTS in facts.libraries and facts.capability == (9, 0) and key.dtype.itemsize == 2
    whole = key.hidden_size % LIBRARY_BLOCK == 0 and key.intermediate_size % LIBRARY_BLOCK == 0
    in_blocks = key.blocks == {(LIBRARY_BLOCK, LIBRARY_BLOCK)} and not key.bias
    return has and whole and in_blocks and key.unit_stride and key.pairs > MIN_WIDE_PAIRS * key.num_experts


def _for_cpu(key: ExpertsKey, facts: DeviceFacts) -> bool:
    sizes = key.hidden_size % CPU_LANES == 0 and key.intermediate_size % CPU_LANES == 0
    fits = key.dtype in (torch.bfloat16, torch.float16) and sizes and not key.o_proj_inputs
    return fits and key.activation in CPU_ACTIVATIONS and key.tokens > 0


def _few_on_cpu(key: ExpertsKey, facts: DeviceFacts) -> bool:
    few = key.tokens <= MAX_FEW_TOKENS or not facts.bfloat16_units or key.dtype != torch.bfloat16
    return few and _for_cpu(key, facts)


Serves: TypeAlias = Callable[[ExpertsKey, DeviceFacts], bool]


def _row(kernel: str, why: str, run: str, serves: Serves = always) -> Candidate[ExpertsKey]:
    """run: of this room. It takes `MixtureKernels`, x, `Experts` and a `MixtureCall`."""
    on = anywhere if kernel == "torch" else on_gpu
    return Candidate(kernel, why, serves, run=f"minisgl_backend.kernels.moe.{run}", on=on)


def _cpu(serves: Serves = _for_cpu) -> Candidate[ExpertsKey]:
    why = "pairs sorted by expert, all experts at once, weights as they lie"
    return Candidate("cpu", why, serves, run="minisgl_backend.kernels.cpu.quantized:mixture", on=on_cpu)


_FEW = "an expert's weights are read once; the router plans the tiles"
_KEEP_ACTIVATIONS = (
    _row("early_router", "one token: as in 16 bits; activations keep theirs", "early_router:mixture", _early),
    _row("one_token", "one token: as in 16 bits; activations keep theirs", "one_token:mixture", _one_token),
    _row("few_tokens", _FEW, "few_tokens:mixture", _few_scaled),
)
CANDIDATES: Table[ExpertsKey] = MappingProxyType(
    {
        PLAIN: (
            _row("early_router", "one token: the router runs in parallel with o_proj", "early_router:mixture", _early),
            _row(
                "one_token",
                "one token: bound by weights' bytes; router, norm and residual inside",
                "one_token:mixture",
                _one_token,
            ),
            _row("few_tokens", _FEW, "few_tokens:mixture", _few_tokens),
            _row(
                "grouped_tma",
                "many pairs per expert: compute-bound; tiles are loaded by TMA",
                "grouped_tma:mixture",
                _grouped_tma,
            ),
            _row("grouped", "pairs sorted by expert, two grouped GEMMs", "grouped:mixture"),
            _cpu(_few_on_cpu),
            _row("torch", "torch's grouped GEMM, or one expert after the other", "reference:mixture"),
        ),
        "fp8": (
            _row("few_quantized", "blocks: the router plans GEMMs in FP8", "few_quantized:mixture", _few_quantized),
            *_KEEP_ACTIVATIONS,
            _row("sgl_grouped", "many pairs per expert: sgl-kernel's CUTLASS", "fp8_library:mixture", _fp8_library),
            _row("grouped", "tokens are quantized, pairs sorted by expert, two grouped GEMMs in FP8", "fp8:mixture"),
            _cpu(),
            _row("torch", "one expert after the other, in float32", "reference:mixture_fp8"),
        ),
        FP8_WEIGHTS_ALONE: (
            *_KEEP_ACTIVATIONS,
            _row("torch", "weights become plain numbers in every call", "reference:mixture_fp8"),
        ),
        "int8": (
            _row(
                "grouped",
                "torch quantizes tokens, pairs sorted by expert, two grouped GEMMs in INT8",
                "fp8:mixture_int8",
            ),
            _cpu(),
            _row("torch", "one expert after the other, of integers", "reference:mixture_int8"),
        ),
        "int4": (
            _row("few_tokens", _FEW, "int4:mixture_of_few", _int4_few_tokens),
            _row("grouped", "pairs sorted by expert; weights become operands in registers", "int4:mixture"),
            _cpu(),
            _row("torch", "one expert after the other, dequantized", "reference:mixture_int4"),
        ),
        "gguf": (
            Candidate(
                "cpu_blocks",
                "pairs sorted by expert, all experts at once, blocks as they lie in the file",
                lambda key, facts: key.activation in CPU_ACTIVATIONS and key.tokens > 0,
                run="minisgl_backend.kernels.cpu.blocks:mixture",
                on=on_cpu,
            ),
            _row("torch", "one picked expert after the other, dequantized", "reference:mixture_blocks"),
        ),
        "mxfp4": (
            _row(
                "one_token",
                "one token: without matrix units; router, norm and residual inside",
                "mxfp4.one_token:mixture",
                _one_token,
            ),
            _row("few_tokens", _FEW, "mxfp4.grouped:mixture_of_few", _few_tokens),
            _row("grouped", "pairs sorted by expert; weights become bfloat16 in registers", "mxfp4.grouped:mixture"),
            _cpu(),
            _row("torch", "one picked expert after the other, dequantized", "reference:mixture_mxfp4"),
        ),
    }
)


def experts_chooser(weight_format: str, facts: DeviceFacts) -> Chooser[ExpertsKey]:
    """The choices for experts of one weight format on one device."""
    return Chooser(CANDIDATES, weight_format, facts)
