"""Kernels of latents (MLA) against their torch references, in Triton's interpreter; tests/gpu runs them compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from minisgl_backend.attention.latent.reference import TorchLatentBackend
from minisgl_backend.attention.layer import LatentHeads
from minisgl_backend.kernels.ops import LatentNormRope, TokenPlaces
from minisgl_backend.kernels.torch_ops import TorchOps
from tests.latents import LatentCase

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels compiled", allow_module_level=True)
pytest.importorskip("triton", reason="pip install triton; tests/conftest.py turns its interpreter on")

from minisgl_backend.attention.latent.triton_attn import TritonLatentBackend
from minisgl_backend.kernels.attention.latent_decode import (
    LatentDecodeBatch,
    LatentDecodeShape,
    LatentDecodeWorkspace,
    latent_decode_attention,
)
from minisgl_backend.kernels.attention.latent_store import latent_store
from minisgl_backend.kv.layout import FP8, KVScales, LayerKV
from tests.unit.kernels.fp8_numbers import assert_close_in_fp8

CPU = torch.device("cpu")
HEADS = LatentHeads(rank=32, nope_dim=24, rope_dim=8, v_dim=20)


def expected_of(case: LatentCase, q: torch.Tensor, num_queries: int) -> torch.Tensor:
    """Absorbed queries [batch * num_queries, num_q_heads, rank + rope_dim] over latents, by torch."""
    backend, out = TorchLatentBackend(case.spec, case.group), torch.empty(*q.shape[:2], case.heads.rank)
    for query in range(num_queries):
        inputs = case.decode_inputs()
        lens = case.kv_lens - (num_queries - 1 - query)
        inputs = replace(inputs, kv_lens=torch.from_numpy(lens), kv_lens_host=lens)
        plan = backend.plan_decode(inputs)
        mine = q[query::num_queries]
        out[query::num_queries] = backend.attend_latents(
            case.layer, mine[..., : case.heads.rank], mine[..., case.heads.rank :], plan
        )
    return out


@pytest.mark.parametrize(
    ("lengths", "page_size", "heads", "queries", "shape", "scale"),
    [
        ([1], 1, 4, 1, LatentDecodeShape(16, 16, 4, 2, 3), None),
        ([3, 1, 1, 33], 16, 20, 1, LatentDecodeShape(16, 32, 4, 2, 1), None),
        ([130, 3, 64, 65, 1], 64, 4, 1, LatentDecodeShape(16, 32, 4, 2, 5), None),
        ([40] * 5, 16, 6, 3, LatentDecodeShape(16, 16, 4, 2, 4), None),
        ([90, 90], 8, 3, 2, LatentDecodeShape(16, 16, 4, 2, 100), None),
        ([90, 3], 8, 3, 2, LatentDecodeShape(16, 16, 4, 2, 4), 0.25),
    ],
)
def test_decode(
    lengths: list[int], page_size: int, heads: int, queries: int, shape: LatentDecodeShape, scale: float | None
) -> None:
    """Sequences in one part, in many, and many in one share; blocks of rows that are not full; latents in FP8."""
    case = LatentCase(HEADS, heads, lengths, page_size, scale=scale)
    q = torch.randn(len(lengths) * queries, heads, HEADS.rank + HEADS.rope_dim)
    workspace = LatentDecodeWorkspace(heads * queries, HEADS.rank, len(lengths), CPU)
    i = case.decode_inputs()
    batch = LatentDecodeBatch(i.rows, i.kv_lens, i.page_table, workspace, shape, num_queries=queries)
    found = latent_decode_attention(q[..., : HEADS.rank].contiguous(), q[..., HEADS.rank :], case.layer, batch)
    torch.testing.assert_close(found, expected_of(case, q, queries), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("page_size", "piece_tokens", "scale"), [(1, 50, None), (16, 1000, None), (16, 17, None), (16, 17, 0.25)]
)
def test_prefill(page_size: int, piece_tokens: int, scale: float | None) -> None:
    """Prompts, chunks behind a prefix and single tokens, expanded at once or in pieces."""
    kv_lens, q_lens = [20, 41, 5], [20, 18, 1]
    case = LatentCase(HEADS, 2, kv_lens, page_size, scale=scale)
    q = case.queries(sum(q_lens))
    results = []
    for kind, tokens in ((TorchLatentBackend, 1000), (TritonLatentBackend, piece_tokens), (TorchLatentBackend, 50)):
        backend = kind(case.spec, case.group)
        backend._piece_tokens = min(tokens, backend._piece_tokens)
        results.append(backend.prefill(case.layer, q, backend.plan_prefill(case.prefill_inputs(q_lens))))
    expected, *others = results
    for found in others:
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    # Absorbed and expanded are the same attention.
    decoded = TorchLatentBackend(case.spec, case.group)
    last = torch.tensor(q_lens).cumsum(0) - 1
    torch.testing.assert_close(
        decoded.decode(case.layer, q[last], decoded.plan_decode(case.decode_inputs())), expected[last],
        atol=1e-4, rtol=1e-4,
    )  # fmt: skip


@pytest.mark.parametrize(("num_heads", "scale"), [(5, None), (0, None), (5, 0.01)])
def test_store(num_heads: int, scale: float | None) -> None:
    """Of latents alone, too; and in FP8, where some numbers saturate."""
    page_size = 16
    case = LatentCase(HEADS, 5, [30, 20], page_size, scale=scale)
    count, rank, rope = 25, HEADS.rank, HEADS.rope_dim
    positions = torch.randint(0, 50, (count,), dtype=torch.int32)
    slots = (torch.randperm(30)[:count] + page_size).int()
    rotation = LatentNormRope(norm=torch.randn(rank), cos_sin=torch.randn(50, rope), eps=1e-6)
    caches, turned = [], []
    for store in (TorchOps().latent_store, latent_store):
        torch.manual_seed(0)
        q, latents = case.queries(count)[:, :num_heads], torch.randn(count, rank + rope + 3)[:, : rank + rope]
        cache = case.layer.kv.k.clone()
        turned.append(
            store(q, latents, rotation, TokenPlaces(positions, slots), LayerKV(cache, cache, KVScales(scale or 1.0)))
        )
        caches.append(cache)
    torch.testing.assert_close(turned[1], turned[0], atol=1e-5, rtol=1e-5)
    if scale is None:
        torch.testing.assert_close(caches[1], caches[0], atol=1e-5, rtol=1e-5)
    else:
        found, expected = (cache.view(-1, page_size, rank + rope).flatten(0, 1)[slots.long()] for cache in caches)
        assert_close_in_fp8(found, expected)
        assert expected.float().abs().max() == torch.finfo(FP8).max
