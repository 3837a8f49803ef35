"""Captured decode steps: one graph for each of a few batch sizes, replayed with static inputs. Where attention takes
other kernels for long contexts, a size has another graph for those.

A graph reads the staging buffer's own rows and lengths, so a replay only needs the upload; everything from the token
gather to the token scatter is inside. It samples with the temperature only. For few rows, the kernels of all other
sampling options are captured as separate graphs (`sampling.layout.SAMPLING_GRAPHS`), which run after it: launching them
one by one would take the host longer than the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from minisgl_backend.attention.base import DecodeInputs
from minisgl_backend.attention.pair import AttentionPair, PairPlan
from minisgl_backend.kernels.sampling.layout import SAMPLING_GRAPHS
from minisgl_backend.process.progress import Progress
from minisgl_backend.runner.batch import BatchBuilder
from minisgl_backend.runner.graphs.capture import captured, many_captures
from minisgl_backend.speculative_config import DRAFT_ENTRIES

# With more rows the device works longer on a step than the host needs to launch the sampler's kernels.
LARGEST_SAMPLING_GRAPH = 16


@dataclass(frozen=True)
class DecodeOutputs:
    """Outputs of a decode step; static tensors where it was captured."""

    # [batch, vocab_size], valid until the next decode step; ranks other than 0, which do not sample, may have none.
    logits: torch.Tensor
    token_ids: torch.Tensor  # int32 [2, batch], see sampler.Sampled


DecodeStep = Callable[[DecodeInputs, PairPlan], DecodeOutputs]
SampleStep = Callable[[DecodeInputs, DecodeOutputs, int], None]


class DecodeParts(NamedTuple):
    """A decode step in two parts: logits [batch, vocab_size], and what is sampled of them."""

    logits: Callable[[DecodeInputs, PairPlan], torch.Tensor]
    sample: Callable[[DecodeInputs, torch.Tensor], DecodeOutputs]


@dataclass(frozen=True)
class DecodeSteps:
    """The functions that are captured for each size."""

    decode: DecodeStep
    warm_up: DecodeStep  # every kernel of `decode` once, through few of its layers
    # Samples the rows that need more than temperature again, into these outputs; with one of SAMPLING_GRAPHS. None:
    # there are no sampling graphs.
    sample: SampleStep | None
    parts: DecodeParts | None = None  # None: it has one


_Captured = tuple[torch.cuda.CUDAGraph, DecodeOutputs]


class GraphRunner(ABC):
    """Decode steps of the sizes `sizes`, ascending; smaller batches are padded by the batch builder."""

    _attention: AttentionPair  # of `capture`

    def __init__(self, sizes: tuple[int, ...], draft_sizes: tuple[int, ...] = ()) -> None:
        """`draft_sizes`: those of `sizes` that serve steps with drafts, too."""
        self.sizes = sizes
        self.draft_sizes = draft_sizes

    @property
    def sampling_sizes(self) -> tuple[int, ...]:
        """Sizes that have sampling graphs."""
        return tuple(size for size in self.sizes if size <= LARGEST_SAMPLING_GRAPH)

    @abstractmethod
    def capture(self, steps: DecodeSteps, builder: BatchBuilder, attention: AttentionPair) -> None:
        """Captures all sizes; called once, before anything runs."""

    @abstractmethod
    def plan_replay(self, decode: DecodeInputs) -> None:
        """Updates attention's buffers for the next replay; on the critical path."""

    @abstractmethod
    def replay(self, size: int, *, has_drafts: bool = False) -> DecodeOutputs:
        """Runs the step on the last upload; `has_drafts`: for a size of `draft_sizes`."""

    @abstractmethod
    def replay_sampling(self, size: int, sampling_graph: int) -> None:
        """Samples the outputs of `replay` of this size, one of `sampling_sizes`, again; see SAMPLING_GRAPHS."""

    def close(self) -> None:  # noqa: B027  most runners have nothing to free
        """Frees the captured graphs; nothing can be replayed afterwards."""


