"""Chooses the number of KV pages and the largest decode step to capture.

Both follow from the device memory that weights and worst-case steps leave (the profile run).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch

from minisgl_backend.arrays import Int32Array
from minisgl_backend.attention.base import AttentionSpec
from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.select import block_types
from minisgl_backend.kv.groups import room_in
from minisgl_backend.kv.pool import LayerPlace, bytes_per_page, max_pages, places_after
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.request import MAX_LOGPROBS, SamplingParams
from minisgl_backend.runner.model_runner import ModelRunner
from minisgl_backend.runner.start.device import free_bytes
from minisgl_backend.runner.start.draft import draft_spec, target_spec
from minisgl_backend.runner.start.repacked import MOST_SHARE
from minisgl_backend.runner.start.runtime_config import RuntimeConfig
from minisgl_backend.runner.start.states import StateRoom, choose_states
from minisgl_backend.step import AdmittedRow, PrefillChunk, StepPlan, Wants
from minisgl_backend.tensor_parallel import device_of_rank
from minisgl_backend.weights.formats import QuantizationConfig
from minisgl_backend.weights.schemes.gguf import with_blocks
from minisgl_backend.weights.sizes import ITEM_BYTES, check_memory, repacked_bytes, weight_bytes

# On the CPU memory is shared with everything else, so the default is not "all that is left".
CPU_POOL_BYTES = 1 << 30
CPU_POOL_SHARE = 2  # times the pages that running sequences can use: the rest is for cached prefixes

# With more sequences a decode step takes so long that its launches no longer matter.
LARGEST_DEFAULT_GRAPH = 256
GRAPH_SHARE = 0.1  # of the memory that weights leave, for the largest captured step: pages need the rest

# The most memory that the sampler can take: every row edits its logits.
_WORST_PARAMS = SamplingParams(temperature=1.0, top_p=0.5, repetition_penalty=1.1, logprobs=MAX_LOGPROBS, seed=0)
# A token is sampled, with no other options.
PLAIN_PARAMS = SamplingParams(temperature=1.0, seed=0)


@dataclass(frozen=True)
class StepBytes:
    """Peak bytes of worst-case steps, beyond what is allocated before them."""

    mixed: int  # the step with the most tokens
    decode: int  # the decode step with max_running_requests sequences
    pieces: int = 0  # the largest forward pass that is captured in pieces


def choose_graph_max_bs(decode_bytes: int, max_running: int, free_now: int) -> int:
    """Default of the largest decode batch to capture; graphs keep their memory.

    `decode_bytes`: peak of a step of `max_running` sequences; `free_now`: bytes that the weights leave.
    """
    fitting = int(GRAPH_SHARE * free_now) * max_running // max(1, decode_bytes)
    return min(max_running, LARGEST_DEFAULT_GRAPH, fitting)


def choose_num_pages(
    runtime: RuntimeConfig, spec: AttentionSpec, places: Sequence[LayerPlace], free_at_start: int, step_bytes: int
) -> int:
    """Pages of this rank's pool: `num_pages` where it is set, else what memory_ratio leaves.

    `places`: of all layers in the pool; `free_at_start`: device memory before the weights were loaded; `step_bytes`:
    the peak of a worst-case step, and what states take.
    Raises ConfigError where not even one page fits.
    """
    config = runtime.config
    if config.num_pages is not None:
        return config.num_pages
    pages = _pages_in(bytes_left(runtime, spec.device, free_at_start, step_bytes), runtime, spec, places)
    if pages < 1:
        page_bytes = bytes_per_page(places, spec.page_size)
        raise ConfigError(
            f"no memory is left for the KV cache: {config.memory_ratio:g} of {free_at_start >> 20} MiB (memory_ratio) "
            f"does not hold the weights, a step ({step_bytes >> 20} MiB) and one page ({page_bytes} bytes); raise "
            f"memory_ratio, lower max_prefill_length ({runtime.max_prefill_length}) or max_running_requests "
            f"({config.max_running_requests}), or raise tp"
        )
    return pages


def bytes_left(runtime: RuntimeConfig, device: torch.device, free_at_start: int, step_bytes: int) -> int:
    """What `memory_ratio` leaves now to pages and states; arguments as of `choose_num_pages`."""
    free_now, ratio = free_bytes(device), runtime.config.memory_ratio
    if device.type == "cpu":
        return int(free_now * ratio) - step_bytes
    return int(free_at_start * ratio) - (free_at_start - free_now) - step_bytes


@dataclass(frozen=True)
class MemoryNeed:
    """Estimate of a model's memory, before anything is loaded."""

    weights: int  # bytes: on each GPU, or of all ranks and cores on the CPU; including the draft model's
    free: int  # bytes
    pages: int  # of each rank's pool, approximately: the peak of steps on a GPU is only measured at start
    room: str  # what these pages hold, in words
    draft_weights: int = 0  # bytes, as `weights`, of the draft model only
    draft_share: float = 0.0  # share of each page's bytes that the draft model's layers take
    repacked: int = 0  # bytes in addition to `weights`: see `repacked.py`
    states: StateRoom | None = None  # of each rank; None: the model has none


