"""Prompts in which an image's tokens see each other (Gemma 3), without masks: a chunk's queries are cut into pieces of
text, which are causal, and pieces of images, which are not and whose keys end with the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from minisgl_backend.arrays import Int32Array
from minisgl_backend.attention.base import AttentionBackend, Plan, PrefillInputs
from minisgl_backend.attention.layer import AttentionLayer
from minisgl_backend.kernels.upload import to_device

Spans = Sequence[tuple[int, int]]  # of one chunk: positions, of the first token and behind the last, ascending


@dataclass(frozen=True)
class Piece:
    """All pieces of one kind of a step, as sequences of their own."""

    inputs: PrefillInputs
    queries: torch.Tensor  # int64 [num_tokens]: which of the step's prefill tokens


@dataclass(frozen=True)
class PiecesPlan:
    """A backend's plans of the kinds that a step has."""

    parts: tuple[tuple[Plan, torch.Tensor], ...]

    def attend(self, backend: AttentionBackend, layer: AttentionLayer, q: torch.Tensor, out: torch.Tensor) -> None:
        """`AttentionBackend.prefill_into` of all pieces."""
        for plan, queries in self.parts:
            out[queries] = backend.prefill(layer, q[queries], plan)


def cut(inputs: PrefillInputs, spans: Sequence[Spans]) -> tuple[Piece, ...]:
    """The pieces of a step whose chunks have these images; no chunk ends inside of one."""
    found: dict[bool, list[tuple[int, int, int, int]]] = {True: [], False: []}  # by causal: row, kv_len, queries
    rows, ends, bounds = (
        values.tolist() for values in (inputs.rows_host, inputs.kv_lens_host, inputs.cu_seqlens_q_host)
    )
    for index, images in enumerate(spans):
        first, last = bounds[index], bounds[index + 1]
        start = ends[index] - (last - first)
        at = start
        for begin, end in (*images, (ends[index], ends[index])):
            if at < begin:
                found[True].append((rows[index], begin, first + at - start, first + begin - start))
            if begin < end:
                found[False].append((rows[index], end, first + max(begin, at) - start, first + end - start))
            at = max(at, end)
    return tuple(_piece(inputs, pieces, causal=causal) for causal, pieces in found.items() if pieces)


def plan_pieces(backend: AttentionBackend, inputs: PrefillInputs) -> PiecesPlan:
    """The backend's plan of a prefill part with pieces."""
    parts = [
        (backend.plan_prefill(replace(piece.inputs, page_table=inputs.page_table)), piece.queries)
        for piece in inputs.pieces
    ]
    return PiecesPlan(tuple(parts))


def _piece(inputs: PrefillInputs, pieces: list[tuple[int, int, int, int]], *, causal: bool) -> Piece:
    rows, kv_lens, firsts, lasts = (np.array(values, dtype=np.int32) for values in zip(*pieces, strict=True))
    lengths = lasts - firsts
    cu_seqlens = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    queries = np.concatenate(
        [np.arange(first, last, dtype=np.int64) for first, last in zip(firsts, lasts, strict=True)]
    )
    device = inputs.rows.device

    def uploaded(values: Int32Array) -> torch.Tensor:
        return to_device(values, device)

    part = replace(
        inputs,
        cu_seqlens_q=uploaded(cu_seqlens),
        kv_lens=uploaded(kv_lens),
        rows=uploaded(rows),
        cu_seqlens_q_host=cu_seqlens,
        kv_lens_host=kv_lens,
        rows_host=rows,
        page_tables=(),
        pieces=(),
        causal=causal,
    )
    return Piece(part, to_device(queries, device))