class CudaGraphRunner(GraphRunner):
    """CUDA graphs. All share one memory pool; the largest is captured first and the others reuse its memory."""

    def __init__(
        self, sizes: tuple[int, ...], on_progress: Progress | None = None, draft_sizes: tuple[int, ...] = ()
    ) -> None:
        super().__init__(sizes, draft_sizes)
        self._on_progress = on_progress or (lambda done, total: None)
        self._memory = torch.cuda.graph_pool_handle()
        # By size and range of context lengths, see AttentionPair.length_bounds.
        self._graphs: dict[tuple[int, int], _Captured] = {}
        # For sizes whose normal graph does not work with drafts: it stores keys and attends in one kernel, or takes the
        # entries for those of different rows, which have states.
        self._draft_graphs: dict[int, _Captured] = {}
        # By size, range and one of SAMPLING_GRAPHS.
        self._sampling: dict[tuple[int, int, int], torch.cuda.CUDAGraph] = {}
        self._bounds: dict[int, tuple[int, ...]] = {}  # of sizes that have several ranges
        self._ranges: dict[int, int] = {}  # by size: that of the last `plan_replay`

    def capture(self, steps: DecodeSteps, builder: BatchBuilder, attention: AttentionPair) -> None:
        attention.allocate_graph(self.sizes[-1])
        self._attention = attention
        stream = torch.cuda.Stream()
        with many_captures():
            for done, size in enumerate(reversed(self.sizes)):
                if bounds := attention.length_bounds(size):
                    self._bounds[size] = bounds
                for index, length in enumerate((1, *(bound + 1 for bound in bounds))):
                    # Only the host's lengths choose the kernels; on the device it is padding.
                    lengths = np.full(size, length, dtype=np.int32)
                    inputs = replace(builder.padding_inputs(size), kv_lens_host=lengths)
                    plan = attention.plan_capture(inputs)
                    # The inputs are filled on this stream, in uninitialised memory.
                    stream.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(stream):
                        self._capture(size, index, steps, inputs, plan)
                        if size in self.draft_sizes and (plan.window is not None or attention.fuses_some_rope(plan)):
                            inputs = replace(inputs, has_drafts=True)
                            self._draft_graphs[size] = self._captured(steps, inputs, attention.plan_capture(inputs))
                self._on_progress(done + 1, len(self.sizes))
            torch.cuda.current_stream().wait_stream(stream)

    def _capture(self, size: int, index: int, steps: DecodeSteps, inputs: DecodeInputs, plan: PairPlan) -> None:
        """index: of the range of context lengths."""
        sample = steps.sample if size in self.sampling_sizes else None
        graph, outputs = self._captured(steps, inputs, plan, sample)
        self._graphs[size, index] = graph, outputs
        if sample is not None:
            for kernels in SAMPLING_GRAPHS:
                with captured(self._memory) as sampling:
                    sample(inputs, outputs, kernels)
                self._sampling[size, index, kernels] = sampling

    def _captured(
        self, steps: DecodeSteps, inputs: DecodeInputs, plan: PairPlan, sample: SampleStep | None = None
    ) -> _Captured:
        """A decode step; `sample`: what samples its outputs again."""
        # Libraries choose kernels and allocate workspaces now, not during the capture. The last sampling graph has all
        # kernels of the others.
        warmed_up = steps.warm_up(inputs, plan)
        if sample is not None:
            sample(inputs, warmed_up, SAMPLING_GRAPHS[-1])
        torch.cuda.current_stream().synchronize()
        with captured(self._memory) as graph:
            outputs = steps.decode(inputs, plan)
        return graph, outputs

    def plan_replay(self, decode: DecodeInputs) -> None:
        self._attention.plan_replay(decode)
        if (bounds := self._bounds.get(decode.batch_size)) is not None:
            self._ranges[decode.batch_size] = bisect_left(bounds, float(decode.kv_lens_host.mean()))

    def replay(self, size: int, *, has_drafts: bool = False) -> DecodeOutputs:
        if has_drafts and size in self._draft_graphs:
            graph, outputs = self._draft_graphs[size]
        else:
            graph, outputs = self._graphs[size, self._ranges.get(size, 0)]
        graph.replay()
        return outputs

    def replay_sampling(self, size: int, sampling_graph: int) -> None:
        self._sampling[size, self._ranges.get(size, 0), sampling_graph].replay()

    def close(self) -> None:
        steps = (*self._graphs.values(), *self._draft_graphs.values())
        for graph in (*self._sampling.values(), *(graph for graph, _ in steps)):
            graph.reset()
        self._sampling.clear()
        self._graphs.clear()
        self._draft_graphs.clear()


class EagerGraphRunner(GraphRunner):
    """The same padding, static inputs and outputs without a graph: for tests and for devices that have none."""

    def __init__(self, sizes: tuple[int, ...], draft_sizes: tuple[int, ...] = ()) -> None:
        super().__init__(sizes, draft_sizes)
        self._steps: DecodeSteps  # of `capture`
        self._inputs: dict[int, tuple[DecodeInputs, PairPlan]] = {}
        self._outputs: dict[int, DecodeOutputs] = {}

    def capture(self, steps: DecodeSteps, builder: BatchBuilder, attention: AttentionPair) -> None:
        self._steps, self._attention = steps, attention
        for size in self.sizes:
            inputs = builder.padding_inputs(size)
            outputs = steps.warm_up(inputs, attention.plan(None, inputs))
            if steps.sample is not None and size in self.sampling_sizes:
                for kernels in SAMPLING_GRAPHS:
                    steps.sample(inputs, outputs, kernels)

    def plan_replay(self, decode: DecodeInputs) -> None:
        self._inputs[len(decode.kv_lens_host)] = (decode, self._attention.plan(None, decode))

    def replay(self, size: int, *, has_drafts: bool = False) -> DecodeOutputs:
        self._outputs[size] = self._steps.decode(*self._inputs[size])
        return self._outputs[size]

    def replay_sampling(self, size: int, sampling_graph: int) -> None:
        assert self._steps.sample is not None, "there are sampling graphs"
        decode, _ = self._inputs[size]
        self._steps.sample(decode, self._outputs[size], sampling_graph)


def draft_sizes(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes that serve steps with drafts: from one row with one draft up to the largest step for which drafts pay."""
    return tuple(size for size in sizes if 2 <= size <= DRAFT_ENTRIES)


def graph_sizes(largest: int) -> tuple[int, ...]:
    """1, 2, 4, then every 8 up to 256 and every 32 above, and `largest` itself: padding wastes little of a step."""
    sizes = [size for size in (1, 2, 4, *range(8, 257, 8), *range(288, largest + 1, 32)) if size < largest]
    return (*sizes, largest) if largest > 0 else ()
