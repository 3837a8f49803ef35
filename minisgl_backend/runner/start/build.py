"""Builds a ready runner from resolved settings: model, attention, KV pool of the right size, captured graphs.

The build order follows memory use: weights, then measured worst-case steps (whose kernels are compiled before, several
at a time), then KV pages in the remaining memory, then graphs, then warm-up steps that load all other kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from minisgl_backend.attention.base import AttentionSpec
from minisgl_backend.attention.pair import AttentionPair
from minisgl_backend.attention.registry import create_attention
from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.select import mixture_token_counts
from minisgl_backend.kv.groups import room_in
from minisgl_backend.kv.layout import ONE
from minisgl_backend.kv.pool import KVPool, LayerPlace, places_after
from minisgl_backend.models.build import attention_spec, build_model
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.decoder import CausalLM
from minisgl_backend.process.progress import Progress
from minisgl_backend.runner.graphs.pieces import EagerPieces, PiecewiseCudaGraph, PiecewiseRunner, piece_sizes
from minisgl_backend.runner.graphs.whole import (
    CudaGraphRunner,
    EagerGraphRunner,
    GraphRunner,
    draft_sizes,
    graph_sizes,
)
from minisgl_backend.runner.model_runner import Model, ModelRunner
from minisgl_backend.runner.proposers.context import ProposerContext
from minisgl_backend.runner.row_table import RowTable
from minisgl_backend.runner.start.capturable import can_be_captured
from minisgl_backend.runner.start.compiling import name_kernels
from minisgl_backend.runner.start.device import free_bytes, is_out_of_memory
from minisgl_backend.runner.start.draft import draft_spec, keeping_for, proposer_class
from minisgl_backend.runner.start.memory import choose_graph_max_bs, choose_num_pages, profile_run
from minisgl_backend.runner.start.runtime_config import RuntimeConfig
from minisgl_backend.runner.start.second_layouts import add_second_layouts, room_for_second_layouts
from minisgl_backend.runner.start.warm_up import compile_kernels, warm_up
from minisgl_backend.sampling.metadata import SamplingRows
from minisgl_backend.sampling.sampler import Sampler, sampling_workspace
from minisgl_backend.speculative_config import DRAFT_ENTRIES
from minisgl_backend.tensor_parallel import TensorParallel, device_of_rank
from minisgl_backend.weights.formats import QuantizationConfig
from minisgl_backend.weights.kv_scales import read_kv_scales

log = logging.getLogger(__name__)


def _silent(*_: object) -> None:
    pass


@dataclass(frozen=True)
class StartProgress:
    """Progress that a start reports: bytes of weights read, graphs captured, names of phases that have ended."""

    weights: Progress = field(default=_silent)
    graphs: Progress = field(default=_silent)
    phase_ended: Callable[[str], None] = field(default=_silent)


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
    # GPUs can only open each other's memory on one machine; over several, all sums use NCCL.
    shares_memory = not runtime.config.disable_pynccl and runtime.config.nodes == 1
    if shares_memory:
        most_rows = runtime.max_prefill_length + runtime.most_decode_entries
        tp.share_memory(model_config.hidden_size, getattr(torch, runtime.dtype), most_rows)
    free_at_start = free_bytes(device)
    spec, places, attention, runner_with = _load(runtime, model_config, device, tp, progress, free_at_start)
    progress.phase_ended("weights")
    max_running, moe = runtime.most_decode_entries, model_config.mixture
    counts = mixture_token_counts(device, moe.num_experts, moe.experts_per_token) if moe is not None else ()
    limits = (max_running, runtime.max_prefill_length, runtime.max_seq_len, counts)
    step_bytes, graph_max_bs, pieces = 0, runtime.cuda_graph_max_bs, piece_sizes(runtime.cuda_graph_max_tokens)
    if device.type == "cuda":
        name_kernels()
        trial = runner_with(1)
        if tp.size == 1:  # ranks whose kernel caches differ would not execute the same steps
            compile_kernels(trial, *limits)
        progress.phase_ended("kernels")
        steps = profile_run(trial, runtime, device)
        progress.phase_ended("largest steps")
        has_graphs = runtime.eager_graphs or attention.supports_graphs
        if model_config.implementation != "native":
            one_row = (1,) if graph_max_bs != 0 and has_graphs else ()
            first = _captures(one_row, pieces[:1], runtime, model_config.hidden_size, StartProgress())
            if not can_be_captured(model_config.architecture, runner_with, *first):
                graph_max_bs, pieces = 0, ()
        if graph_max_bs is None:
            graph_max_bs = tp.minimum(choose_graph_max_bs(steps.decode, max_running, free_bytes(device)))
        if shares_memory and graph_max_bs > 0 and has_graphs:  # before pages take what memory is left
            tp.share_logits(graph_max_bs, model_config.vocab_size, getattr(torch, runtime.dtype))
        # The last term includes sampling graphs: in the measured decode step all rows edit their logits.
        step_bytes = steps.mixed + steps.pieces + steps.decode * graph_max_bs // max_running
    num_pages = tp.minimum(choose_num_pages(runtime, spec, places, free_at_start, step_bytes))
    sizes = _graph_sizes(graph_max_bs or 0, runtime, attention)
    graphs, captured_pieces = _captures(sizes, pieces, runtime, model_config.hidden_size, progress)
    runner = runner_with(
        num_pages,
        graphs=graphs,
        pieces=captured_pieces,
        longest_prefill=runtime.max_prefill_length,
        proposer_graphs=_proposer_graphs(sizes, runtime),
    )
    progress.phase_ended("choice of kernels and graphs")
    if device.type == "cuda" or runtime.eager_graphs:
        warm_up(runner, *limits)
        progress.phase_ended("warm-up")
    graphs_of = [f"graphs up to {max(sizes)} sequences"] if sizes else []
    graphs_of += [f"in pieces up to {max(pieces)} tokens"] if pieces else []
    log.info(
        "%d pages of %d tokens, %s%s, %s",
        num_pages,
        runtime.page_size,
        room_in(spec.columns, runtime.page_size, num_pages, runtime.max_seq_len),
        _kept_whole(runtime, spec),
        ", ".join(graphs_of) or "no CUDA graphs",
    )
    return runner


def _load(
    runtime: RuntimeConfig,
    model_config: ModelConfig,
    device: torch.device,
    tp: TensorParallel,
    progress: StartProgress,
    free_at_start: int,
) -> tuple[AttentionSpec, tuple[LayerPlace, ...], AttentionPair, Callable[..., ModelRunner]]:
    """Everything that does not depend on the number of pages: the model's attention spec, the places in the pool of
    all layers including the proposer's, the attention pair, and a function from a number of pages to a runner, which
    also takes the captures of ModelRunner."""
    config, dtype = runtime.config, getattr(torch, runtime.dtype)
    model = _build_model(runtime, model_config, device, tp, progress)
    spec = attention_spec(
        model_config,
        tp_size=tp.size,
        page_size=runtime.page_size,
        max_seq_len=runtime.max_seq_len,
        max_rows=runtime.most_decode_entries + 1,
        dtype=dtype,
        kv_dtype=getattr(torch, runtime.kv_dtype),
        device=device,
        flashinfer_tensor_cores=runtime.flashinfer_tensor_cores,
        most_cache_groups=runtime.most_cache_groups,
    )
    spec = keeping_for(spec, draft_spec(runtime, runtime.draft, device) if runtime.draft is not None else None)
    is_quantized = any(group.kv.is_fp8 for group in spec.groups)
    reads_scales = is_quantized and not config.dummy_weights
    scales = (
        read_kv_scales(model_config.num_layers, runtime.model_dir, model_config.tensor_names) if reads_scales else None
    )
    attention = create_attention(runtime.prefill_backend, runtime.decode_backend, spec, runtime.decode_by_batch)
    table = RowTable(
        max_running=runtime.most_decode_entries,
        max_seq_len=runtime.max_seq_len,
        page_size=runtime.page_size,
        device=device,
        columns=spec.columns,
    )
    vocab_size, eos_token_ids = model_config.vocab_size, model_config.eos_token_ids
    sampling = SamplingRows(table.max_rows, vocab_size, eos_token_ids, runtime.max_seq_len, device)
    workspace = sampling_workspace(table.max_rows, vocab_size, device)
    sampler = Sampler(table.params, table.tokens, sampling.penalties, sampling.rules, workspace)
    proposer = None
    if (proposes := proposer_class(config.speculation)) is not None:
        proposer = proposes(
            ProposerContext(  # type: ignore[arg-type]  # which classes of the table take
                runtime=runtime,
                device=device,
                table=table,
                sampler=sampler,
                tp=(own_tp := tp.without_shared_memory()),
                target=model,
                load_model=lambda draft, folder: _build_native(runtime, draft, folder, device, own_tp, progress),
            )
        )
    places = (*spec.places, *places_after(spec.places, () if proposer is None else proposer.places))
    if device.type == "cuda" and isinstance(model, torch.nn.Module):
        add_second_layouts(model.modules(), tp.minimum(room_for_second_layouts(runtime, spec, places, free_at_start)))
    if scales is not None:
        kept = [layer.mixer.attention is not None for layer in model_config.layers]
        scales = [scale for scale, is_kept in zip(scales, kept, strict=True) if is_kept]
        scales += [ONE] * (len(places) - len(scales))

    def runner_with(num_pages: int, **captures: Any) -> ModelRunner:
        return ModelRunner(
            model=model,
            attention=attention,
            pool=KVPool(places, spec.page_size, num_pages, device, scales),
            table=table,
            sampling=sampling,
            sampler=sampler,
            tp=tp,
            proposer=proposer,
            **captures,
        )

    return spec, places, attention, runner_with


def _build_model(
    runtime: RuntimeConfig, model_config: ModelConfig, device: torch.device, tp: TensorParallel, progress: StartProgress
) -> Model:
    config = runtime.config
    if model_config.implementation == "native":
        quantization = model_config.quantization.with_option(config.quantization)
        return _build_native(runtime, model_config, runtime.model_dir, device, tp, progress, quantization)
    from minisgl_backend.models.fallback.build import build_fallback  # imports transformers, which no family needs

    return build_fallback(
        model_config,
        Path(runtime.model_dir),
        dtype=getattr(torch, runtime.dtype),
        device=device,
        max_seq_len=runtime.max_seq_len,
        dummy_weights=config.dummy_weights,
        trust_remote_code=config.trust_remote_code,
        on_progress=progress.weights,
    )


def _build_native(
    runtime: RuntimeConfig,
    model_config: ModelConfig,
    model_dir: str,
    device: torch.device,
    tp: TensorParallel,
    progress: StartProgress,
    quantization: QuantizationConfig | None = None,
) -> CausalLM:
    """`quantization`: None: the checkpoint's."""
    return build_model(
        model_config,
        model_dir,
        dtype=getattr(torch, runtime.dtype),
        device=device,
        max_seq_len=runtime.max_seq_len,
        tp=tp,
        quantization=quantization,
        dummy_weights=runtime.config.dummy_weights,
        on_progress=progress.weights,
        uses_draft_layer=runtime.draft is not None
        and runtime.draft.model.tensor_names.within in model_config.draft_prefixes,
    )


