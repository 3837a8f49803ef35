"""Small images as CUDA graphs: launching an encoder's three hundred kernels takes a host longer than a GPU needs for a
thousand patches. What is captured serves one shape, so it is captured when a shape comes a second time."""

from __future__ import annotations

import gc
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

log = logging.getLogger(__name__)

Shapes = tuple[tuple[int, ...], ...]
MOST_PATCHES = 4096  # of all images of a call: with more a GPU takes longer than the host
_KEPT = 8  # shapes


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    pixels: tuple[torch.Tensor, ...]  # what it reads
    vectors: torch.Tensor  # what it leaves


class EncoderGraphs:
    """Of one encoder, on a GPU. The graphs run one after the other and share their memory."""

    def __init__(self, encode: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> None:
        """encode: from the pixels of images, as of `Encoder.begin`, to their vectors one behind the other. It launches
        the same for equal shapes, from the second time on without anything but kernels."""
        self._encode = encode
        self._seen: OrderedDict[Shapes, _Captured | None] = OrderedDict()  # None: seen once, or it cannot be captured
        self._failed = False
        self._pool: Any = None

    def run(self, images: Sequence[torch.Tensor]) -> torch.Tensor:
        """The vectors of images of MOST_PATCHES together at most."""
        shapes = tuple(tuple(one.shape) for one in images)
        if shapes not in self._seen:
            self._seen[shapes] = None
            if len(self._seen) > _KEPT:
                self._seen.popitem(last=False)
            return self._encode(images)
        self._seen.move_to_end(shapes)
        found = self._seen[shapes]
        if found is None and not self._failed:
            found = self._seen[shapes] = self._capture(images)
        if found is None:
            return self._encode(images)
        for mine, one in zip(found.pixels, images, strict=True):
            mine.copy_(one)
        found.graph.replay()
        return found.vectors.clone()

    def _capture(self, images: Sequence[torch.Tensor]) -> _Captured | None:
        pixels = tuple(one.clone() for one in images)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, serving, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), torch.cuda.Stream()
        stream.wait_stream(serving)
        collects = gc.isenabled()
        gc.disable()  # what is freed during a capture breaks it
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    vectors = self._encode(pixels)
                finally:
                    graph.capture_end()
        except RuntimeError:
            log.exception("an encoder cannot be captured: its kernels are launched one by one")
            self._failed = True
            return None
        finally:
            if collects:
                gc.enable()
        serving.wait_stream(stream)
        return _Captured(graph, pixels, vectors)
