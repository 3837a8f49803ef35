"""Compilation of Triton kernels: several at a time at start, and announced wherever a step waits for one."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

MOST_THREADS = 16  # a compilation takes some 100 MiB, and more threads would have little to do


def compiles_ahead() -> bool:
    """Whether `compiling_ahead` can do anything: on a GPU, with a Triton that compiles on threads (3.5 and later)."""
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return False
    import triton

    return hasattr(triton, "AsyncCompileMode")


def name_kernels() -> None:
    """Computes the Triton cache keys of the project's kernels, in all loaded modules.

    To be called before the first kernel is launched. Up to Triton 3.6 the key of a kernel depends on whether another
    kernel that calls the same function got its key before, so that a start with another order of launches would miss
    the cache.
    """
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime.jit import JITFunction

    for name, module in sorted(sys.modules.items()):
        if name.startswith("minisgl_backend."):
            for function in vars(module).values():
                if isinstance(function, JITFunction):
                    _ = function.cache_key


class Compilations:
    """Number of compilations inside `compiling_ahead`; kernels read from Triton's cache do not count."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def note(self, *, cache_hit: bool, **_: Any) -> None:
        """As a `triton.knobs.CompilationListener`, on any thread."""
        with self._lock:
            self.count += not cache_hit


@contextmanager
def compiling_ahead() -> Iterator[Compilations]:
    """Inside, launching a Triton kernel only compiles it, on one of several threads, and memory that torch would leave
    uninitialised is zeroed. At the end all compilations have finished.

    So executing a step compiles all its kernels in parallel, which otherwise happens one after the other. Its results
    are meaningless. Most of a compilation runs without the GIL.
    """
    import triton
    from triton.runtime.jit import JITFunction

    done, seen, run, thread = Compilations(), set[Any](), JITFunction.run, threading.get_ident()

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if threading.get_ident() != thread:  # another thread's launch
            return run(kernel, *args, grid=grid, warmup=warmup, **options)
        # Triton looks for a kernel that is being compiled by hashing its source again.
        key = (kernel, tuple(map(_like, args)), tuple(options.items()))
        if key not in seen:
            seen.add(key)
            run(kernel, *args, grid=grid, warmup=True, **options)
        return None

    pool = ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="compile")
    with _listening(done), pool, triton.AsyncCompileMode(pool), _Zeros():
        JITFunction.run = compile_only
        try:
            yield done
        finally:
            JITFunction.run = run


@contextmanager
def _listening(done: Compilations) -> Iterator[None]:
    """Has `done` note what Triton compiles, in place of a listener of this process that was there before."""
    from triton import knobs

    before = knobs.compilation.listener
    knobs.compilation.listener = done.note
    try:
        yield
    finally:
        knobs.compilation.listener = before


def _like(argument: Any) -> Any:
    """An argument with everything on which Triton specializes, but without its data."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument.bit_length()
    return type(argument)


class _Zeros(TorchFunctionMode):
    """Zeroes the memory that skipped kernels would fill, since torch might use it as indices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty:
            func = torch.zeros
        elif func is torch.empty_like:
            func = torch.zeros_like
        return func(*args, **(kwargs or {}))


def announce_compiling(device: str, begins: Callable[[], None], ends: Callable[[], None]) -> None:
    """Calls `begins` before and `ends` after each compilation of this process, and prepares Triton for the first one on
    a thread. `device`: "cpu" or "cuda".

    To be called before the first kernel is launched, since a kernel binds Triton's compiler at its first launch.
    Triton's own hooks are not called for a compilation that fails.
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
    threading.Thread(target=_hash_triton, name="hash triton", daemon=True).start()


def _hash_triton() -> None:
    """Makes Triton compute and cache the hash of its own files: 0.4 s for a library of 500 MB, which otherwise delays
    the first kernel that comes from the cache. Most of it runs without the GIL."""
    from triton.runtime import cache

    with contextlib.suppress(Exception):  # the first kernel computes it again, and raises the error
        cache.triton_key()
