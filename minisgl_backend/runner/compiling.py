"""Tells when a kernel in the Triton language is being compiled, which may take a minute while a step waits for it."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any


def announce_compiling(device: str, begins: Callable[[], None], ends: Callable[[], None]) -> None:
    """Calls `begins` before and `ends` after each compilation of this process. `device`: "cpu" or "cuda".

    To be called before the first kernel is launched: each takes Triton's compiler when it is launched first. Triton's
    own hooks would do, but for a compilation that fails.
    """
    if device != "cuda" or importlib.util.find_spec("triton") is None:
        return
    import triton.compiler

    compile_kernel = triton.compiler.compile

    @functools.wraps(compile_kernel)
    def announced(*args: Any, **kwargs: Any) -> Any:
        begins()
        try:
            return compile_kernel(*args, **kwargs)
        finally:
            ends()

    triton.compiler.compile = announced
