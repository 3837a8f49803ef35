"""What a GPU does at best: bytes read a second, and bfloat16 operations a second, measured or of its data sheet."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.device_facts import DeviceFacts

_READ_BYTES = 2 << 30  # far more than any cache holds
_SIZE = 8192  # of the matrices: large enough for every multiprocessor, small enough for a GEMM of 2 ms
_WARM, _TIMED = 5, 20  # GEMMs: a GPU slows down under power within some of them


@dataclass(frozen=True)
class Limits:
    """The defaults are an H200's."""

    bytes_per_s: float = 4.58e12  # measured with a kernel that only reads
    flop_per_s: float = 790e12  # assumed for large bf16 GEMMs; the data sheet's peak is 989e12

    def times(self, count: int) -> Limits:
        """Of `count` GPUs together."""
        return Limits(self.bytes_per_s * count, self.flop_per_s * count)

    @classmethod
    def nominal(cls, facts: DeviceFacts) -> Limits:
        """Of a data sheet. Raises ConfigError for a GPU whose data sheet is not known here."""
        if facts.bytes_per_s is None or facts.flop_per_s is None:
            raise ConfigError(f"{facts.name} has no rates here; allowed: a GPU of DeviceFacts.named, or measured ones")
        return cls(facts.bytes_per_s, facts.flop_per_s)

    @classmethod
    def measured(cls, device: torch.device) -> Limits:
        """On this GPU, in half a second: a kernel that only reads, the best of ten; GEMMs, the median of twenty."""
        return cls(_bytes_per_s(device), _flop_per_s(device))


def _bytes_per_s(device: torch.device) -> float:
    from benchmarks.kernels.reading import read  # which needs Triton

    x = torch.zeros(_READ_BYTES // 4, dtype=torch.int32, device=device)
    return _READ_BYTES / min(_seconds(lambda: read(x), warm=3, timed=10))


def _flop_per_s(device: torch.device) -> float:
    generator = torch.Generator(device).manual_seed(0)
    # Not zeros, which take less power, and so are faster.
    a, b = (torch.randn(_SIZE, _SIZE, generator=generator, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    times = _seconds(lambda: torch.mm(a, b.t(), out=out), warm=_WARM, timed=_TIMED)
    return 2 * _SIZE**3 / statistics.median(times)


def _seconds(call: Callable[[], object], *, warm: int, timed: int) -> list[float]:
    """Of each of the timed calls, which follow one another."""
    for _ in range(warm):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(timed + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(second) / 1000 for first, second in itertools.pairwise(events)]
