"""The ways to run one engine that must not change any answer: the cells of the matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BASELINE: Mapping[str, Any] = {"page_size": 16, "dtype": "float32"}
STARVED_REQUESTS = 32
STARVED_SEQUENCES = 3


@dataclass(frozen=True)
class Cell:
    """One way to run the engine."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)  # on top of BASELINE
    overlap: bool = True
    eager_graphs: bool = False  # padding and static buffers of captured steps, without a capture
    starved: bool = False  # pages for STARVED_SEQUENCES of STARVED_REQUESTS requests
    sampled: bool = False  # part of the short run


def _chunks(most: int, **options: Any) -> dict[str, Any]:
    return {"max_prefill_length": most, "mixed_prefill_length": most, **options}


CELLS = (
    Cell("page-1", {"page_size": 1}),
    Cell("page-64", {"page_size": 64}, sampled=True),
    Cell("naive", {"cache_type": "naive"}),
    Cell("naive-page-1", {"cache_type": "naive", "page_size": 1}, sampled=True),
    Cell("naive-page-64", {"cache_type": "naive", "page_size": 64}),
    Cell("chunk-16", _chunks(16), sampled=True),
    Cell("chunk-64", _chunks(64)),
    Cell("chunk-100", _chunks(100, page_size=64)),  # ends within a page
    Cell("chunk-256", _chunks(256)),
    Cell("chunk-1024", _chunks(1024)),
    Cell("chunk-4096", _chunks(4096)),
    Cell("sequential", overlap=False, sampled=True),
    Cell("prompts-first", {"mixed_prefill_length": 0}, sampled=True),
    Cell("mixed-16", {"mixed_prefill_length": 16}),
    Cell("lpm", {"schedule_policy": "lpm", "max_running_requests": 8}),
    Cell("one-at-a-time", {"max_running_requests": 1}),
    Cell("starved", starved=True),
    Cell("starved-page-1", {"page_size": 1}, starved=True),
    Cell("starved-page-64-naive", {"page_size": 64, "cache_type": "naive"}, starved=True),
    Cell("starved-chunk-16-sequential", _chunks(16, page_size=1), overlap=False, starved=True, sampled=True),
    Cell("starved-lpm", {"schedule_policy": "lpm", "page_size": 1}, starved=True, sampled=True),
    Cell("starved-prompts-first", {"mixed_prefill_length": 0}, starved=True),
    Cell("tp-2", {"tp": 2}),
    Cell("tp-2-graphs", {"tp": 2, "cuda_graph_max_tokens": 128}, eager_graphs=True, sampled=True),
    Cell("tp-4", {"tp": 4}),
    Cell("tp-2-starved-naive", {"tp": 2, "cache_type": "naive"}, starved=True),
    Cell("tp-2-starved-graphs", {"tp": 2, "page_size": 1}, eager_graphs=True, starved=True),
)
