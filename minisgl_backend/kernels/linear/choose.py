"""Which kernel computes a GEMM: one table for all weight formats, read from the top.

A weight's kernels look up each new `LinearKey` in it, and `minisgl kernels` prints it; this needs neither Triton nor a
GPU. A new kernel is a file and a row here. Thresholds were measured on an H200 with
benchmarks/kernels, norm and activation kernels included.

Which rows are `close`, so that they are measured against each other at start (measured.py), and which are not:

- plain weights: none. Up to 64 rows, thresholds were chosen inside chains of a whole layer's kernels with PDL, where
  the resources that a kernel leaves free for the next one count as well; timed in isolation, others would win.
  For the row `cublaslt`, algorithms are measured and not kernels (tuned.py).
- FP8 and 4 bits, few rows: none, for the same reason, and since they read a half or a quarter of the other kernels'
  bytes.
- FP8 with 33 rows or more, 4-bit gated weights with 65 to 256 before Hopper, other weights with Marlin and 129 to 256,
  4 bits with Machete or Marlin beside `int4_many_rows`, INT8: the kernels of libraries and ours that the device has.
  Where ours lost by far on Hopper (`fp8_many_rows`), it is not measured: each shape would have to be compiled first.
- 4 bits, Machete: its tiles, since the one that its library takes was slower by half for some shapes; from 257 rows on
  also dequantizing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MappingProxyType

import torch

from minisgl_backend.kernels.candidate import (
    PLAIN,
    Candidate,
    Chooser,
    Table,
    always,
    anywhere,
    not_on_cpu,
    not_on_gpu,
    on_cpu,
    on_gpu,
)
from minisgl_backend.kernels.device_facts import LARGEST_SHARED, TORCH_BLOCKS, DeviceFacts
from minisgl_backend.kernels.linear.call import LinearKey, representative_rows
from minisgl_backend.kernels.linear.int4.served import (
    blocks_few,
    int4_dequantized_close,
    int4_few,
    int4_gated,
    int4_many,
    int4_many_close,
    machete,
    machete_rival,
    marlin,
    marlin_close,
)
from minisgl_backend.kernels.linear.libraries import machete_tiles
from minisgl_backend.kernels.linear.libraries.machete_tiles import TILES
from minisgl_backend.kernels.linear.plain.tiling import MAX_ROWS, MAX_SLICED_ROWS, MAX_VECTOR_ROWS, is_sliced

LARGE_GATED = 120 << 20  # size of a gated weight from which on our kernel, fused with the activation only, is faster
LARGE_GATED_FEW = 96 << 20  # likewise with up to 8 rows (24576 x 4096: 57.6 -> 51.3 us with the activation)
LARGE_LONG = 12 << 20  # likewise for a weight with at least as many inputs as outputs
LARGEST_OUT = 65536  # of weights of GEMMs with a few rows; a vocabulary has more
LEAST_VOCABULARY_IN = 2048  # inputs of the vocabulary GEMM, one row, from which on ours was measured to be faster
LEAST_TUNED_BYTES = 16 << 20  # of one weight: this GEMM takes 8 us on an H200, of which tiles decide 0.3
FP8_ROW_INPUTS = 4096  # of any weight, up to which its kernel for one row was faster
FP8_ROW_BLOCKS = (16, 32, 64, 128, 256)  # inputs that share a scale of a weight for one row: tiles are whole blocks
FP8_FEW_ROWS = 64  # up to this, a GEMM is bound by reading FP8 weights
FP8_CLOSE_ROWS = 32  # above this, the kernels of libraries may be as fast as ours
FP8_ROWWISE = (9, 0)  # least capability for which torch has an FP8 GEMM with a scale for each row
FP8_BLOCK = (128, 128)  # outputs and inputs of a block in torch's block-scaled GEMM on Hopper
FP8_ALIGNMENT = 16  # sizes of torch's `_scaled_mm` are multiples of it
INT8_ALIGNMENT = 8  # weight sizes of cuBLAS' integer GEMM are multiples of it
SGL_ALIGNMENT = 16  # likewise for sgl-kernel's 8-bit GEMMs
# Least and greatest capability for which sgl-kernel has them.
SGL_FP8, SGL_FP8_BLOCKS, SGL_INT8 = ((8, 9), (12, 9)), ((9, 0), (9, 0)), ((8, 0), (9, 0))
_TORCH = "everything else: cuBLAS or oneDNN"
CPU_ROWS = 64  # largest for kernels.cpp with AVX-512 BF16: with more, torch's oneDNN is as fast, and faster with AMX
CPU_ACTIVATIONS = (None, "silu", "gelu_tanh", "swiglu_oai")  # that its epilogues have
CPU_LANES = 32  # numbers of a register: the reduced dimension is a multiple of it


def _fits_small_rows(key: LinearKey, facts: DeviceFacts) -> bool:
    """Whether small_rows.py supports a key at all: its tiles were chosen for numbers of two bytes, and it does not add
    a bias of gated weights."""
    return key.rows <= MAX_ROWS and key.unit_stride and key.dtype.itemsize == 2 and not (key.activation and key.bias)


def _few_rows(key: LinearKey, facts: DeviceFacts) -> bool:
    return _fits_small_rows(key, facts) and key.size_out <= LARGEST_OUT


def _vocabulary(key: LinearKey, facts: DeviceFacts) -> bool:
    # Not tried with `into`: the kernel's programs write two numbers each, possibly to another GPU's memory.
    measured = key.rows == 1 and key.size_in >= LEAST_VOCABULARY_IN and not key.into
    plain = not (key.activation or key.norm or key.residual)
    return _fits_small_rows(key, facts) and key.size_out > LARGEST_OUT and measured and plain


def _vector(key: LinearKey, facts: DeviceFacts) -> bool:
    return _few_rows(key, facts) and key.rows <= MAX_VECTOR_ROWS


def _residual(key: LinearKey, facts: DeviceFacts) -> bool:
    return _few_rows(key, facts) and key.residual and (key.size_out <= 2048 or key.rows <= 16)


def _gated_sliced(key: LinearKey, facts: DeviceFacts) -> bool:
    return _few_rows(key, facts) and bool(key.activation) and not key.residual and is_sliced(key.rows, key.size_in)


def _gated_large(key: LinearKey, facts: DeviceFacts) -> bool:
    least = LARGE_GATED_FEW if key.rows <= 8 else LARGE_GATED
    if not (_few_rows(key, facts) and key.activation) or key.residual or key.norm or key.weights < least:
        return False
    # With many rows, tiles of 128 outputs, one per multiprocessor.
    num_sms = facts.multiprocessors
    return key.rows <= 32 or 3 * num_sms // 4 <= key.size_out // 256 <= num_sms


def _small_weight(key: LinearKey, facts: DeviceFacts) -> bool:
    sliced = key.rows <= MAX_SLICED_ROWS and key.size_in <= 2048
    bare = not (key.activation or key.residual)
    return _few_rows(key, facts) and bare and key.rows <= 16 and key.weights <= (12 if sliced else 8) << 20


def _long(key: LinearKey, facts: DeviceFacts) -> bool:
    serves = _fits_small_rows(key, facts) and key.is_bare and not key.into
    has_room = facts.dependent_launch and facts.shared_memory >= LARGEST_SHARED
    return serves and has_room and key.rows <= 16 and key.size_out <= key.size_in and key.weights >= LARGE_LONG


def is_tunable(size_out: int, size_in: int, dtype: torch.dtype) -> bool:
    """Whether linear/plain/tuned.py measures algorithms of cuBLASLt for weights of this size."""
    large = size_out * size_in * dtype.itemsize >= LEAST_TUNED_BYTES
    return large and dtype in (torch.float16, torch.bfloat16) and size_out % 8 == 0 and size_in % 8 == 0


def _tuned(key: LinearKey, facts: DeviceFacts) -> bool:
    return not key.bias and is_tunable(key.size_out, key.size_in, key.dtype)


def _fp8_row(key: LinearKey, facts: DeviceFacts) -> bool:
    # Of wide weights with many inputs (7168 x 5120) the quantizing kernel and the tensor cores were as fast.
    faster = key.size_in <= FP8_ROW_INPUTS or key.size_out <= key.size_in
    in_tiles = key.block is None or key.block[1] in FP8_ROW_BLOCKS
    return key.rows == 1 and key.dtype.itemsize == 2 and faster and in_tiles


def _fp8_few(key: LinearKey, facts: DeviceFacts) -> bool:
    return key.rows <= FP8_FEW_ROWS


def _fp8_few_close(key: LinearKey, facts: DeviceFacts) -> bool:
    return key.rows > FP8_CLOSE_ROWS and (_fp8_rowwise(key, facts) or _fp8_blocks(key, facts))


def _fp8_rowwise(key: LinearKey, facts: DeviceFacts) -> bool:
    serves = facts.capability is not None and facts.capability >= FP8_ROWWISE and key.dtype == torch.bfloat16
    return serves and key.is_aligned(FP8_ALIGNMENT) and key.block is None


def _fp8_cublaslt(key: LinearKey, facts: DeviceFacts) -> bool:
    # Without a residual it would be torch's. Rows of the scales of blocks are aligned, see torch_blocks.
    blocks = _fp8_blocks(key, facts) and key.block is not None and key.size_in % (4 * key.block[1]) == 0
    serves = facts.capability == FP8_ROWWISE and (_fp8_rowwise(key, facts) or blocks)
    return serves and key.residual and key.rows > FP8_CLOSE_ROWS


def _not_torchs(key: LinearKey, facts: DeviceFacts) -> bool:
    return not (_fp8_rowwise(key, facts) or _fp8_blocks(key, facts))


def _in_whole_blocks(key: LinearKey) -> bool:
    return key.block == FP8_BLOCK and key.size_out % FP8_BLOCK[0] == 0 and key.size_in % FP8_BLOCK[1] == 0


def _fp8_blocks(key: LinearKey, facts: DeviceFacts) -> bool:
    serves = facts.capability == (9, 0) and TORCH_BLOCKS in facts.libraries and key.dtype == torch.bfloat16
    return serves and _in_whole_blocks(key)


def _sgl_fp8(key: LinearKey, facts: DeviceFacts) -> bool:
    return _has_sgl(key, facts, *SGL_FP8) and key.block is None


def _sgl_fp8_blocks(key: LinearKey, facts: DeviceFacts) -> bool:
    return _has_sgl(key, facts, *SGL_FP8_BLOCKS) and _in_whole_blocks(key)


def _sgl_int8(key: LinearKey, facts: DeviceFacts) -> bool:
    return _has_sgl(key, facts, *SGL_INT8)


def _has_sgl(key: LinearKey, facts: DeviceFacts, least: tuple[int, int], most: tuple[int, int]) -> bool:
    fits = facts.capability is not None and least <= facts.capability <= most and key.rows > 0
    return "sgl_kernel" in facts.libraries and fits and key.dtype.itemsize == 2 and key.is_aligned(SGL_ALIGNMENT)


def is_int8_aligned(size_out: int, size_in: int) -> bool:
    """Whether cuBLAS' integer GEMM supports weights of this size."""
    return size_out % INT8_ALIGNMENT == 0 and size_in % INT8_ALIGNMENT == 0


