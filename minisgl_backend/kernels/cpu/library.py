"""The compiled kernels of this room's C++ sources: built by the machine's C++ compiler at the first start and cached.

There is a build for each of INSTRUCTION_SETS; a processor takes the first whose instructions it has. A wheel may hold
them: then nothing is compiled.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch  # noqa: F401  the library uses torch's OpenMP, which must be loaded before it

from minisgl_backend.kernels.cpu.sources import (
    INSTRUCTION_SETS,
    PACKED,
    InstructionSet,
    build,
    packed_name,
    sources_text,
)

log = logging.getLogger(__name__)

_COMPILERS = ("c++", "g++")  # clang's OpenMP is not the one that torch uses
_COMPILE_S = 120.0
_DIGEST_BYTES = 32  # SHA-256, at the end of a cached library
_MAX_MESSAGE = 500  # characters: the end of what a compiler printed

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_ARGUMENTS = {
    "minisgl_rms_norm": (_INT, *[_POINTER] * 2, _FLOAT, *[_LONG] * 2, _POINTER),
    "minisgl_add_norm": (_INT, *[_POINTER] * 3, *[_FLOAT] * 2, *[_LONG] * 2, _POINTER),
    "minisgl_linear": (*[_POINTER] * 3, _FLOAT, *[_POINTER] * 2, _INT, *[_LONG] * 3, _POINTER),
    "minisgl_block_linear": (*[_POINTER] * 3, _FLOAT, *[_POINTER] * 2, _INT, *[_LONG] * 3, _POINTER),
    "minisgl_block_mixture": (*[_POINTER] * 6, _INT, *[_LONG] * 5, _POINTER),
    "minisgl_block_rows": (*[_POINTER] * 2, *[_LONG] * 2, _POINTER),
    "minisgl_rope_store": (_INT, *[_POINTER] * 3, _FLOAT, *[_POINTER] * 5, *[_LONG] * 5),
    "minisgl_decode_attention": (
        *(_INT, _POINTER, _LONG, _POINTER, _POINTER, _POINTER, _LONG, _POINTER, _POINTER),
        *[_LONG] * 6,
        *(_FLOAT, _POINTER),
    ),
    "minisgl_sample": (_INT, _POINTER, *[_LONG] * 2, *[_POINTER] * 3, _LONG, _POINTER),
    "minisgl_quantized_linear": (_INT, *[_POINTER] * 3, _FLOAT, *[_POINTER] * 2, _INT, *[_LONG] * 2, _POINTER),
    "minisgl_mixture": (_INT, *[_POINTER] * 3),
    "minisgl_delta_window": (_INT, _POINTER),
    "minisgl_delta_fold": (_INT, _POINTER),
    "minisgl_short_conv": (_INT, _POINTER),
    "minisgl_replay": (_POINTER, _LONG),
    "minisgl_widen": (_POINTER, *[_LONG] * 2, _POINTER),
    "minisgl_finish": (_INT, _POINTER, *[_LONG] * 2, *[_POINTER] * 2, _INT, *[_LONG] * 4, _POINTER),
}


# By torch's own variable, with which its kernels do without instructions that the processor has.
_ALLOWED_BY_TORCH: Mapping[str, tuple[InstructionSet, ...]] = MappingProxyType(
    {"default": (), "avx2": INSTRUCTION_SETS[1:]}
)


def instruction_set(cpuinfo: Path = Path("/proc/cpuinfo")) -> InstructionSet | None:
    """The best one that this processor has, or that torch is told to use; None: it has none of them."""
    allowed = _ALLOWED_BY_TORCH.get(os.environ.get("ATEN_CPU_CAPABILITY", ""), INSTRUCTION_SETS)
    try:
        text = cpuinfo.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    return next((one for one in allowed if one.needs <= set(flags)), None)


def has_bfloat16_units() -> bool:
    """Whether this processor multiplies bfloat16: elsewhere torch's GEMMs in it are slow, too."""
    found = instruction_set()
    return found is not None and "avx512_bf16" in found.needs


class CpuLibrary(ctypes.CDLL):
    """Its functions are those of _ARGUMENTS."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.recorded = threading.Lock()  # held while functions are replaced: by one Recording of the process


@dataclass(frozen=True)
class CpuKernels:
    """The functions of SOURCES. `library`: None where there are none; `refusal` then says why, else "".
    `instructions`: the name of the InstructionSet that they were compiled for."""

    library: CpuLibrary | None
    refusal: str
    instructions: str = ""

    def __str__(self) -> str:
        if self.library is not None:
            return f"compiled for {self.instructions}"
        cost = "weights become float32, two to eight times their size, and steps take several times as long"
        return f"none, since {self.refusal}: {cost}"


class _FailedError(Exception):
    """A compiler's library cannot be made or loaded; the text says why."""


