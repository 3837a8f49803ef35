"""Compilation of kernels in the Triton language: several at a time at a start, and announced wherever a step waits."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

MOST_THREADS = 16  # a compilation takes some 100 MiB, and few kernels are left for more


def compiles_ahead() -> bool:
    """Whether `compiling_ahead` can do anything: on a GPU, with a Triton that compiles on threads (3.5 and later)."""
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return False
    import triton

    return hasattr(triton, "AsyncCompileMode")


def name_kernels() -> None:
    """Makes the names by which Triton's cache knows the project's kernels, of all modules that are loaded.

    To be called before the first kernel is launched. Up to Triton 3.6 the name of a kernel depends on whether another
    one that calls the same function was named before, so that a start which launches them in another order would find
    nothing of them.
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
    """What was compiled inside `compiling_ahead`."""

    def __init__(self) -> None:
        self.count = 0
        self.longest_s = 0.0  # of one kernel


@contextmanager
def compiling_ahead() -> Iterator[Compilations]:
    """Inside, launching a kernel in the Triton language only compiles it, on one of several threads, and memory that
    torch would leave as it is holds zeros. All is compiled at the end.

    So a step can be executed for the sake of the kernels that it launches, of which each would wait for the one before
    otherwise: nothing comes out of it, but what torch computes of zeros. Most of a compilation runs without the
    interpreter's lock.
    """
    import triton
    from triton.runtime.jit import JITFunction

    done, seen, run, thread = Compilations(), set[Any](), JITFunction.run, threading.get_ident()

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if threading.get_ident() != thread:  # another one's launch, in a process that does other things too
            return run(kernel, *args, grid=grid, warmup=warmup, **options)
        # Triton looks for a kernel that is being compiled by hashing its source again.
        key = (kernel, tuple(map(_like, args)), tuple(options.items()))
        if key not in seen:
            seen.add(key)
            run(kernel, *args, grid=grid, warmup=True, **options)
        return None

    with _TimingPool(done) as pool, triton.AsyncCompileMode(pool), _Zeros():
        JITFunction.run = compile_only
        try:
            yield done
        finally:
            JITFunction.run = run


def _like(argument: Any) -> Any:
    """All by which Triton tells one argument of a launch from another, and no less."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument.bit_length()
    return type(argument)


class _Zeros(TorchFunctionMode):
    """Sets to zero what kernels would fill: they are left out, and torch might take it for indices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty:
            func = torch.zeros
        elif func is torch.empty_like:
            func = torch.zeros_like
        return func(*args, **(kwargs or {}))


class _TimingPool(ThreadPoolExecutor):
    """Notes how long its calls take."""

    def __init__(self, done: Compilations) -> None:
        super().__init__(min(MOST_THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="compile")
        self._done = done

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def timed() -> Any:
            started = time.monotonic()
            try:
                return fn(*args, **kwargs)
            finally:
                self._done.longest_s = max(self._done.longest_s, time.monotonic() - started)

        self._done.count += 1
        return super().submit(timed)


def announce_compiling(device: str, begins: Callable[[], None], ends: Callable[[], None]) -> None:
    """Calls `begins` before and `ends` after each compilation of this process, and has a thread make ready what
    the first one needs of Triton. `device`: "cpu" or "cuda".

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
    threading.Thread(target=_hash_triton, name="hash triton", daemon=True).start()


def _hash_triton() -> None:
    """Has Triton compute the hash of its own files, which it then remembers: 0.4 s for a library of 500 MB, where the
    first kernel comes from the cache. Most of it runs without the interpreter's lock."""
    from triton.runtime import cache

    with contextlib.suppress(Exception):  # the first kernel computes it again, and tells what is wrong
        cache.triton_key()
