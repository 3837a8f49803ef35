"""Captured decode steps: one graph for each of a few batch sizes, replayed with static inputs.

Its inputs are the staging buffer's own rows and lengths, so an upload is all that a replay needs; everything from the
token gather to the token scatter is inside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from minisgl_backend.attention.base import DecodeInputs
from minisgl_backend.attention.hybrid import HybridAttention, HybridPlan
from minisgl_backend.runner.batch import BatchBuilder

Progress = Callable[[int, int], None]  # (sizes captured so far, sizes to capture)


@dataclass(frozen=True)
class DecodeOutputs:
    """What a decode step leaves behind; static tensors where it was captured."""

    logits: torch.Tensor  # [batch, vocab_size]
    token_ids: torch.Tensor  # int32 [2, batch], see sampler.Sampled


DecodeStep = Callable[[DecodeInputs, HybridPlan], DecodeOutputs]


class GraphRunner(ABC):
    """Decode steps of the sizes `sizes`, ascending; smaller batches are padded by the batch builder."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes

    @abstractmethod
    def capture(self, decode_step: DecodeStep, builder: BatchBuilder, attention: HybridAttention) -> None:
        """Makes all sizes ready; called once, before anything runs."""

    @abstractmethod
    def plan_replay(self, decode: DecodeInputs) -> None:
        """Brings attention's buffers up to date for the next replay; on the critical path."""

    @abstractmethod
    def replay(self, size: int) -> DecodeOutputs:
        """Runs the step on what was uploaded last."""

    def close(self) -> None:  # noqa: B027  most runners have nothing to free
        """Frees what was captured; nothing can be replayed afterwards."""


class CudaGraphRunner(GraphRunner):
    """The real thing. All graphs share one memory pool; the largest comes first and the others fit into it."""

    def __init__(self, sizes: tuple[int, ...], on_progress: Progress | None = None) -> None:
        super().__init__(sizes)
        self._on_progress = on_progress or (lambda done, total: None)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, DecodeOutputs]] = {}
        self._attention: HybridAttention | None = None

    def capture(self, decode_step: DecodeStep, builder: BatchBuilder, attention: HybridAttention) -> None:
        attention.allocate_graph(self.sizes[-1])
        self._attention = attention
        memory = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        for done, size in enumerate(reversed(self.sizes)):
            inputs = builder.padding_inputs(size)
            plan = attention.plan_capture(inputs)
            # The inputs are filled on this stream, in memory that may hold anything before.
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                decode_step(inputs, plan)  # libraries choose kernels and allocate workspaces now, not under capture
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=memory, stream=stream):
                    outputs = decode_step(inputs, plan)
            self._graphs[size] = (graph, outputs)
            self._on_progress(done + 1, len(self.sizes))
        torch.cuda.current_stream().wait_stream(stream)

    def plan_replay(self, decode: DecodeInputs) -> None:
        assert self._attention is not None, "capture comes first"
        self._attention.plan_replay(decode)

    def replay(self, size: int) -> DecodeOutputs:
        graph, outputs = self._graphs[size]
        graph.replay()
        return outputs

    def close(self) -> None:
        for graph, _ in self._graphs.values():
            graph.reset()
        self._graphs.clear()


class EagerGraphRunner(GraphRunner):
    """The same padding, static inputs and outputs without a graph: for tests and for devices that have none."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__(sizes)
        self._steps: dict[int, Callable[[], DecodeOutputs]] = {}
        self._decode_step: DecodeStep | None = None
        self._attention: HybridAttention | None = None

    def capture(self, decode_step: DecodeStep, builder: BatchBuilder, attention: HybridAttention) -> None:
        self._decode_step = decode_step
        self._attention = attention
        for size in self.sizes:
            inputs = builder.padding_inputs(size)
            decode_step(inputs, attention.plan(None, inputs))

    def plan_replay(self, decode: DecodeInputs) -> None:
        assert self._attention is not None, "capture comes first"
        assert self._decode_step is not None, "capture comes first"
        decode_step, plan = self._decode_step, self._attention.plan(None, decode)
        self._steps[decode.batch_size] = lambda: decode_step(decode, plan)

    def replay(self, size: int) -> DecodeOutputs:
        return self._steps[size]()


def graph_sizes(largest: int) -> tuple[int, ...]:
    """1, 2, 4, then every 8 up to 256 and every 32 above, and `largest` itself: padding wastes little of a step."""
    sizes = [size for size in (1, 2, 4, *range(8, 257, 8), *range(288, largest + 1, 32)) if size < largest]
    return (*sizes, largest) if largest > 0 else ()
