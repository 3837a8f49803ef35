"""Stream capture into CUDA graphs.

`torch.cuda.graph` does more: each time it synchronises and returns the allocator's free blocks to the driver, which for
the hundreds of captures of a start takes longer than the captures.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


@contextmanager
def many_captures() -> Iterator[None]:
    """Wraps all captures of one kind. Disables garbage collection, since freeing a graph during a capture breaks it."""
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
    torch.cuda.empty_cache()  # memory cached for the capturing stream cannot be used by the serving stream


@contextmanager
def captured(pool: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """Captures what runs inside on the current stream, which is not the default one, as a graph.

    `pool`: a handle of `torch.cuda.graph_pool_handle`, for its memory.
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
    """Ends a capture in which something failed, so that the first error is raised."""
    with suppress(RuntimeError):  # the capture itself has failed
        graph.capture_end()
