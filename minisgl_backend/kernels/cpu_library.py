"""The compiled kernels of `cpu.cpp`: built by the machine's C++ compiler at the first start, kept for the next ones.

A wheel cannot bring them for every processor, and a compiler needs two seconds.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch  # noqa: F401  its OpenMP is the library's: it must be loaded before

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("cpu.cpp")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-w")
_COMPILERS = ("c++", "g++", "clang++")
_COMPILE_S = 120.0

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_ARGUMENTS = {
    "minisgl_rms_norm": (*[_POINTER] * 2, _FLOAT, *[_LONG] * 2, _POINTER),
    "minisgl_linear": (*[_POINTER] * 3, _FLOAT, *[_POINTER] * 2, _INT, *[_LONG] * 3, _POINTER),
    "minisgl_rope_store": (*[_POINTER] * 3, _FLOAT, *[_POINTER] * 5, *[_LONG] * 5),
    "minisgl_decode_attention": (
        *(_POINTER, _LONG, _POINTER, _POINTER, _POINTER, _LONG, _POINTER, _POINTER),
        *[_LONG] * 6,
        *(_FLOAT, _POINTER),
    ),
    "minisgl_argmax": (_POINTER, _LONG, _LONG, _POINTER),
}


def multiplies_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor has AVX-512 BF16, which the kernels are written for: Intel's Xeons from Cooper Lake and
    Sapphire Rapids on, AMD's from Zen 4 on."""
    try:
        text = cpuinfo.read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    return {"avx512f", "avx512bw", "avx512vl", "avx512_bf16"} <= set(flags)


def compiler() -> str | None:
    """The C++ compiler's path: that of CXX, else the first that is installed."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX") or "", *_COMPILERS))), None)


@functools.cache
def cpu_library() -> ctypes.CDLL | None:
    """The functions of cpu.cpp; None where this processor or machine has none, and the log says why if it could."""
    program = compiler()
    if not multiplies_bfloat16() or program is None:
        return None
    try:
        path = _built(program)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        log.warning("the CPU kernels cannot be compiled, so that bfloat16 is slow: %s", said.strip()[-500:])
        return None
    for name, types in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    return library


def _built(program: str) -> Path:
    """The shared library, compiled unless it is there. Raises OSError or SubprocessError."""
    version = _run(program, "--version")
    key = hashlib.sha256("\n".join([SOURCE.read_text(), version, *_FLAGS, _processor()]).encode()).hexdigest()
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(cache) / "minisgl"
    path = folder / f"cpu-{key[:16]}.so"
    if path.is_file() and path.stat().st_uid == os.getuid():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        built, shared = Path(temporary) / "cpu.o", Path(temporary) / "cpu.so"
        _run(program, *_FLAGS, "-c", str(SOURCE), "-o", str(built))
        # Linked without OpenMP: its symbols are found in the libgomp that torch has loaded, and its threads are shared.
        _run(program, "-shared", str(built), "-o", str(shared))
        os.replace(shared, path)  # two starts at once: both are the same
    return path


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_COMPILE_S).stdout


def _processor() -> str:
    """What -march=native depends on: a home directory may be shared by machines."""
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    return next((line for line in lines if line.startswith("flags")), "")