def _int8(key: LinearKey, facts: DeviceFacts) -> bool:
    return key.rows > 0 and is_int8_aligned(key.size_out, key.size_in)


def _on_cpu(key: LinearKey, facts: DeviceFacts) -> bool:
    fuses = key.activation in (None, "silu", "gelu_tanh") and not (key.activation and key.bias)
    fits = _for_cpu(key, facts) and key.dtype == torch.bfloat16 and key.unit_stride and not key.into
    return fits and fuses and key.rows <= CPU_ROWS


def _for_cpu(key: LinearKey, facts: DeviceFacts) -> bool:
    """Whether kernels/cpu/quantized.py supports a key."""
    fits = key.dtype in (torch.bfloat16, torch.float16) and key.size_in % CPU_LANES == 0
    return fits and key.activation in CPU_ACTIVATIONS and key.rows > 0


def _cpu_many(key: LinearKey, facts: DeviceFacts) -> bool:
    # oneDNN's GEMM in bfloat16 is faster, where the processor has it.
    return _for_cpu(key, facts) and not (key.dtype == torch.bfloat16 and facts.bfloat16_units)


def _cpu_blocks(key: LinearKey, facts: DeviceFacts) -> bool:
    return _for_cpu(key, facts) and (key.block is None or key.block[1] % CPU_LANES == 0)


