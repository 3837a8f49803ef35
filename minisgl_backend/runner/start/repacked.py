"""Second copies of weights in the layout of a library's kernel that is faster at some row counts.

They take memory from KV pages, so they are only made where most of it is left.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from minisgl_backend.attention.base import AttentionSpec
from minisgl_backend.kv.pool import LayerPlace, bytes_per_page
from minisgl_backend.process.memory import in_words
from minisgl_backend.runner.start.device import free_bytes
from minisgl_backend.runner.start.runtime_config import RuntimeConfig
from minisgl_backend.weights.method import LinearMethod

log = logging.getLogger(__name__)

# Largest share of the memory that memory_ratio leaves after the weights. If they needed more, few sequences would fit,
# and for few sequences the first layout is faster.
MOST_SHARE = 1 / 3


def room_for_repacked(
    runtime: RuntimeConfig, spec: AttentionSpec, places: Sequence[LayerPlace], free_at_start: int
) -> int:
    """Bytes of this rank's GPU that memory_ratio leaves after the weights are loaded, minus the pages of `num_pages`.

    `places`: of all layers in the pool; `free_at_start`: bytes before the weights were loaded.
    """
    torch.cuda.empty_cache()
    taken = free_at_start - free_bytes(spec.device)
    fixed = (runtime.config.num_pages or 0) * bytes_per_page(places, spec.page_size)
    return int(free_at_start * runtime.config.memory_ratio) - taken - fixed


def repack_weights(modules: Iterable[nn.Module], room: int) -> None:
    """Adds a second layout to all weights that have one on this device, or to none if they would take more than
    MOST_SHARE of `room` bytes."""
    found = [(one, one.repacked_bytes()) for one in modules if isinstance(one, LinearMethod)]
    methods = [method for method, size in found if size]
    if not methods:
        return
    total = sum(size for _, size in found)
    if total > MOST_SHARE * room:
        log.info(
            "weights are not held in a library's layout as well: %s are more than a third of the %s that memory_ratio "
            "leaves; more memory, tp or a higher memory_ratio would make steps of some tens of sequences faster",
            in_words(total), in_words(max(0, room)),
        )  # fmt: skip
        return
    with torch.inference_mode():
        counts = Counter(name for method in methods if (name := method.add_repacked()) is not None)
    names = ", ".join(f"{name} ({count})" for name, count in counts.items())
    if names:
        log.info("weights are held in the layout of %s as well: %s", names, in_words(total))
