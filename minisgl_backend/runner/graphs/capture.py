"""Capture of what a stream is given as a CUDA graph.

`torch.cuda.graph` does more: each time it synchronises and gives the allocator's free blocks back to the driver, which
at a start's hundreds of captures takes longer than the captures.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


@contextmanager
def many_captures() -> Iterator[None]:
    """Around all captures of one kind: no garbage is collected, since a graph that goes during a capture breaks it."""
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
    torch.cuda.empty_cache()  # the capturing stream's memory is of no use to the one that serves


@contextmanager
def captured(pool: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """What runs inside on the current stream, which is not the default one, as a graph.

    `pool`: a handle of `torch.cuda.graph_pool_handle`, of the memory that it takes.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool)
    try:
        yield graph
    except BaseException:
        end_failed(graph)
        raise
    graph.capture_end()


def end_failed(graph: torch.cuda.CUDAGraph) -> None:
    """Ends a capture in which something failed, and leaves the word to that."""
    with suppress(RuntimeError):  # where the capture itself failed
        graph.capture_end()