def _any_gpu(facts: DeviceFacts) -> bool:
    return facts.kind == "cuda"


_Row = partial(Candidate[LinearKey], on=on_gpu)
_HERE = "minisgl_backend.kernels.linear"
_CPU = "minisgl_backend.kernels.cpu"
_cpu = partial(_Row, "cpu", run=f"{_CPU}.quantized:linear", on=on_cpu)
_small = partial(_Row, "small_rows", run=f"{_HERE}.plain.small_rows:run")


def _tile(tile: str, why: str, serves: Callable[..., bool]) -> Candidate[LinearKey]:
    """A row of Machete."""
    kernel = machete_tiles.kernel_of(tile)
    run = f"{_HERE}.int4.dequantized:run_repacked"
    return _Row(kernel, why, partial(serves, tile=tile), close=always, run=run, arguments=(kernel,))


# What a row runs takes `GemmDevice`, x, the weight and a `GemmCall`.
CANDIDATES: Table[LinearKey] = MappingProxyType(
    {
        PLAIN: (
            _small("one row, a vocabulary: weights stream through registers", _vocabulary),
            _small("one or two rows: bound by weights' bytes; norm and epilogue inside", _vector),
            _small("the residual is added inside, which saves a kernel", _residual),
            _small("gated, few inputs: all weights of a program are in flight at once", _gated_sliced),
            _small("gated, a large weight, normed before: the activation is inside", _gated_large),
            _small("a small weight: launches and ramps cost more than its bytes", _small_weight),
            # After an all-reduce or a gated GEMM, in a chain of Qwen3-32B's kernels over two ranks, and over four; in
            # isolation cuBLAS is as fast. For o_proj, which has fewer inputs than outputs, cuBLAS was faster by 12 us.
            _Row(
                "long_rows", "nothing fused, many inputs: weights are loaded before the inputs are there", _long,
                run=f"{_HERE}.plain.small_rows:run_long",
            ),
            _Row(
                "cublaslt", "a large weight: the algorithm measured at start, or torch's if faster", _tuned,
                run=f"{_HERE}.plain.gpu:cublaslt",
            ),
            _cpu("few rows in bfloat16: norm, activation and residual inside", _on_cpu, run=f"{_CPU}.ops:linear"),
            _Row(
                "cpu_widened", "float16, or many rows without AVX-512 BF16: weights become float32", _cpu_many,
                run=f"{_CPU}.quantized:linear", on=on_cpu,
            ),
            _Row("torch", _TORCH, always, run=f"{_HERE}.plain.gpu:cublas"),
            _Row("torch", _TORCH, always, run=f"{_HERE}.plain.reference:linear", on=not_on_gpu),
        ),
        "fp8": (
            _Row(
                "fp8_one_row", "one row keeps 16 bits: no kernel that quantizes; norm and epilogue inside", _fp8_row,
                run=f"{_HERE}.fp8.one_row:run",
            ),
            _Row(
                "fp8_few_rows", "bound by weights' bytes: epilogue inside, norm in the kernel that quantizes", _fp8_few,
                close=_fp8_few_close, run=f"{_HERE}.fp8.few_rows:run",
            ),
            _Row(
                "scaled_mm", "many rows, scales of outputs: torch's", _fp8_rowwise, close=always,
                run=f"{_HERE}.fp8.libraries:scaled_mm",
            ),
            _Row(
                "scaled_mm_blocks", "many rows, blocks of 128 x 128: torch's, of CUDA 12.9 or later", _fp8_blocks,
                close=always, run=f"{_HERE}.fp8.libraries:scaled_mm_blocks",
            ),
            _Row(
                "fp8_many_rows", "many rows, other blocks, or what torch does not take", always, close=_not_torchs,
                run=f"{_HERE}.fp8.many_rows:run",
            ),
            _Row(
                "sgl_scaled_mm", "sgl-kernel's, of CUTLASS", _sgl_fp8, close=always,
                run=f"{_HERE}.fp8.libraries:sgl_scaled_mm",
            ),
            _Row(
                "sgl_scaled_mm_blocks", "sgl-kernel's, of CUTLASS", _sgl_fp8_blocks, close=always,
                run=f"{_HERE}.fp8.libraries:sgl_scaled_mm_blocks",
            ),
            _Row(
                "fp8_cublaslt", "torch's library, called here: the residual inside", _fp8_cublaslt, close=always,
                run=f"{_HERE}.fp8.cublaslt:run",
            ),
            _cpu("weights are widened in registers", _cpu_blocks),
            _Row("torch", "numbers become float32", always, run=f"{_HERE}.fp8.reference:linear", on=not_on_gpu),
        ),
        "int4": (
            *(_tile(tile, "Hopper: vLLM's, where memory has room for its layout too", machete) for tile in TILES),
            _Row(
                "marlin", "some tens of rows: vLLM's, where memory has room for its layout of the weight too", marlin,
                close=marlin_close, run=f"{_HERE}.int4.dequantized:run_repacked", arguments=("marlin",),
            ),
            _Row(
                "int4_many_rows", "Hopper: as operands in registers, work cut evenly between programs", int4_many,
                close=int4_many_close, run=f"{_HERE}.int4.many_rows:run",
            ),
            _Row(
                "int4_few_rows", "bound by weights' bytes: they become operands in registers", int4_few,
                close=int4_gated, run=f"{_HERE}.int4.few_rows:run",
            ),
            _Row(
                "int4_dequantized", "many rows: parts of the weight are dequantized, cuBLAS multiplies", always,
                close=int4_dequantized_close, run=f"{_HERE}.int4.dequantized:run",
            ),
            *(_tile(tile, "another tile", machete_rival) for tile in TILES),
            _cpu("activations in 16 bits, sums in integers", _for_cpu),
            _Row("torch", "the weight is dequantized", always, run=f"{_HERE}.int4.reference:linear", on=not_on_gpu),
        ),
        "gguf": (
            _Row(
                "cpu_blocks", "blocks as they lie in the file: norm, activation and residual inside", always,
                run="minisgl_backend.kernels.cpu.blocks:linear", on=on_cpu,
            ),
            _Row(
                "gguf_few_rows", "blocks become operands in registers", blocks_few, run=f"{_HERE}.gguf.gpu:run",
            ),
            _Row(
                "gguf_dequantized", "many rows: parts of the weight are dequantized, cuBLAS multiplies", always,
                run=f"{_HERE}.gguf.gpu:run_dequantized",
            ),
            _Row("torch", "blocks become float32", always, run=f"{_HERE}.blocks_reference:linear", on=not_on_cpu),
        ),
        "int8": (
            _Row(
                "int_mm", "cuBLAS' integer GEMM; x is quantized before, scales and epilogue come after", _int8,
                close=always, run=f"{_HERE}.int8:linear", on=_any_gpu,
            ),
            _Row(
                "sgl_int8", "sgl-kernel's, of CUTLASS, scales inside", _sgl_int8, close=always,
                run=f"{_HERE}.int8:sgl_linear", on=_any_gpu,
            ),
            _cpu("sums in integers, scales and epilogue inside", _for_cpu),
            _Row("torch", "integers become float32", always, run=f"{_HERE}.int8:linear", on=anywhere),
        ),
    }
)  # fmt: skip


