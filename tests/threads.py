"""How many cores a test's own process computes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_core() -> Iterator[None]:
    """As an engine takes for so small a model (`ONE_CORE_WEIGHT_BYTES`): two that wake each other for every product are
    slower, and keep other ranks and the compilers of grammars from theirs."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
