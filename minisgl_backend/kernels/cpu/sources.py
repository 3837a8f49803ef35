"""What the CPU's kernels are compiled from and for: at a start (library.py), and for a wheel (hatch_build.py at the
root, which needs no other module and no package).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent
SOURCES = tuple(
    _FOLDER / f"{name}.cpp" for name in ("kernels", "blocks", "layers", "quantized", "recurrent", "sampling", "replay")
)
_HEADERS = (
    "vector.h", "epilogue.h", "gemm.h", "panels.h", "block_formats.h", "blocks.h", "formats.h", "integers.h",
)  # fmt: skip
_FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-fPIC", "-w")
PACKED = _FOLDER / "packed"  # builds that came in a wheel


@dataclass(frozen=True)
class InstructionSet:
    """What a build is compiled for: the flags of /proc/cpuinfo that a processor needs, and the compiler's."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni"}
INSTRUCTION_SETS = (  # best first
    # Intel's Xeons from Cooper Lake and Sapphire Rapids on, AMD's processors from Zen 4 on.
    InstructionSet("avx512", _AVX512, ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")),
    # Every x86 processor since Haswell and Zen, but for some of Intel's without AVX.
    InstructionSet("avx2", _AVX2, ("-march=x86-64-v3",)),
)


def sources_text() -> str:
    """All that decides what a build does, but for its compiler."""
    texts = [path.read_text(encoding="utf-8") for path in (*SOURCES, *(_FOLDER / name for name in _HEADERS))]
    return "\n".join([*texts, *_FLAGS])


def packed_name(instructions: InstructionSet) -> str:
    """File in PACKED of these sources' build: another's is not taken for it."""
    digest = hashlib.sha256("\n".join([sources_text(), *instructions.flags]).encode()).hexdigest()[:16]
    return f"cpu-{instructions.name}-{digest}.so"


def build(
    compiler: tuple[str, ...], instructions: InstructionSet, folder: Path, tune: str, run: Callable[..., object]
) -> Path:
    """A shared library in `folder`. tune: the processor that instructions are ordered for. run: of a command; it raises
    where that fails."""
    shared, objects = folder / "cpu.so", [folder / f"{source.stem}.o" for source in SOURCES]

    def compile(source: Path, built: Path) -> None:
        run(*compiler, *_FLAGS, f"-mtune={tune}", *instructions.flags, "-c", str(source), "-o", str(built))

    with ThreadPoolExecutor() as pool:
        list(pool.map(compile, SOURCES, objects))
    # Linked without OpenMP: its symbols are found in the libgomp that torch has loaded, and its threads are shared.
    run(*compiler, "-shared", "-s", *map(str, objects), "-o", str(shared))
    return shared
