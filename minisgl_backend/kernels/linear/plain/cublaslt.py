"""cuBLASLt through ctypes, where the caller chooses the algorithm of a GEMM; torch only takes the library's guess.

An algorithm is the library's own 64 bytes, which NVIDIA's documentation allows to be stored and used again with the
same version of the library. torch's own tuning (torch.cuda.tunable) chooses among algorithms on AMD devices only, and
never leaves the library's list.

Constants and structures are those of cublasLt.h in CUDA 12 and 13: enumerations there only ever grow.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable

import torch

from minisgl_backend.kernels.candidate import REMEMBERED

WORKSPACE_BYTES = 32 << 20  # what NVIDIA advises on Hopper, and what torch gives cuBLAS there
ALIGNMENT = 256  # bytes, of all addresses: what the library assumes by default

_DATA_TYPES = {torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28}
_FLOAT32 = 0
_COMPUTE_FLOAT32 = 68
_TRANSPOSE_A = 3  # attribute of a GEMM
_SCALES, _SCALE_MODES = (17, 18), (31, 32)  # attributes of one with scales: of the weight, and of x
_BY_ROW, _IN_BLOCKS = (3, 3), (5, 4)  # a scale for each output and row; blocks of 128 x 128, and 128 inputs of a row
_MAX_WORKSPACE_BYTES, _REDUCTION_SCHEMES = 1, 3  # attributes of a preference
_REDUCE_IN_FLOAT32 = 2  # partial sums in the workspace, added in a fixed order
_TILE, _SPLIT, _REDUCTION, _CLUSTER = (1, 4), (2, 4), (3, 4), (8, 2)  # attributes of an algorithm, and their bytes
_TILES_OF_ALGORITHM = 6  # capabilities
_ALIGNMENTS_OF_OUT = (18, 19)  # of what is added to, and of what is written
_PLAIN_TILES = (
    "8x8 8x16 16x8 8x32 16x16 32x8 8x64 16x32 32x16 64x8 32x32 32x64 64x32 32x128 64x64 128x32 64x128 128x64 64x256 "
    "128x128 256x64 64x512 128x256 256x128 512x64 64x96 96x64 96x128 128x160 160x128 192x128 128x192 128x96 32x256 "
    "256x32"
)
Launch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], None]
# Clusters of blocks that share loads: ids of 1x1, 2x1, 1x2 and 4x1 blocks, the only ones that ever won.
CLUSTERS = (2, 3, 5, 4)


class _Heuristic(ctypes.Structure):
    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@functools.cache
def tile_sizes() -> dict[int, tuple[int, int]]:
    """Tile id -> (outputs, rows) that one block computes, as cublasLt.h numbers them up to CUDA 13."""
    tiles = [(int(a), int(b)) for a, b in (name.split("x") for name in _PLAIN_TILES.split())]
    seen = set(tiles)
    fine_then_coarse = [(a, b) for a in range(8, 769, 8) for b in range(64, 769, 64) if a * b <= 49152]
    coarse_then_fine = [(a, b) for a in range(64, 769, 64) for b in range(8, 769, 8) if a * b <= 65536]
    for size in (*fine_then_coarse, *coarse_then_fine):
        if size not in seen:
            seen.add(size)
            tiles.append(size)
    return dict(enumerate(tiles, start=1))


class CublasLt:
    """The library that torch has loaded, and a handle on one device. Raises OSError where there is none.

    One workspace serves all GEMMs, so they must not overlap: one stream, or streams that wait for each other.
    """

    def __init__(self, device: torch.device) -> None:
        self.library = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}")
        self.library.cublasLtGetVersion.restype = ctypes.c_size_t
        self.version: int = self.library.cublasLtGetVersion()
        self.device = device
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        with torch.cuda.device(device):
            self.handle = self._create("cublasLtCreate", "cublasLtDestroy")
        self.scaled_gemm = functools.lru_cache(REMEMBERED)(functools.partial(ScaledGemm, self))
        self.preference = self._create("cublasLtMatmulPreferenceCreate", "cublasLtMatmulPreferenceDestroy")
        for attribute, value in (
            (_MAX_WORKSPACE_BYTES, ctypes.c_uint64(WORKSPACE_BYTES)),
            (_REDUCTION_SCHEMES, ctypes.c_uint32(_REDUCE_IN_FLOAT32)),
        ):
            self.call(
                "cublasLtMatmulPreferenceSetAttribute", self.preference, attribute, ctypes.byref(value),
                ctypes.c_size_t(ctypes.sizeof(value)),
            )  # fmt: skip

    def call(self, name: str, *arguments: object) -> None:
        """Raises RuntimeError with the library's status if it is not success."""
        if status := getattr(self.library, name)(*arguments):
            raise RuntimeError(f"{name} returned status {status}")

    def _create(self, create: str, destroy: str, *arguments: object) -> ctypes.c_void_p:
        """Creates an object of the library, freed with this one."""
        return owned(self, self, create, destroy, *arguments)


