"""Attention over latents (MLA; DeepSeek-AI, 2024: DeepSeek-V2): shared by its backends.

Decode is absorbed: kv_b_proj's part for keys is applied to the queries and its part for values to the result, so that
attention reads the cached latents, with one KV head. Prefill computes keys and values of each head instead, which takes
about a third of the operations. A prompt's prefix is expanded again from the cached latents. Keys are expanded in
pieces of bounded size, one after the other, and attention accumulates over the pieces.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch

from minisgl_backend.arrays import Int32Array
from minisgl_backend.attention.base import AttentionSpec, LayerGroup, Plan, PrefillInputs, WritingBackend
from minisgl_backend.attention.layer import AttentionLayer
from minisgl_backend.kernels.attention.calls import Expanded
from minisgl_backend.kernels.torch_ops import as_bits
from minisgl_backend.kernels.upload import to_device
from minisgl_backend.kv.layout import FP8, LayerKV

_PIECE_BYTES_GPU, _PIECE_BYTES_CPU = 256 << 20, 32 << 20  # of expanded keys and values


@dataclass(frozen=True)
class Piece:
    """Keys that are expanded together, of one or more sequences; each sequence's are a segment.

    Columns of `segments`: range of queries (in the step), range of keys (in the piece), number of the segment's keys
    that the first query sees, minus one (each further query sees one more), and whether the sequence had keys in
    earlier pieces.
    """

    slots: torch.Tensor  # int64 [num_keys], device; of the latents
    segments: torch.Tensor  # int32 [num_segments, 6], device
    segments_host: Int32Array
    cu_seqlens: torch.Tensor  # int32 [2, num_segments + 1], device; cumulative numbers of queries and of keys
    max_q_len: int
    max_kv_len: int
    is_whole: bool  # whether it has all keys of its sequences


class LatentBackend(WritingBackend):
    """Kernels for layers with latents; `AttentionLayer.latent` is set in all calls."""

    joins_queries: ClassVar[bool] = False  # see `attend_latents`

    def __init__(self, spec: AttentionSpec, group: LayerGroup) -> None:
        super().__init__(spec, group)
        assert group.latent is not None, "the registry looks"
        self.heads = group.latent
        self._values = values = group.num_q_heads * (self.heads.nope_dim + self.heads.v_dim)
        room = _PIECE_BYTES_CPU if spec.device.type == "cpu" else _PIECE_BYTES_GPU
        most = (spec.max_rows - 1) * spec.max_seq_len
        self._piece_tokens = max(1, min(most, room // (values * spec.dtype.itemsize)))

    @cached_property
    def _expanded(self) -> torch.Tensor:
        """Buffer for keys and values of a piece. It does not grow with the prefix, so the steps measured at start take
        the most memory; a backend that only serves decode allocates none."""
        with torch.inference_mode(False):
            shape = (self._piece_tokens, self._values)
            return torch.empty(shape, dtype=self.spec.dtype, device=self.spec.device)

    def plan_prefill(self, inputs: PrefillInputs) -> tuple[Piece, ...]:
        pieces: list[Piece] = []
        segments: list[tuple[int, ...]] = []  # row and first position, then as in Piece
        room = self._piece_tokens
        ends = inputs.cu_seqlens_q_host.tolist()
        for i, (kv_len, row) in enumerate(zip(inputs.kv_lens_host.tolist(), inputs.rows_host.tolist(), strict=True)):
            if room < kv_len <= self._piece_tokens:  # it fits into one
                pieces.append(self._piece(segments, inputs.page_table))
                segments, room = [], self._piece_tokens
            start, seen = 0, kv_len - (ends[i + 1] - ends[i])
            while start < kv_len:
                first, count = self._piece_tokens - room, min(room, kv_len - start)
                segments.append((row, start, ends[i], ends[i + 1], first, first + count, seen - start, start > 0))
                start, room = start + count, room - count
                if room == 0:
                    pieces.append(self._piece(segments, inputs.page_table))
                    segments, room = [], self._piece_tokens
        if segments:
            pieces.append(self._piece(segments, inputs.page_table))
        return tuple(pieces)

    def prefill_into(self, layer: AttentionLayer, q: torch.Tensor, plan: tuple[Piece, ...], out: torch.Tensor) -> None:
        assert layer.latent is not None
        kept = as_bits(layer.kv.k).flatten(0, 2)  # [num_slots, rank + rope_dim]
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for piece in plan:
            latents = numbers_of(kept[:, : self.heads.rank].index_select(0, piece.slots), layer.kv, q.dtype)
            keys = numbers_of(kept[:, self.heads.rank :].index_select(0, piece.slots), layer.kv, q.dtype)
            expanded = self._expanded[: len(latents)]
            layer.latent.expand_into(latents, expanded)
            keys_values = expanded.unflatten(1, (q.shape[1], -1))
            self.attend_expanded(layer, piece, Expanded(q, keys_values, keys, out, lse))

    @abstractmethod
    def attend_expanded(self, layer: AttentionLayer, piece: Piece, of: Expanded) -> None:
        """Attention of the piece's queries to its keys, merged into the result of earlier pieces in `out` and `lse`."""

    def decode_into(self, layer: AttentionLayer, q: torch.Tensor, plan: Plan, out: torch.Tensor) -> None:
        assert layer.latent is not None
        heads, weight = self.heads, layer.latent.weight
        q_nope, q_rope = q[..., : heads.nope_dim], q[..., heads.nope_dim :]
        size = heads.rank + (heads.rope_dim if self.joins_queries else 0)
        absorbed = torch.empty((*q.shape[:2], size), dtype=q.dtype, device=q.device)
        latent = absorbed[..., : heads.rank]
        torch.bmm(q_nope.transpose(0, 1), weight[:, : heads.nope_dim], out=latent.transpose(0, 1))
        if self.joins_queries:
            absorbed[..., heads.rank :] = q_rope
        attended = self.attend_latents(layer, absorbed, q_rope, plan)
        torch.bmm(attended.transpose(0, 1), weight[:, heads.nope_dim :].transpose(1, 2), out=out.transpose(0, 1))

    @abstractmethod
    def attend_latents(self, layer: AttentionLayer, q: torch.Tensor, q_rope: torch.Tensor, plan: Plan) -> torch.Tensor:
        """q [batch, num_q_heads, rank], contiguous, and q_rope [batch, num_q_heads, rope_dim], strided -> [batch,
        num_q_heads, rank]. joins_queries: each head of q also has q_rope, after its other numbers.
        """

    def _piece(self, segments: list[tuple[int, ...]], page_table: torch.Tensor) -> Piece:
        table = np.array(segments, dtype=np.int32)
        counts = table[:, 5] - table[:, 4]
        keys = np.arange(counts.sum(), dtype=np.int32)
        positions = keys + np.repeat(table[:, 1] - table[:, 4], counts)
        ends = np.zeros((2, len(table) + 1), dtype=np.int32)
        ends[0, 1:], ends[1, 1:] = table[:, 3] - table[0, 2], table[:, 5]
        # Segments first: a kernel is recompiled for an address that is not aligned to 16 bytes.
        parts = (table[:, 2:].reshape(-1), ends.reshape(-1), np.repeat(table[:, 0], counts), positions)
        uploaded = to_device(np.concatenate(parts), self.spec.device)
        flat, ends_there, rows, positions_there = uploaded.split([len(one) for one in parts])
        page_size = self.spec.page_size
        pages = page_table[rows, positions_there // page_size].long()
        return Piece(
            slots=pages * page_size + positions_there % page_size,
            segments=flat.view(-1, 6),
            segments_host=table[:, 2:],
            cu_seqlens=ends_there.view(2, -1),
            max_q_len=int((table[:, 3] - table[:, 2]).max()),
            max_kv_len=int(counts.max()),
            is_whole=bool((counts == table[:, 6] + table[:, 3] - table[:, 2]).all() and not table[:, 7].any()),
        )


def numbers_of(stored: torch.Tensor, kv: LayerKV, dtype: torch.dtype) -> torch.Tensor:
    """Values of cache contents of any shape: an FP8 cache's (given by `as_bits`) in `dtype`; others unchanged."""
    if kv.k.dtype != FP8:
        return stored
    numbers = stored.view(FP8).to(dtype)
    return numbers if kv.scales.k == 1.0 else numbers.mul_(kv.scales.k)
