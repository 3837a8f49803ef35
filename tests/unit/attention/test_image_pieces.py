"""Images whose tokens see each other, by pieces: as with a mask, behind cached tokens, with windows, in batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minisgl_backend.attention.base import PrefillInputs
from minisgl_backend.attention.pair import AttentionPair
from minisgl_backend.attention.pieces import PiecesPlan, cut
from tests.attention_cases import PagedCase

KV_LENS, COUNTS = [40, 23, 17], [31, 12, 5]  # the last of each sequence's tokens are its chunk
SPANS = [[(12, 20), (20, 33)], [(9, 18)], []]  # neighbours; one whose first part is cached, as behind a matched prefix


def masked(case: PagedCase, q: torch.Tensor, window: int) -> torch.Tensor:
    """Dense, sequence by sequence."""
    outputs, at = [], 0
    for index, (length, count) in enumerate(zip(KV_LENS, COUNTS, strict=True)):
        pages = case.table[case.rows[index]].long()
        keys, values = (pool[pages].transpose(0, 1).flatten(1, 2)[:, :length] for pool in (case.k, case.v))
        positions = torch.arange(length - count, length)[:, None]
        others = torch.arange(length)[None]
        sees = others <= positions
        for begin, end in SPANS[index]:
            sees |= (positions >= begin) & (positions < end) & (others >= begin) & (others < end)
        if window:
            sees &= others > positions - window
        queries = q[at : at + count].transpose(0, 1)
        group = case.heads // case.kv_heads
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        outputs.append(torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=sees))
        at += count
    return torch.cat([one.transpose(0, 1) for one in outputs])


@pytest.mark.parametrize("window", [0, 5, 30])
def test_pieces_are_as_with_a_mask(window: int) -> None:
    case = PagedCase(KV_LENS, 4, (4, 2, 16), window=window)
    starts = np.cumsum([0, *COUNTS]).astype(np.int32)
    inputs = PrefillInputs(
        cu_seqlens_q=torch.from_numpy(starts),
        kv_lens=case.kv_lens,
        rows=case.rows,
        page_table=case.table,
        cu_seqlens_q_host=starts,
        kv_lens_host=case.kv_lens.numpy(),
        rows_host=case.rows.numpy(),
    )
    pieces = cut(inputs, SPANS)
    queries = torch.cat([piece.queries for piece in pieces])
    assert sorted(queries.tolist()) == list(range(sum(COUNTS))), "each query is in one piece"
    pair = AttentionPair(case.spec, [case.reference], [case.reference])
    q = case.queries(sum(COUNTS))
    plan = pair.plan(type(inputs)(**{**inputs.__dict__, "pieces": pieces}), None)
    assert plan.prefill is not None
    assert isinstance(plan.prefill[0], PiecesPlan)
    torch.testing.assert_close(pair.attend(case.layer(), q, plan), masked(case, q, window), atol=1e-5, rtol=1e-5)