def owned(owner: object, lt: CublasLt, create: str, destroy: str, *arguments: object) -> ctypes.c_void_p:
    """Handle that the library's `create` returns for the arguments; destroyed with `owner`."""
    handle = ctypes.c_void_p()
    lt.call(create, ctypes.byref(handle), *arguments)
    weakref.finalize(owner, getattr(lt.library, destroy), handle).atexit = False  # the device may be gone by then
    return handle


class Gemm:
    """out [rows, size_out] = x [rows, size_in] @ weight [size_out, size_in].T, all contiguous and of one dtype, or out
    of its own, except that the row stride of out may be `stride` numbers.

    The library is column-major, so for it this is out.T = weight @ x.T: its tiles are (outputs, rows).
    """

    def __init__(
        self, lt: CublasLt, rows: int, size_out: int, size_in: int, dtype: torch.dtype, stride: int | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.rows, self.size_out, self.size_in = rows, size_out, size_in
        self._lt = lt
        self._description = owned(
            self, lt, "cublasLtMatmulDescCreate", "cublasLtMatmulDescDestroy", _COMPUTE_FLOAT32, _FLOAT32
        )
        self._set(_TRANSPOSE_A, ctypes.c_int32(1))
        self._weight, self._x, self._out = (
            owned(
                self, lt, "cublasLtMatrixLayoutCreate", "cublasLtMatrixLayoutDestroy", _DATA_TYPES[number],
                ctypes.c_uint64(height), ctypes.c_uint64(width), ctypes.c_int64(apart),
            )
            for number, height, width, apart in (
                (dtype, size_in, size_out, size_in), (dtype, size_in, rows, size_in),
                (out_dtype or dtype, size_out, rows, stride or size_out),
            )
        )  # fmt: skip
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)

    def _set(self, attribute: int, value: ctypes.c_int32 | ctypes.c_void_p) -> None:
        self._lt.call(
            "cublasLtMatmulDescSetAttribute", self._description, attribute, ctypes.byref(value),
            ctypes.c_size_t(ctypes.sizeof(value)),
        )  # fmt: skip

    def suggestions(self, most: int) -> list[bytes]:
        """The library's heuristic candidates, the most likely first."""
        results, found = (_Heuristic * most)(), ctypes.c_int()
        self._lt.call(
            "cublasLtMatmulAlgoGetHeuristic", self._lt.handle, self._description, self._weight, self._x, self._out,
            self._out, self._lt.preference, most, results, ctypes.byref(found),
        )  # fmt: skip
        return [bytes(result.algorithm) for result in results[: found.value] if result.state == 0]

    def tiles(self, algorithm: bytes) -> list[int]:
        """Ids of tiles that this family of algorithms may have; `with_tile` tells which exist for this GEMM."""
        get, bytes_of_ids, written = "cublasLtMatmulAlgoCapGetAttribute", ctypes.c_size_t(), ctypes.c_size_t()
        chosen = _buffer(algorithm)
        self._lt.call(get, chosen, _TILES_OF_ALGORITHM, None, ctypes.c_size_t(0), ctypes.byref(bytes_of_ids))
        ids = (ctypes.c_uint32 * (bytes_of_ids.value // 4))()
        self._lt.call(get, chosen, _TILES_OF_ALGORITHM, ids, bytes_of_ids, ctypes.byref(written))
        return list(ids)

    def with_tile(self, algorithm: bytes, tile: int, cluster: int) -> bytes | None:
        """`algorithm` with another tile and cluster and no split-K; None where the library has no such kernel."""
        changed = _buffer(algorithm)
        for (attribute, size), value in ((_TILE, tile), (_SPLIT, 1), (_REDUCTION, 0), (_CLUSTER, cluster)):
            number = ctypes.create_string_buffer(value.to_bytes(size, "little"), size)
            if self._lt.library.cublasLtMatmulAlgoConfigSetAttribute(changed, attribute, number, ctypes.c_size_t(size)):
                return None
        return bytes(changed) if self.allows(bytes(changed)) else None

    def allows(self, algorithm: bytes) -> bool:
        """Whether the library supports this GEMM with `algorithm`, within the workspace."""
        result = _Heuristic()
        status = self._lt.library.cublasLtMatmulAlgoCheck(
            self._lt.handle, self._description, self._weight, self._x, self._out, self._out, _buffer(algorithm),
            ctypes.byref(result),
        )  # fmt: skip
        return not status and result.state == 0 and result.workspace_bytes <= WORKSPACE_BYTES

    def out_alignment(self, algorithm: bytes) -> int:
        """Bytes by which the address of `out` and its row stride must be aligned."""
        found = []
        for attribute in _ALIGNMENTS_OF_OUT:
            number, written = ctypes.c_uint32(), ctypes.c_size_t()
            self._lt.call(
                "cublasLtMatmulAlgoCapGetAttribute", _buffer(algorithm), attribute, ctypes.byref(number),
                ctypes.c_size_t(4), ctypes.byref(written),
            )  # fmt: skip
            found.append(number.value)
        return max(found)

    def launcher(self, algorithm: bytes) -> Launch:
        """launch(weight, x, out, add): starts the GEMM on the current stream; `add` adds to what `out` holds.

        RuntimeError where the library refuses; `allows` tells beforehand.
        """
        lt, matmul, pointer = self._lt, self._lt.library.cublasLtMatmul, ctypes.c_void_p
        chosen, workspace = _buffer(algorithm), pointer(lt.workspace.data_ptr())
        one, zero, size = ctypes.byref(self._one), ctypes.byref(self._zero), ctypes.c_size_t(WORKSPACE_BYTES)

        def launch(weight: torch.Tensor, x: torch.Tensor, out: torch.Tensor, add: bool) -> None:
            result = pointer(out.data_ptr())
            stream = pointer(torch.cuda.current_stream(lt.device).cuda_stream)
            status = matmul(
                lt.handle, self._description, one, pointer(weight.data_ptr()), self._weight, pointer(x.data_ptr()),
                self._x, one if add else zero, result, self._out, result, self._out, chosen, workspace, size, stream,
            )  # fmt: skip
            if status:
                raise RuntimeError(f"cublasLtMatmul returned status {status}")

        return launch


class ScaledGemm(Gemm):
    """Of FP8 numbers, whose scales come with each call: of outputs and rows, or of blocks. Since CUDA 12.9."""

    def __init__(
        self, lt: CublasLt, rows: int, size_out: int, size_in: int, out_dtype: torch.dtype, in_blocks: bool
    ) -> None:
        super().__init__(lt, rows, size_out, size_in, torch.float8_e4m3fn, out_dtype=out_dtype)
        for attribute, mode in zip(_SCALE_MODES, _IN_BLOCKS if in_blocks else _BY_ROW, strict=True):
            self._set(attribute, ctypes.c_int32(mode))
        self._launch: Launch | None = None

    def add_to(
        self, out: torch.Tensor, weight: tuple[torch.Tensor, torch.Tensor], x: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """out += x @ weight.T on the current stream, by the library's first suggestion. weight and x with their scales:
        float32 [size_out] and [rows]; of blocks [blocks of outputs, of inputs] and column-major [rows, groups].
        RuntimeError where it has none, or refuses."""
        for attribute, (_, scales) in zip(_SCALES, (weight, x), strict=True):
            self._set(attribute, ctypes.c_void_p(scales.data_ptr()))
        if self._launch is None:  # without scales there are no suggestions
            suggested = self.suggestions(1)
            if not suggested:
                raise RuntimeError(f"cuBLASLt has no algorithm for {self.size_out} x {self.size_in} in FP8")
            self._launch = self.launcher(suggested[0])
        self._launch(weight[0], x[0], out, True)


def _buffer(algorithm: bytes) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(algorithm, 64)
