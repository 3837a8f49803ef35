"""Captured decode steps: one graph for each of a few batch sizes, replayed with static inputs.

Its inputs are the staging buffer's own rows and lengths, so an upload is all that a replay needs; everything from the
token gather to the token scatter is inside. It samples by temperature alone. Behind it, for few rows, the kernels of
all other options are captured as well (`sampling_layout.SAMPLING_GRAPHS`): launched one by one they would take the host
longer than the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from minisgl_backend.attention.base import DecodeInputs
from minisgl_backend.attention.pair import AttentionPair, PairPlan
from minisgl_backend.kernels.sampling.layout import SAMPLING_GRAPHS
from minisgl_backend.process.progress import Progress
from minisgl_backend.runner.batch import BatchBuilder
from minisgl_backend.runner.graphs.capture import captured, many_captures

# With more rows the device works longer on a step than the host needs to launch the sampler's kernels.
LARGEST_SAMPLING_GRAPH = 16


@dataclass(frozen=True)
class DecodeOutputs:
    """What a decode step leaves behind; static tensors where it was captured."""

    # [batch, vocab_size], good until the next decode step; ranks other than 0, which sample nothing, may have none.
    logits: torch.Tensor
    token_ids: torch.Tensor  # int32 [2, batch], see sampler.Sampled


DecodeStep = Callable[[DecodeInputs, PairPlan], DecodeOutputs]
SampleStep = Callable[[DecodeInputs, DecodeOutputs, int], None]


@dataclass(frozen=True)
class DecodeSteps:
    """What is captured of each size."""

    decode: DecodeStep
    rehearse: DecodeStep  # every kernel of `decode` once, through few of its layers
    sample: SampleStep  # again what temperature alone does not decide, over these outputs; with one of SAMPLING_GRAPHS


class GraphRunner(ABC):
    """Decode steps of the sizes `sizes`, ascending; smaller batches are padded by the batch builder."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes

    @property
    def sampling_sizes(self) -> tuple[int, ...]:
        """Those that have sampling graphs."""
        return tuple(size for size in self.sizes if size <= LARGEST_SAMPLING_GRAPH)

    @abstractmethod
    def capture(self, steps: DecodeSteps, builder: BatchBuilder, attention: AttentionPair) -> None:
        """Makes all sizes ready; called once, before anything runs."""

    @abstractmethod
    def plan_replay(self, decode: DecodeInputs) -> None:
        """Brings attention's buffers up to date for the next replay; on the critical path."""

    @abstractmethod
    def replay(self, size: int) -> DecodeOutputs:
        """Runs the step on what was uploaded last."""

    @abstractmethod
    def replay_sampling(self, size: int, sampling_graph: int) -> None:
        """Samples again what `replay` of this size, one of `sampling_sizes`, has left; see SAMPLING_GRAPHS."""

    def close(self) -> None:  # noqa: B027  most runners have nothing to free
        """Frees what was captured; nothing can be replayed afterwards."""


class CudaGraphRunner(GraphRunner):
    """The real thing. All graphs share one memory pool; the largest comes first and the others fit into it."""

    def __init__(self, sizes: tuple[int, ...], on_progress: Progress | None = None) -> None:
        super().__init__(sizes)
        self._on_progress = on_progress or (lambda done, total: None)
        self._memory = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, DecodeOutputs]] = {}
        self._sampling: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}  # by size and one of SAMPLING_GRAPHS
        self._attention: AttentionPair | None = None

    def capture(self, steps: DecodeSteps, builder: BatchBuilder, attention: AttentionPair) -> None:
        attention.allocate_graph(self.sizes[-1])
        self._attention = attention
        stream = torch.cuda.Stream()
        with many_captures():
            for done, size in enumerate(reversed(self.sizes)):
                inputs = builder.padding_inputs(size)
                plan = attention.plan_capture(inputs)
                # The inputs are filled on this stream, in memory that may hold anything before.
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    self._capture(size, steps, inputs, plan)
                self._on_progress(done + 1, len(self.sizes))
            torch.cuda.current_stream().wait_stream(stream)

    def _capture(self, size: int, steps: DecodeSteps, inputs: DecodeInputs, plan: PairPlan) -> None:
        # Libraries choose kernels and allocate workspaces now, not under capture. The last sampling graph has the
        # kernels of all of them.
        rehearsed = steps.rehearse(inputs, plan)
        if size in self.sampling_sizes:
            steps.sample(inputs, rehearsed, SAMPLING_GRAPHS[-1])
        torch.cuda.current_stream().synchronize()
        with captured(self._memory) as graph:
            outputs = steps.decode(inputs, plan)
        self._graphs[size] = graph, outputs
        for kernels in SAMPLING_GRAPHS if size in self.sampling_sizes else ():
            with captured(self._memory) as sampling:
                steps.sample(inputs, outputs, kernels)
            self._sampling[size, kernels] = sampling

    def plan_replay(self, decode: DecodeInputs) -> None:
        assert self._attention is not None, "capture comes first"
        self._attention.plan_replay(decode)

    def replay(self, size: int) -> DecodeOutputs:
        graph, outputs = self._graphs[size]
        graph.replay()
        return outputs

    def replay_sampling(self, size: int, sampling_graph: int) -> None:
        self._sampling[size, sampling_graph].replay()

    def close(self) -> None:
        for graph in (*self._sampling.values(), *(graph for graph, _ in self._graphs.values())):
            graph.reset()
        self._sampling.clear()
        self._graphs.clear()


class EagerGraphRunner(GraphRunner):
    """The same padding, static inputs and outputs without a graph: for tests and for devices that have none."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__(sizes)
        self._steps: DecodeSteps | None = None
        self._inputs: dict[int, tuple[DecodeInputs, PairPlan]] = {}
        self._outputs: dict[int, DecodeOutputs] = {}
        self._attention: AttentionPair | None = None

    def capture(self, steps: DecodeSteps, builder: BatchBuilder, attention: AttentionPair) -> None:
        self._steps, self._attention = steps, attention
        for size in self.sizes:
            inputs = builder.padding_inputs(size)
            outputs = steps.rehearse(inputs, attention.plan(None, inputs))
            for kernels in SAMPLING_GRAPHS if size in self.sampling_sizes else ():
                steps.sample(inputs, outputs, kernels)

    def plan_replay(self, decode: DecodeInputs) -> None:
        assert self._attention is not None, "capture comes first"
        self._inputs[len(decode.kv_lens_host)] = (decode, self._attention.plan(None, decode))

    def replay(self, size: int) -> DecodeOutputs:
        assert self._steps is not None, "capture comes first"
        self._outputs[size] = self._steps.decode(*self._inputs[size])
        return self._outputs[size]

    def replay_sampling(self, size: int, sampling_graph: int) -> None:
        assert self._steps is not None, "capture comes first"
        decode, _ = self._inputs[size]
        self._steps.sample(decode, self._outputs[size], sampling_graph)


def graph_sizes(largest: int) -> tuple[int, ...]:
    """1, 2, 4, then every 8 up to 256 and every 32 above, and `largest` itself: padding wastes little of a step."""
    sizes = [size for size in (1, 2, 4, *range(8, 257, 8), *range(288, largest + 1, 32)) if size < largest]
    return (*sizes, largest) if largest > 0 else ()
