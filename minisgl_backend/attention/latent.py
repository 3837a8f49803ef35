"""Attention over latents (MLA; DeepSeek-AI, 2024: DeepSeek-V2): what its backends have in common.

Decode is absorbed: kv_b_proj's part for keys is applied to the queries and its part for values to the result, so that
attention reads latents as they are kept, with one KV head. Prefill computes keys and values of each head instead, which
takes about a third of the operations. What a prompt sees of its prefix is expanded again from the latents that are
kept; pieces of all keys, of bounded size, are expanded one after the other, and results of a piece go into the next.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch

from minisgl_backend.arrays import Int32Array
from minisgl_backend.attention.base import AttentionBackend, AttentionSpec, LayerGroup, Plan, PrefillInputs
from minisgl_backend.attention.layer import AttentionLayer
from minisgl_backend.kernels.torch_ops import as_bits
from minisgl_backend.kv.layout import FP8, LayerKV

_PIECE_BYTES_GPU, _PIECE_BYTES_CPU = 256 << 20, 32 << 20  # of expanded keys and values


@dataclass(frozen=True)
class Piece:
    """Keys that are expanded together, of one or more sequences; each sequence's are a segment.

    Columns of `segments`: first query and the one after the last (of the step), first key and the one after the last
    (of the piece), keys of the segment that the first query sees, less one, and whether the sequence had keys in
    earlier pieces. Of each further query it is one key more.
    """

    slots: torch.Tensor  # int64 [num_keys], device; where the latents are kept
    segments: torch.Tensor  # int32 [num_segments, 6], device
    segments_host: Int32Array
    cu_seqlens: (
        torch.Tensor
    )  # int32 [2, num_segments + 1], device; queries and keys before each, from the first one's on
    max_q_len: int
    max_kv_len: int
    is_whole: bool  # whether all keys of its sequences are in it


class LatentBackend(AttentionBackend):
    """Kernels for layers that keep latents; `AttentionLayer.latent` is there in all calls."""

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
        """Keys and values of a piece. Steps of any prefix take the same memory, so that those which are measured at
        start are the largest; a backend that serves decode alone takes none."""
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

    def prefill(self, layer: AttentionLayer, q: torch.Tensor, plan: tuple[Piece, ...]) -> torch.Tensor:
        out = torch.empty((*q.shape[:2], self.heads.v_dim), dtype=q.dtype, device=q.device)
        self.prefill_into(layer, q, plan, out)
        return out

    def prefill_into(self, layer: AttentionLayer, q: torch.Tensor, plan: tuple[Piece, ...], out: torch.Tensor) -> None:
        assert layer.latent is not None
        kept = as_bits(layer.kv.k).flatten(0, 2)  # [num_slots, rank + rope_dim]
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for piece in plan:
            latents = numbers_of(kept[:, : self.heads.rank].index_select(0, piece.slots), layer.kv, q.dtype)
            keys = numbers_of(kept[:, self.heads.rank :].index_select(0, piece.slots), layer.kv, q.dtype)
            expanded = self._expanded[: len(latents)]
            layer.latent.expand_into(latents, expanded)
            self.attend_expanded(layer, q, expanded.unflatten(1, (q.shape[1], -1)), keys, piece, out, lse)

    @abstractmethod
    def attend_expanded(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        expanded: torch.Tensor,
        keys: torch.Tensor,
        piece: Piece,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Attention of the piece's queries to its keys, added to what `out` and `lse` have of earlier pieces.

        q [num_tokens, num_q_heads, nope_dim + rope_dim]; expanded [num_keys, num_q_heads, nope_dim + v_dim]; keys
        [num_keys, rope_dim]; out [num_tokens, num_q_heads, v_dim]; lse float32 [num_tokens, num_q_heads], logarithms to
        the base 2 of the sums of weights so far.
        """

    def decode(self, layer: AttentionLayer, q: torch.Tensor, plan: Plan) -> torch.Tensor:
        out = torch.empty((*q.shape[:2], self.heads.v_dim), dtype=q.dtype, device=q.device)
        self.decode_into(layer, q, plan, out)
        return out

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
        """q [batch, num_q_heads, rank], contiguous, and q_rope [batch, num_q_heads, rope_dim], parts of longer rows ->
        [batch, num_q_heads, rank]. joins_queries: q has q_rope, too, behind the other numbers of each head.
        """

    def _piece(self, segments: list[tuple[int, ...]], page_table: torch.Tensor) -> Piece:
        table = np.array(segments, dtype=np.int32)
        counts = table[:, 5] - table[:, 4]
        keys = np.arange(counts.sum(), dtype=np.int32)
        positions = keys + np.repeat(table[:, 1] - table[:, 4], counts)
        ends = np.zeros((2, len(table) + 1), dtype=np.int32)
        ends[0, 1:], ends[1, 1:] = table[:, 3] - table[0, 2], table[:, 5]
        # Segments first: a kernel is compiled anew for an address that is no multiple of 16.
        parts = (table[:, 2:].reshape(-1), ends.reshape(-1), np.repeat(table[:, 0], counts), positions)
        flat, ends_there, rows, positions_there = self._upload(np.concatenate(parts)).split([len(one) for one in parts])
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

    def _upload(self, values: Int32Array) -> torch.Tensor:
        """Without waiting for the device, which a copy from memory that is not pinned would."""
        there = torch.from_numpy(values)
        if self.spec.device.type == "cpu":
            return there
        return there.pin_memory().to(self.spec.device, non_blocking=True)


def numbers_of(stored: torch.Tensor, kv: LayerKV, dtype: torch.dtype) -> torch.Tensor:
    """What numbers of a cache mean, of any shape: those of one in FP8, given by `as_bits`, in `dtype`; others stay as
    they are."""
    if kv.k.dtype != FP8:
        return stored
    numbers = stored.view(FP8).to(dtype)
    return numbers if kv.scales.k == 1.0 else numbers.mul_(kv.scales.k)