def memory_of(runtime: RuntimeConfig, model: ModelConfig) -> MemoryNeed:
    """Raises ConfigError where not even the weights fit, naming needed and free memory."""
    config, on_gpu, device = runtime.config, runtime.device == "cuda", torch.device(runtime.device)
    weights, free = check_weights_fit(runtime, model, cores=config.dp)
    spec = target_spec(runtime, model, device)
    places = own = spec.places
    if runtime.draft is not None:
        own = places_after(spec.places, draft_spec(runtime, runtime.draft, device).places)
        places = (*spec.places, *own)
    budget = int(free * config.memory_ratio) - weights if on_gpu else int((free - weights) * config.memory_ratio)
    fixed = (config.num_pages or 0) * bytes_per_page(places, spec.page_size)
    second = _repacked(runtime, model, budget - fixed)
    budget -= second
    states = choose_states(runtime, model, budget)
    budget -= 0 if states is None else states.num_bytes
    pages = config.num_pages or max(0, _pages_in(budget, runtime, spec, places))
    room = room_in(spec.columns, spec.page_size, pages, runtime.max_seq_len)
    if runtime.draft is None:
        return MemoryNeed(weights, free, pages, room, repacked=second, states=states)
    share = bytes_per_page(own, spec.page_size) / bytes_per_page(places, spec.page_size)
    copies = 1 if on_gpu else config.ranks_per_node * config.dp
    return MemoryNeed(weights, free, pages, room, draft_weight_bytes(runtime) * copies, share, second, states)


def _repacked(runtime: RuntimeConfig, model: ModelConfig, room: int) -> int:
    """Bytes of second layouts of weights on each GPU, if `room` bytes are left for them and for pages."""
    device = device_of_rank(runtime.device, runtime.device_index(0))
    if "vllm" not in DeviceFacts.of(device).libraries:
        return 0
    formats = model.quantization.with_option(runtime.config.quantization)
    needed = repacked_bytes(Path(runtime.model_dir), model.tensor_names, formats) // runtime.config.tp
    return needed if needed <= MOST_SHARE * room else 0


def weight_formats(runtime: RuntimeConfig, model: ModelConfig) -> QuantizationConfig:
    """Number formats of a model's weights here: what its files and options say, and what the device makes of them."""
    formats = model.quantization.with_option(runtime.config.quantization)
    if runtime.config.dummy_weights:
        return formats
    types = block_types(torch.device(runtime.device), getattr(torch, runtime.dtype), model.mixture is not None)
    return with_blocks(formats, Path(runtime.model_dir), types)


def check_weights_fit(runtime: RuntimeConfig, model: ModelConfig, *, cores: int = 1) -> tuple[int, int]:
    """(Bytes of the weights, free bytes) on one GPU, or on the host for its ranks of `cores` engine cores.

    To be called before any of them loads. Replicated weights are counted as if they were split. Raises ConfigError
    where the weights do not fit.
    """
    config, on_gpu = runtime.config, runtime.device == "cuda"
    item_bytes = ITEM_BYTES[runtime.dtype]
    folder, tied = Path(runtime.model_dir), model.tie_word_embeddings
    formats = weight_formats(runtime, model)
    weights = weight_bytes(folder, model.tensor_names, item_bytes, tied=tied, quantization=formats) // config.tp
    weights += draft_weight_bytes(runtime)
    if not on_gpu:
        weights *= config.ranks_per_node * cores
    free = free_bytes(device_of_rank(runtime.device, runtime.device_index(0)))
    check_memory(config.model, weights, free, "each GPU's memory" if on_gpu else "memory")
    return weights, free


def draft_weight_bytes(runtime: RuntimeConfig) -> int:
    """Bytes of the draft model's weights on each rank; 0 without one."""
    if runtime.draft is None:
        return 0
    model, folder = runtime.draft.model, Path(runtime.draft.model_dir)
    tied, item_bytes = model.tie_word_embeddings, ITEM_BYTES[runtime.dtype]
    every = weight_bytes(folder, model.tensor_names, item_bytes, tied=tied, quantization=model.quantization)
    return every // runtime.config.tp


