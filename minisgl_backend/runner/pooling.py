"""Pooling on the device: of a step's hidden states, what its chunks were asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minisgl_backend.arrays import Float32Array, Int32Array
from minisgl_backend.request import PoolingParams
from minisgl_backend.step import PrefillChunk, StepPlan, Wants

_ROWS_AT_ONCE = 64  # of logits, which a large vocabulary makes large
Lines = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class PooledChunk:
    """One chunk of a step. Its hidden states follow those of the chunks before it."""

    row: int
    wants: int
    num_states: int
    token_ids: tuple[int, ...] = ()  # with TOKEN_LOGPROBS; () on ranks that do not sample


def pooled_chunks(
    plan: StepPlan, poolings: Mapping[int, PoolingParams], first_lines: Int32Array
) -> tuple[tuple[PooledChunk, ...], list[Int32Array]]:
    """The chunks of a plan that are pooled, and the lines of their hidden states in the step.

    Args:
        poolings: by row; {} on ranks that do not sample.
        first_lines: line of each chunk's first token, [num_chunks].
    """
    chunks, lines = [], []
    for chunk, first in zip(plan.prefill, first_lines.tolist(), strict=True):
        if not chunk.pools:
            continue
        of_chunk = _lines(chunk, first)
        token_ids = poolings[chunk.row].token_ids if chunk.row in poolings else ()
        chunks.append(PooledChunk(chunk.row, chunk.wants, len(of_chunk), token_ids))
        lines.append(of_chunk)
    return tuple(chunks), lines


def named_tokens(chunks: tuple[PooledChunk, ...]) -> Int32Array:
    """The token ids that the chunks ask about, one chunk after the other, int32 [num_tokens]."""
    return np.array([token for chunk in chunks for token in chunk.token_ids], dtype=np.int32)


@dataclass(frozen=True)
class Pooled:
    """What a step's chunks were asked for, one after the other."""

    chunks: tuple[PooledChunk, ...]
    widths: tuple[int, ...]  # values of each
    values: torch.Tensor  # float32 [num_values]

    def by_row(self, values: Float32Array) -> dict[int, Float32Array]:
        """`values`: the same on the host."""
        parts = np.split(values, np.cumsum(self.widths[:-1]))
        return {chunk.row: part.copy() for chunk, part in zip(self.chunks, parts, strict=True)}


def pool(
    chunks: tuple[PooledChunk, ...],
    states: torch.Tensor,
    token_ids: torch.Tensor | None,
    *,
    logits: Lines,
    scores: Lines,
    is_rank_0: bool,
) -> Pooled | None:
    """None on ranks other than 0, which only take part in the logits.

    Args:
        states: hidden states of all chunks, [num_states, hidden_size].
        token_ids: `named_tokens`, on the device; None where there are none.
        logits, scores: from hidden states, [n, hidden_size] -> [n, width]; `logits` on all ranks together.
    """
    counts = [chunk.num_states for chunk in chunks]
    found = _token_logprobs(chunks, states.split(counts), token_ids, logits, is_rank_0)
    if not is_rank_0:
        return None
    scored = [index for index, chunk in enumerate(chunks) if chunk.wants & Wants.SCORES]
    if scored:
        lines = torch.cat([states.split(counts)[index] for index in scored])
        found.update(zip(scored, scores(lines).float(), strict=True))
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
    logits: Lines,
    is_rank_0: bool,
) -> dict[int, torch.Tensor]:
    """By index of the chunk: the log-probabilities of its tokens."""
    found: dict[int, torch.Tensor] = {}
    asked, first = [index for index, chunk in enumerate(chunks) if chunk.wants & Wants.TOKEN_LOGPROBS], 0
    for start in range(0, len(asked), _ROWS_AT_ONCE):
        slab = asked[start : start + _ROWS_AT_ONCE]
        lines = logits(torch.cat([states[index] for index in slab]))
        if not is_rank_0 or token_ids is None:
            continue
        for index, line in zip(slab, lines.float().log_softmax(dim=1), strict=True):
            count = len(chunks[index].token_ids)
            found[index] = line[token_ids[first : first + count]]
            first += count
    return found


def _lines(chunk: PrefillChunk, first: int) -> Int32Array:
    if chunk.wants & Wants.STATE_SUM:
        return np.arange(first, first + len(chunk.token_ids), dtype=np.int32)
    last = first + len(chunk.token_ids) - 1
    return np.array([first if chunk.wants & Wants.FIRST_STATE else last], dtype=np.int32)
