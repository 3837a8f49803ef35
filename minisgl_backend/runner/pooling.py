"""Pooling on the device: from a step's hidden states to the values that its pooling requests ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minisgl_backend.arrays import Float32Array, Int32Array
from minisgl_backend.request import PoolingParams
from minisgl_backend.step import PrefillChunk, StepPlan, Wants

_ROWS_AT_ONCE = 64  # rows of logits at a time, which are large with a large vocabulary
Head = Callable[[torch.Tensor], torch.Tensor]  # hidden states [n, hidden_size] -> [n, width]
RowHead = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]  # and the row of each -> [n, width]


@dataclass(frozen=True)
class PooledChunk:
    """One chunk of a step. Its hidden states follow those of the chunks before it."""

    row: int
    wants: int
    num_states: int
    token_ids: tuple[int, ...] = ()  # with TOKEN_LOGPROBS; () on ranks that do not sample


def pooled_chunks(
    plan: StepPlan, poolings: Mapping[int, PoolingParams], first_tokens: Int32Array
) -> tuple[tuple[PooledChunk, ...], list[Int32Array]]:
    """The chunks of a plan that are pooled, and the indices of their hidden states in the step.

    Args:
        poolings: by row; {} on ranks that do not sample.
        first_tokens: index of each chunk's first token in the step, [num_chunks].
    """
    chunks, indices = [], []
    for chunk, first in zip(plan.prefill, first_tokens.tolist(), strict=True):
        if not chunk.pools:
            continue
        of_chunk = _state_indices(chunk, first)
        token_ids = poolings[chunk.row].token_ids if chunk.row in poolings else ()
        chunks.append(PooledChunk(chunk.row, chunk.wants, len(of_chunk), token_ids))
        indices.append(of_chunk)
    return tuple(chunks), indices


def named_tokens(chunks: tuple[PooledChunk, ...]) -> Int32Array:
    """The token ids whose log-probabilities the chunks request, chunk by chunk, int32 [num_tokens]."""
    return np.array([token for chunk in chunks for token in chunk.token_ids], dtype=np.int32)


@dataclass(frozen=True)
class Pooled:
    """The pooled values of a step's chunks, chunk by chunk."""

    chunks: tuple[PooledChunk, ...]
    widths: tuple[int, ...]  # number of values of each chunk
    values: torch.Tensor  # float32 [num_values]

    def by_row(self, values: Float32Array) -> dict[int, Float32Array]:
        """`values`: a copy of `self.values` on the host."""
        parts = np.split(values, np.cumsum(self.widths[:-1]))
        return {chunk.row: part.copy() for chunk, part in zip(self.chunks, parts, strict=True)}


def pool(
    chunks: tuple[PooledChunk, ...],
    states: torch.Tensor,
    token_ids: torch.Tensor | None,
    *,
    logits: RowHead,
    scores: Head,
    is_rank_0: bool,
) -> Pooled | None:
    """Pools the chunks of a step. None on ranks other than 0, which only take part in computing logits.

    Args:
        states: hidden states of all chunks, [num_states, hidden_size].
        token_ids: `named_tokens`, on the device; None where there are none.
        logits, scores: from hidden states; `logits` is a collective of all ranks.
    """
    counts = [chunk.num_states for chunk in chunks]
    found = _token_logprobs(chunks, states.split(counts), token_ids, logits, is_rank_0)
    if not is_rank_0:
        return None
    scored = [index for index, chunk in enumerate(chunks) if chunk.wants & Wants.SCORES]
    if scored:
        scored_states = torch.cat([states.split(counts)[index] for index in scored])
        found.update(zip(scored, scores(scored_states).float(), strict=True))
    if len(found) < len(chunks):
        vectors = states.float().split(counts)
        for index, part in enumerate(vectors):
            if index not in found:
                found[index] = part[0] if len(part) == 1 else part.sum(dim=0)
    parts = [found[index] for index in range(len(chunks))]
    return Pooled(chunks, tuple(len(part) for part in parts), torch.cat(parts))


def _token_logprobs(
    chunks: tuple[PooledChunk, ...],
    states: Sequence[torch.Tensor],
    token_ids: torch.Tensor | None,
    logits: RowHead,
    is_rank_0: bool,
) -> dict[int, torch.Tensor]:
    """By index of the chunk: the log-probabilities of its tokens."""
    found: dict[int, torch.Tensor] = {}
    requested, first = [index for index, chunk in enumerate(chunks) if chunk.wants & Wants.TOKEN_LOGPROBS], 0
    for start in range(0, len(requested), _ROWS_AT_ONCE):
        slab = requested[start : start + _ROWS_AT_ONCE]
        slab_logits = logits(torch.cat([states[index] for index in slab]), [chunks[index].row for index in slab])
        if not is_rank_0 or token_ids is None:
            continue
        for index, logprobs in zip(slab, slab_logits.float().log_softmax(dim=1), strict=True):
            count = len(chunks[index].token_ids)
            found[index] = logprobs[token_ids[first : first + count]]
            first += count
    return found


def _state_indices(chunk: PrefillChunk, first: int) -> Int32Array:
    if chunk.wants & Wants.STATE_SUM:
        return np.arange(first, first + len(chunk.token_ids), dtype=np.int32)
    last = first + len(chunk.token_ids) - 1
    return np.array([first if chunk.wants & Wants.FIRST_STATE else last], dtype=np.int32)
