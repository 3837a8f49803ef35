"""Tells when a kernel in the Triton language is being compiled, which may take a minute while a step waits for it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any


def announce_compiling(device: str, begins: Callable[[], None], ends: Callable[[], None]) -> None:
    """Has Triton call `begins` before and `ends` after each compilation of this process. `device`: "cpu" or "cuda"."""
    if device != "cuda" or importlib.util.find_spec("triton") is None:
        return
    import triton

    # From 3.4 on the hooks are knobs; before they were attributes of the class of kernels. What `before` returns says
    # that the kernel must not be compiled.
    knobs = getattr(getattr(triton, "knobs", None), "runtime", None)
    holder, before, after = (
        (knobs, "jit_cache_hook", "jit_post_compile_hook")
        if knobs is not None and hasattr(knobs, "jit_post_compile_hook")
        else (triton.runtime.jit.JITFunction, "cache_hook", "compiled_hook")
    )

    def call_before(*args: Any, **kwargs: Any) -> bool:
        begins()
        return False

    def call_after(*args: Any, **kwargs: Any) -> None:
        ends()

    setattr(holder, before, call_before)
    setattr(holder, after, call_after)