def _graph_sizes(largest: int, runtime: RuntimeConfig, attention: AttentionPair) -> tuple[int, ...]:
    if runtime.eager_graphs:
        return graph_sizes(largest)
    if largest and not attention.supports_graphs:
        log.warning("attention backend %s has no CUDA graphs; decode runs without them", runtime.decode_backend)
        return ()
    return graph_sizes(largest)


def _captures(
    sizes: tuple[int, ...], pieces: tuple[int, ...], runtime: RuntimeConfig, hidden_size: int, progress: StartProgress
) -> tuple[GraphRunner | None, PiecewiseRunner | None]:
    """Of decode steps of these sizes, and of forward passes in these pieces, in one progress report."""
    first, total = len(sizes), len(sizes) + len(pieces)
    graphs: GraphRunner | None = None
    if sizes:
        with_drafts = draft_sizes(sizes) if runtime.config.speculation is not None else ()
        graphs = (
            EagerGraphRunner(sizes, with_drafts)
            if runtime.eager_graphs
            else CudaGraphRunner(sizes, lambda done, _: progress.graphs(done, total), with_drafts)
        )
    if not pieces:
        return graphs, None
    kind: type[PiecewiseRunner] = EagerPieces if runtime.eager_graphs else PiecewiseCudaGraph
    return graphs, kind(pieces, hidden_size, lambda done, _: progress.graphs(first + done, total))


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