@functools.cache
def cpu_kernels() -> CpuKernels:
    """Compiled by the first call of a process and loaded. The log tells of compilers that failed."""
    instructions = instruction_set()
    if instructions is None:
        return CpuKernels(None, "this processor has no AVX2 with FMA")
    packed = PACKED / packed_name(instructions)
    if packed.exists():
        try:
            return CpuKernels(_loaded(packed), "", instructions.name)
        except _FailedError as failed:  # of a system library that it was not made for
            log.info("CPU kernels of the package: %s", failed)
    compilers = _compilers()
    if not compilers:
        missing = CpuKernels(None, "no C++ compiler is installed")
        log.warning("CPU kernels: %s", missing)
        return missing
    refusals = []
    for compiler in compilers:
        try:
            return CpuKernels(_library(compiler, instructions), "", instructions.name)
        except _FailedError as failed:
            refusals.append(str(failed))
    missing = CpuKernels(None, "; ".join(refusals))
    log.warning("CPU kernels: %s", missing)
    return missing


def cpu_library() -> CpuLibrary | None:
    """The functions of SOURCES; None where this processor or machine has none."""
    return cpu_kernels().library


def _compilers() -> list[tuple[str, ...]]:
    """Commands of the compilers that are installed, best first: that of CXX, with its arguments, then the usual."""
    try:
        of_user = shlex.split(os.environ.get("CXX", ""))
    except ValueError:  # a quotation mark that is not closed
        of_user = []
    found: dict[tuple[str, ...], tuple[str, ...]] = {}
    for name, *arguments in filter(None, (of_user, *([name] for name in _COMPILERS))):
        program = shutil.which(name)
        if program is not None:
            # Keyed by the target of links: c++ and g++ are often the same.
            found.setdefault((os.path.realpath(program), *arguments), (program, *arguments))
    return list(found.values())


def _library(compiler: tuple[str, ...], instructions: InstructionSet) -> CpuLibrary:
    """The cached library where it can be loaded; else it is compiled, cached if that is possible, and loaded."""
    kept = _kept_file(compiler, instructions)
    if kept is not None and _is_own(kept, stat.S_ISREG) and _is_whole(kept):
        try:
            return _loaded(kept)
        except _FailedError as failed:  # in a folder whose programs may not run
            log.info("kept CPU kernels: %s", failed)
    try:
        with tempfile.TemporaryDirectory(prefix="minisgl-") as temporary:
            built = _built(compiler, instructions, Path(temporary))
            if kept is not None and _keep(built, kept):
                with contextlib.suppress(_FailedError):
                    return _loaded(kept)
            return _loaded(built)  # once loaded, its file is no longer needed
    except OSError as error:
        raise _FailedError(f"no folder to compile in: {error}") from error


def _loaded(path: Path) -> CpuLibrary:
    try:
        library = CpuLibrary(str(path))
        for name, types in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, None
    except (OSError, AttributeError) as error:
        raise _FailedError(f"cannot be loaded: {error}") from error
    return library


def _built(compiler: tuple[str, ...], instructions: InstructionSet, folder: Path) -> Path:
    return build(compiler, instructions, folder, tune="native", run=_run)


def _run(*command: str) -> str:
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=True, timeout=_COMPILE_S
        )
    except subprocess.CalledProcessError as error:
        message = error.stderr.strip()[-_MAX_MESSAGE:] or f"exit status {error.returncode}"
        raise _FailedError(f"{command[0]} cannot compile them: {message}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise _FailedError(f"{command[0]} cannot compile them: {error}") from error
    return found.stdout


def _kept_file(compiler: tuple[str, ...], instructions: InstructionSet) -> Path | None:
    """Path of this compiler's library in the cache, whether it exists or not; None: it cannot be cached, since other
    users could write there, or this one cannot."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if not cache.is_absolute():  # a user without a home
        return None
    folder = cache / "minisgl"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        log.info("CPU kernels are compiled at each start: %s", error)
        return None
    if not _is_own(folder, stat.S_ISDIR):
        log.info("CPU kernels are compiled at each start: %s is not this user's alone", folder)
        return None
    version = _run(*compiler, "--version")
    parts = [sources_text(), version, *compiler[1:], *instructions.flags, _processor()]
    return folder / f"cpu-{instructions.name}-{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:16]}.so"


def _is_own(path: Path, is_kind: Callable[[int], bool]) -> bool:
    """Whether it exists, is no link, belongs to this user, and no other user may write it."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return is_kind(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _is_whole(kept: Path) -> bool:
    """Whether the file ends with the digest of the rest: loading half a library ends the process with SIGBUS."""
    try:
        content = kept.read_bytes()
    except OSError:
        return False
    return content[-_DIGEST_BYTES:] == hashlib.sha256(content[:-_DIGEST_BYTES]).digest()


def _keep(built: Path, kept: Path) -> bool:
    """Puts a copy with its digest at `kept` in one step, since two processes may start at once. False where it cannot
    be written."""
    content = built.read_bytes()
    try:
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as copy:
            try:
                copy.write(content + hashlib.sha256(content).digest())
                copy.flush()
                os.fsync(copy.fileno())  # else a machine that goes down may leave an empty file
                os.replace(copy.name, kept)
            except OSError:
                os.unlink(copy.name)
                raise
    except OSError as error:
        log.info("CPU kernels are compiled at each start: %s", error)
        return False
    return True


def _processor() -> str:
    """The CPU flags, by which -mtune=native is told here: a home directory may be shared by machines."""
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    return next((line for line in lines if line.startswith("flags")), "")
