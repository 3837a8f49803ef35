"""How long calls take on the device: what is measured at start to choose among kernels and algorithms."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

COLD_BYTES = 200 << 20  # of weights, one after the other: none of them stays in the L2 cache
TURNS = 5


def cold(num_weights: int, weight_bytes: int) -> int:
    """How many of as many equal weights are to be read in turn."""
    return min(num_weights, 1 + COLD_BYTES // weight_bytes)


class GraphTimer:
    """Calls captured as one graph, so that launching them takes no time of its own. Runs on the current stream."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self._graph = torch.cuda.CUDAGraph()
        calls[0]()
        self._graph.capture_begin(capture_error_mode="thread_local")
        try:
            for call in calls:
                call()
        finally:
            self._graph.capture_end()
        self._calls = len(calls)
        self._times: list[float] = []
        self.again()
        self.again()
        self.first = min(self._times)  # the very first run may have to bring things to the device
        self._times.clear()

    def again(self) -> None:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        self._times.append(start.elapsed_time(end) * 1000 / self._calls)

    @property
    def median(self) -> float:
        """Microseconds of one call, over all turns since the first two."""
        return statistics.median(self._times)


def take_turns(timers: Sequence[GraphTimer]) -> None:
    """Whatever disturbs one disturbs all."""
    for _ in range(TURNS):
        for timer in timers:
            timer.again()


class MeasuringStream:
    """One stream for all measurements of a device: libraries keep workspaces for each. What is current waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def current(self) -> Iterator[None]:
        stream = self._stream = self._stream or torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.empty_cache()  # what is captured next would get none of the memory that is kept for this stream

    def recover(self) -> None:
        """After a measurement that failed, for want of memory for one."""
        torch.cuda.synchronize(self._device)  # raises what leaves the device of no use
        torch.cuda.empty_cache()

    def randn(self, rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Not of torch's global generator, whose state belongs to the caller."""
        generator = torch.Generator(self._device).manual_seed(0)
        return torch.randn(rows, size, generator=generator, device=self._device).to(dtype)


def is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """By a norm, not by the largest difference: it may not depend on the single number that was rounded worst."""
    return bool(_norm(found - expected) < 1e-2 * _norm(expected))


def _norm(values: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(values, dtype=torch.float32)
