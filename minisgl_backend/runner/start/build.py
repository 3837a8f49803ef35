"""Builds a ready runner from resolved settings: model, attention, KV pool of the right size, captured graphs.

The build order follows memory use: weights, then measured worst-case steps (whose kernels are compiled before, several
at a time), then KV pages in the remaining memory, then graphs, then warm-up steps that load all other kernels.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from minisgl_backend.attention.base import AttentionSpec
from minisgl_backend.attention.pair import AttentionPair
from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.select import mixture_token_counts
from minisgl_backend.kv.groups import room_in
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.runner.graphs.pieces import EagerPieces, PiecewiseCudaGraph, PiecewiseRunner, piece_sizes
from minisgl_backend.runner.graphs.recorded import RecordedGraphRunner
from minisgl_backend.runner.graphs.whole import (
    CudaGraphRunner,
    EagerGraphRunner,
    GraphRunner,
    draft_sizes,
    graph_sizes,
)
from minisgl_backend.runner.model_runner import Captures, ModelRunner
from minisgl_backend.runner.start.capturable import can_be_captured
from minisgl_backend.runner.start.compiling import name_kernels
from minisgl_backend.runner.start.device import free_bytes, is_out_of_memory
from minisgl_backend.runner.start.draft import proposer_class
from minisgl_backend.runner.start.encoder import reserved_bytes
from minisgl_backend.runner.start.memory import bytes_left, choose_graph_max_bs, choose_num_pages, profile_run
from minisgl_backend.runner.start.parts import Parts, Start, StartProgress, load_parts
from minisgl_backend.runner.start.repacked import repack_weights, room_for_repacked
from minisgl_backend.runner.start.runtime_config import RuntimeConfig
from minisgl_backend.runner.start.states import choose_states
from minisgl_backend.runner.start.warm_up import StepLimits, compile_kernels, warm_up
from minisgl_backend.speculative_config import DRAFT_ENTRIES
from minisgl_backend.tensor_parallel import TensorParallel, device_of_rank

log = logging.getLogger(__name__)


class _Room(NamedTuple):
    """What the largest steps leave: bytes that a step takes, and what is captured."""

    step_bytes: int
    sizes: tuple[int, ...]  # of decode steps
    pieces: tuple[int, ...]  # of forward passes, in tokens


def build_runner(
    runtime: RuntimeConfig,
    model_config: ModelConfig,
    tp: TensorParallel | None = None,
    progress: StartProgress | None = None,
) -> ModelRunner:
    """The runner of one rank, ready for its first plan; a scheduler may allocate `ModelRunner.num_pages` pages.

    With tensor parallelism all ranks call this at the same time. Raises ConfigError where memory is too small, saying
    what to lower.
    """
    tp = tp or TensorParallel.single()
    progress = progress or StartProgress()
    device = device_of_rank(runtime.device, runtime.device_index(tp.rank))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        return _build(runtime, model_config, device, tp, progress)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(_out_of_memory(runtime, device, error)) from error


def _build(
    runtime: RuntimeConfig, model_config: ModelConfig, device: torch.device, tp: TensorParallel, progress: StartProgress
) -> ModelRunner:
    start = Start(
        runtime=runtime, model=model_config, device=device, tp=tp, progress=progress, free_at_start=free_bytes(device)
    )
    if start.shares_memory:
        most_rows = runtime.max_prefill_length + runtime.most_decode_entries
        tp.share_memory(model_config.hidden_size, getattr(torch, runtime.dtype), most_rows)
    parts = load_parts(start)
    if device.type == "cuda" and isinstance(parts.model, torch.nn.Module):
        room = room_for_repacked(runtime, parts.spec, parts.places, start.free_at_start)
        repack_weights(parts.model.modules(), tp.minimum(room))
    progress.phase_ended("weights")
    moe = model_config.mixture
    counts = mixture_token_counts(device, moe.num_experts, moe.experts_per_token) if moe is not None else ()
    limits = StepLimits(runtime.most_decode_entries, runtime.max_prefill_length, runtime.max_seq_len, counts)
    step_bytes, sizes, pieces = _room(start, parts, limits)
    states = None
    if model_config.has_states:
        states = choose_states(runtime, model_config, bytes_left(runtime, device, start.free_at_start, step_bytes))
    if states is not None:
        states = states._replace(num_slots=tp.minimum(states.num_slots))
        step_bytes += states.num_bytes
    num_pages = tp.minimum(choose_num_pages(runtime, parts.spec, parts.places, start.free_at_start, step_bytes))
    graphs, captured_pieces = _captures(sizes, pieces, start, progress)
    adapted = None
    if parts.adapters is not None and (
        device.type == "cuda" or runtime.eager_graphs
    ):  # on a CPU torch adds what adapters do
        adapted = _captures(sizes, (), start, StartProgress())[0]
    own = _proposer_graphs(sizes, runtime)
    captures = Captures(graphs, captured_pieces, runtime.max_prefill_length, own, adapted)
    runner = parts.runner(num_pages, captures, states)
    progress.phase_ended("choice of kernels and graphs")
    if device.type == "cuda" or runtime.eager_graphs:
        warm_up(runner, limits)
        progress.phase_ended("warm-up")
    graphs_of = [f"graphs up to {max(sizes)} sequences"] if sizes else []
    graphs_of += [f"in pieces up to {max(pieces)} tokens"] if pieces else []
    if states is not None:
        log.info("%d slots for states of %d KiB", states.num_slots, states.layout.bytes_per_slot >> 10)
    log.info(
        "%d pages of %d tokens, %s%s, %s",
        num_pages,
        runtime.page_size,
        room_in(parts.spec.columns, runtime.page_size, num_pages, runtime.max_seq_len),
        _kept_whole(runtime, parts.spec),
        ", ".join(graphs_of) or "no CUDA graphs",
    )
    return runner


def _room(start: Start, parts: Parts, limits: StepLimits) -> _Room:
    """On a GPU by executing the largest steps."""
    runtime, tp, attention = start.runtime, start.tp, parts.attention
    graph_max_bs, pieces = runtime.cuda_graph_max_bs, piece_sizes(runtime.cuda_graph_max_tokens)
    if start.device.type != "cuda":
        largest = graph_max_bs or 0
        sizes = _graph_sizes(largest, runtime, attention) if runtime.eager_graphs else _recorded_sizes(largest, parts)
        return _Room(0, sizes, pieces)
    name_kernels()
    trial = parts.runner(1)
    if tp.size == 1:  # ranks whose kernel caches differ would not execute the same steps
        compile_kernels(trial, limits)
    start.progress.phase_ended("kernels")
    steps = profile_run(trial, runtime, start.device)
    start.progress.phase_ended("largest steps")
    has_graphs = runtime.eager_graphs or attention.supports_graphs
    if start.model.implementation != "native":
        one_row = (1,) if graph_max_bs != 0 and has_graphs else ()
        first = Captures(*_captures(one_row, pieces[:1], start, StartProgress()))
        if not can_be_captured(start.model.architecture, parts, first):
            graph_max_bs, pieces = 0, ()
    if graph_max_bs is None:
        free_now = free_bytes(start.device)
        graph_max_bs = tp.minimum(choose_graph_max_bs(steps.decode, limits.max_running, free_now))
    if start.shares_memory and graph_max_bs > 0 and has_graphs:  # before pages take what memory is left
        tp.share_logits(graph_max_bs, start.model.vocab_size, getattr(torch, runtime.dtype))
    # The last term includes sampling graphs: in the measured decode step all rows edit their logits.
    step_bytes = steps.mixed + steps.pieces + steps.decode * graph_max_bs // limits.max_running
    if parts.adapters is not None:  # graphs of steps with adapters, beside those without
        step_bytes += steps.decode * graph_max_bs // limits.max_running
    step_bytes += reserved_bytes(runtime, start.model)
    return _Room(step_bytes, _graph_sizes(graph_max_bs, runtime, attention), pieces)


def _graph_sizes(largest: int, runtime: RuntimeConfig, attention: AttentionPair) -> tuple[int, ...]:
    if largest and not (runtime.eager_graphs or attention.supports_graphs):
        log.warning("attention backend %s has no CUDA graphs; decode runs without them", runtime.decode_backend)
        return ()
    return graph_sizes(largest)


def _recorded_sizes(largest: int, parts: Parts) -> tuple[int, ...]:
    """Of decode steps on a CPU: all up to `largest`, since padding would be computed; none where Python decides what a
    step computes, and for models of whose steps that is not tested."""
    start = parts.start
    is_plain = start.tp.size == 1 and start.model.implementation == "native" and not start.model.has_states
    is_plain = is_plain and start.runtime.config.speculation is None and parts.vectors is None
    records = is_plain and parts.attention.supports_graphs and not parts.spec.page_states
    return tuple(range(1, largest + 1)) if records else ()


def _captures(
    sizes: tuple[int, ...], pieces: tuple[int, ...], start: Start, progress: StartProgress
) -> tuple[GraphRunner | None, PiecewiseRunner | None]:
    """Of decode steps of these sizes, and of forward passes in these pieces, in one progress report."""
    runtime = start.runtime
    first, total = len(sizes), len(sizes) + len(pieces)
    graphs: GraphRunner | None = None
    if sizes:
        with_drafts = draft_sizes(sizes) if runtime.config.speculation is not None else ()
        if runtime.eager_graphs:
            graphs = EagerGraphRunner(sizes, with_drafts)
        elif start.device.type == "cpu":
            graphs = RecordedGraphRunner(sizes)
        else:
            graphs = CudaGraphRunner(sizes, lambda done, _: progress.graphs(done, total), with_drafts)
    if not pieces:
        return graphs, None
    kind: type[PiecewiseRunner] = EagerPieces if runtime.eager_graphs else PiecewiseCudaGraph
    return graphs, kind(pieces, start.model.hidden_size, lambda done, _: progress.graphs(first + done, total))


def _proposer_graphs(sizes: tuple[int, ...], runtime: RuntimeConfig) -> GraphRunner | None:
    """For the passes of a proposer on the device: the model's sizes up to those of steps with drafts."""
    own = tuple(size for size in sizes if size <= DRAFT_ENTRIES)
    if proposer_class(runtime.config.speculation) is None or not own:
        return None
    return EagerGraphRunner(own, own) if runtime.eager_graphs else CudaGraphRunner(own, draft_sizes=own)


def _kept_whole(runtime: RuntimeConfig, spec: AttentionSpec) -> str:
    """Why layers with windows keep the pages of all tokens, where they do; else ""."""
    if (
        len(spec.cache_groups) > 1
        or not spec.cache_groups[0].kind.keeps_all
        or all(group.sees_all for group in spec.groups)
    ):
        return ""
    if runtime.draft is not None:
        reason = "the draft model's layers share their pages"
    elif len({group.kv for group in spec.groups}) > 1:
        reason = "layers differ in the size of a token"
    else:
        reason = "that would save little"
    return f" (layers with windows keep all tokens, since {reason})"


def _out_of_memory(runtime: RuntimeConfig, device: torch.device, error: Exception) -> str:
    config = runtime.config
    pages = "" if config.num_pages is None else f" num_pages ({config.num_pages}),"
    return (
        f"out of memory on {device} while starting; lower{pages} max_prefill_length ({runtime.max_prefill_length}), "
        f"max_running_requests ({config.max_running_requests}), cuda_graph_max_bs, cuda_graph_max_tokens "
        f"({runtime.cuda_graph_max_tokens}) or memory_ratio ({config.memory_ratio}), or raise tp. "
        f"The failed allocation: {str(error).splitlines()[0]}"
    )
