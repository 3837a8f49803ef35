"""How long kernels take: graphs of many calls, and each kernel of one step."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


class Timer:
    """Times graphs; or, as one of several processes that fill the kernel cache, only compiles its share."""

    def __init__(self, share: str | None) -> None:
        self._index, self._count = (int(part) for part in share.split("/")) if share else (0, 0)
        self._calls = 0

    @property
    def compiles_only(self) -> bool:
        return self._count > 0

    def __call__(self, calls: list[Callable[[], object]], replays: int = 15) -> float:
        self._calls += 1
        if not self._count:
            return time_graph(calls, replays)
        if self._calls % self._count == self._index:
            calls[0]()
        return 1.0


def time_graph(calls: list[Callable[[], object]], replays: int = 15) -> float:
    """Median microseconds of one call, over replays of a graph that makes all calls once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times[2:])


def profile_step(step: Callable[[], object]) -> None:
    """Prints the time of each kernel of one step, from graph replays."""
    graph = torch.cuda.CUDAGraph()
    step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    for event in sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)[:12]:
        per_call = event.self_device_time_total / event.count
        total, count = event.self_device_time_total / 3, event.count // 3
        print(f"    {total:9.1f} us a step, {count:4d} x {per_call:7.2f}  {event.key[:80]}")


def random_weights(*shape: int) -> torch.Tensor:
    """As small as a model's."""
    return (torch.randn(*shape, device="cuda") * 0.02).bfloat16()