class LinearChooser(Chooser[LinearKey]):
    """The choices for weights of one format on one device: the table's, and the measured ones that override it."""

    def __init__(self, weight_format: str, facts: DeviceFacts, table: Table[LinearKey] = CANDIDATES) -> None:
        super().__init__(table, weight_format, facts)
        self._asked: dict[LinearKey, None] = {}  # keys with rows=0
        self._measured: dict[LinearKey, str] = {}  # by `representative`

    def asked(self, size_out: int, size_in: int) -> list[LinearKey]:
        """The keys for which weights of this shape were used until now, without their rows."""
        return [key for key in self._asked if (key.size_out, key.size_in) == (size_out, size_in)]

    def prefer(self, key: LinearKey, kernel: str) -> None:
        """From now on, `kernel` is chosen for all keys with this representative for which it is a contender."""
        self._measured[key] = kernel
        self._remember()

    def _kernel(self, key: LinearKey) -> str:
        self._asked[key._replace(rows=0)] = None
        preferred = self._measured.get(representative(key))
        return preferred if preferred in self.contenders(key) else super()._kernel(key)


def representative(key: LinearKey) -> LinearKey:
    """The key whose measurement decides for this one: its rows are rounded up to `representative_rows`."""
    return key._replace(rows=representative_rows(key.rows))
