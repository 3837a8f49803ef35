"""Timing of calls on the device, by which kernels and algorithms are chosen at start."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

COLD_BYTES = 200 << 20  # of weights read in rotation, so that none of them stays in the L2 cache
TURNS = 5


def cold(num_weights: int, weight_bytes: int) -> int:
    """How many of `num_weights` equal weights to read in rotation, so that none stays in the L2 cache."""
    return min(num_weights, 1 + COLD_BYTES // weight_bytes)


class GraphTimer:
    """Calls captured as one graph, so that launches take no time. Runs on the current stream."""

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
        self.first = min(self._times)  # the very first run may have to load kernels to the device
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
        """Microseconds of one call: median over all runs after the first two."""
        return statistics.median(self._times)


def take_turns(timers: Sequence[GraphTimer]) -> None:
    """Runs the timers alternately, so that what disturbs one disturbs all."""
    for _ in range(TURNS):
        for timer in timers:
            timer.again()


class MeasuringStream:
    """One stream for all measurements of a device, since libraries keep a workspace per stream. The current stream
    waits for it."""

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
        torch.cuda.empty_cache()  # memory cached for this stream could not be used by later captures

    def recover(self) -> None:
        """To be called after a measurement that failed, e.g. out of memory."""
        torch.cuda.synchronize(self._device)  # raises errors that make the device unusable
        torch.cuda.empty_cache()

    def randn(self, rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Random numbers from its own generator: the state of torch's global one belongs to the caller."""
        generator = torch.Generator(self._device).manual_seed(0)
        return torch.randn(rows, size, generator=generator, device=self._device).to(dtype)


def is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Compares by a norm, not by the largest difference, which depends on the single number that was rounded worst."""
    return bool(_norm(found - expected) < 1e-2 * _norm(expected))


def _norm(values: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(values, dtype=torch.float32)
