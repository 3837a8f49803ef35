"""What kernels of the gated delta rule are given, and the table of a step's prompt chunks.

Inputs of a token are [q | k | v | z | b | a]: see `StateConfig.num_inputs`. The convolution runs over q, k and v.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from minisgl_backend.arrays import Int32Array
from minisgl_backend.kv.state import LayerState
from minisgl_backend.kv.state_config import StateConfig

BLOCK = 64  # tokens of a chunk that are computed at once, at most
L2_EPS = 1e-6  # of the norms of queries and keys, within the root


@dataclass(frozen=True, kw_only=True, eq=False)
class DeltaLayer:
    """One layer: constants, weights and its states."""

    config: StateConfig  # of this rank
    conv_weight: torch.Tensor  # [w, c], in any dtype, contiguous
    a_log: torch.Tensor  # float32 [num_v_heads]
    dt_bias: torch.Tensor  # float32 [num_v_heads]
    norm_weight: torch.Tensor  # [v_dim]
    norm_eps: float
    state: LayerState
    page_size: int
    beta_scale: float = 1.0  # beta = beta_scale * sigmoid(b); 2 allows negative eigenvalues (OLMo hybrid)

    @property
    def max_drafts(self) -> int:
        return self.state.tail_u.shape[2] - self.page_size


class WindowBatch(NamedTuple):
    """A step's decode part, made once for all layers. Captured graphs read the tensors.

    A row's entries follow each other: its next token, then its drafts. Entries whose row has slot 0 pad the batch; what
    they give is finite and means nothing.
    """

    rows: torch.Tensor  # int32 [num_entries]
    kv_lens: torch.Tensor  # int32 [num_entries]: tokens of the row up to the entry, itself included
    state_slot: torch.Tensor  # int32 [max_rows]: of the row's state
    state_border: torch.Tensor  # int32 [max_rows]: tokens that the state stands for
    has_drafts: bool = False  # a row may have several entries
    pdl: bool = False  # may start before the previous kernel has ended: see linear/plain/small_rows.py


class FoldBatch(NamedTuple):
    """What a plan folds: int32 [num_folds] each, but for the table of rows, as it was before the plan."""

    rows: torch.Tensor
    sources: torch.Tensor  # slot of the state at the row's border before the fold
    targets: torch.Tensor  # slot of the state at `borders`; may be the source
    state_border: torch.Tensor  # int32 [max_rows], tokens: the rows' borders before the fold
    borders: torch.Tensor  # tokens; the new one, at least a page later


class ChunkSpan(NamedTuple):
    """A chunk of a prompt in a step. It starts at a border."""

    row: int
    start: int  # position of its first token
    end: int
    source: int  # slot of the state at its start; 0: zeros
    target: int  # slot that the state at the last border up to its end is written to; may be the source
    checkpoints: Sequence[tuple[int, int]] = ()  # (border within the chunk, slot): further states to write


class ChunkBatch(NamedTuple):
    """A step's prefill part, made once for all layers: `chunk_tables` on the device."""

    blocks: torch.Tensor  # int32 [num_blocks, len(Block._fields)]
    sequences: torch.Tensor  # int32 [num_chunks, len(ChunkRow._fields)]


class Block(NamedTuple):
    """Columns of the table of blocks: tokens of one chunk that are computed at once."""

    sequence: int  # of the table of sequences
    token: int  # its first, in the step
    length: int  # at most BLOCK
    position: int  # of its first token
    is_tail: int  # its tokens are behind the chunk's last border
    checkpoint: int  # slot that the state behind it is written to; 0: none


class ChunkRow(NamedTuple):
    """Columns of the table of chunks."""

    row: int
    token: int  # its first, in the step
    length: int
    position: int  # of its first token
    source: int
    target: int
    block: int  # its first
    num_blocks: int
    num_body: int  # blocks up to its last border, behind which the state is written to the target


def chunk_tables(spans: Iterable[ChunkSpan], page_size: int) -> tuple[Int32Array, Int32Array]:
    """`blocks` and `sequences` of a step's chunks, whose tokens follow each other in the step."""
    blocks: list[Block] = []
    rows: list[ChunkRow] = []
    token = 0
    for span in spans:
        border = max(span.start, span.end // page_size * page_size)
        slots = dict(span.checkpoints)
        cuts = sorted({border, span.end, *slots})
        first, start, num_body = len(blocks), span.start, 0
        for cut in cuts:
            while start < cut:
                end = min(start + BLOCK, cut)
                is_tail = start >= border
                num_body += not is_tail
                checkpoint = slots.get(end, 0)
                at = token + start - span.start
                blocks.append(Block(len(rows), at, end - start, start, int(is_tail), checkpoint))
                start = end
        rows.append(
            ChunkRow(
                span.row, token, span.end - span.start, span.start, span.source, span.target, first,
                len(blocks) - first, num_body,
            )
        )  # fmt: skip
        token += span.end - span.start
    return (
        np.array(blocks, dtype=np.int32).reshape(-1, len(Block._fields)),
        np.array(rows, dtype=np.int32).reshape(-1, len(ChunkRow._fields)),
    )