def _pages_in(budget: int, runtime: RuntimeConfig, spec: AttentionSpec, places: Sequence[LayerPlace]) -> int:
    """Pages that fit into `budget` bytes in addition to the padding page; at most the number that can be used."""
    most = max_pages(spec.page_size, places)
    if spec.device.type == "cpu":
        budget = min(CPU_POOL_BYTES, budget)
        rows, chunk = runtime.config.max_running_requests, min(runtime.max_prefill_length, spec.max_seq_len)
        groups = spec.columns.of_rows(spec.page_size)
        in_prefill = groups.num_windows * groups.pages_for(chunk)
        most = min(most, CPU_POOL_SHARE * rows * groups.pages_of_row(spec.max_seq_len) + in_prefill)
    return min(most, budget // bytes_per_page(places, spec.page_size) - 1)


def profile_run(runner: ModelRunner, runtime: RuntimeConfig, device: torch.device) -> StepBytes:
    """Measures the peak memory of the largest steps, which is also the memory that their graphs would keep.

    The steps are executed for real, with every token on the padding page.
    """
    max_running = runtime.most_decode_entries
    plans = [*worst_plans(max_running, runtime.max_prefill_length, runtime.max_seq_len)]
    if runtime.cuda_graph_max_tokens:
        longest = np.zeros(runtime.cuda_graph_max_tokens, dtype=np.int32)
        plans.append(prompt_plan(longest, max_running, runtime.max_seq_len))
    if runner.proposes:
        plans.append(proposer_plan(min(runtime.max_prefill_length, runtime.max_seq_len - 1)))
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    peaks = []
    for plan in plans:
        torch.cuda.reset_peak_memory_stats(device)
        runner.execute(runner.prepare(plan)).wait()
        torch.cuda.synchronize(device)
        peaks.append(max(0, torch.cuda.max_memory_allocated(device) - before))
    torch.cuda.empty_cache()
    of_proposer = peaks.pop() if runner.proposes else 0
    mixed, *others = peaks
    return StepBytes(max(mixed, of_proposer), *others)


def worst_plans(max_running: int, max_prefill: int, max_seq_len: int) -> tuple[StepPlan, StepPlan]:
    """A step with the most tokens and the most sampling, and a decode step of all rows. No page is written."""
    chunk_len = min(max_prefill, max_seq_len - 1)
    num_chunks = min(max_running, -(-max_prefill // chunk_len))
    admitted, chunks, left = [], [], max_prefill
    for row in range(max_running):
        length = min(chunk_len, left) if row < num_chunks else 1
        tokens = np.zeros(max(length, 1), dtype=np.int32)
        admitted.append(AdmittedRow(row, row, _WORST_PARAMS, len(tokens), tokens, 0))
        if row < num_chunks:
            chunks.append(PrefillChunk(row, 0, tokens, Wants.TOKEN))
            left -= length
    mixed = padding_plan(tuple(admitted), tuple(chunks), np.arange(num_chunks, max_running, dtype=np.int32))
    return mixed, padding_plan((), (), np.arange(max_running, dtype=np.int32))


def prompt_plan(token_ids: Int32Array, max_running: int, max_seq_len: int, *, beside: int = 0) -> StepPlan:
    """A step with these prompt tokens, as far as they fit into the rows, which samples nothing for them, and with
    `beside` decoding sequences. No page is written.

    token_ids: int32 [num_tokens].
    """
    longest = min(len(token_ids), max_seq_len - 1)
    prompts = [token_ids[start : start + longest] for start in range(0, len(token_ids), longest)]
    prompts = prompts[: max_running - beside]
    rows = [*prompts, *[np.zeros(1, dtype=np.int32)] * beside]
    admitted = tuple(AdmittedRow(row, row, PLAIN_PARAMS, len(ids), ids, 0) for row, ids in enumerate(rows))
    chunks = tuple(PrefillChunk(row, 0, ids, Wants.NOTHING) for row, ids in enumerate(prompts))
    return padding_plan(admitted, chunks, np.arange(len(prompts), len(rows), dtype=np.int32))


def proposer_plan(num_tokens: int) -> StepPlan:
    """A step of the proposer on the device that has not seen a prompt of `num_tokens`. No page is written."""
    chunk = PrefillChunk(0, 0, np.zeros(num_tokens, dtype=np.int32), Wants.NOTHING)
    plan = padding_plan((), (chunk,), np.zeros(1, dtype=np.int32))
    return msgspec.structs.replace(plan, num_proposed=2, num_proposing=1)


def health_check_plan(max_running: int) -> StepPlan:
    """A health-check step, which affects no other step: a prompt of one token in the padding row."""
    token = np.zeros(1, dtype=np.int32)
    admitted = AdmittedRow(max_running, 0, PLAIN_PARAMS, 1, token, 0)
    chunk = PrefillChunk(max_running, 0, token, Wants.TOKEN)
    return padding_plan((admitted,), (chunk,), np.zeros(0, dtype=np.int32))


def padding_plan(
    admitted: tuple[AdmittedRow, ...], chunks: tuple[PrefillChunk, ...], decode_rows: np.ndarray
) -> StepPlan:
    """A step before the first request: no page is written, so all tokens are on the padding page; `decode_rows`, int32,
    decode their first token."""
    none = np.zeros(0, dtype=np.int32)
    return StepPlan(
        step=0,
        admitted=admitted,
        page_rows=none,
        page_columns=none,
        page_ids=none,
        prefill=chunks,
        decode_rows=decode_rows,
        decode_lengths=np.ones(len(decode_rows), dtype=np.int32),
        decode_uids=decode_rows.astype(np.int64),
    )
