"""Kernels of attention, rotation and the store of keys and values against their torch references.

In Triton's interpreter: no GPU needed. tests/gpu runs them compiled. In small shapes here, since the interpreter
executes one program after the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from minisgl_backend.encoders.attention import Segments, rotate
from minisgl_backend.kernels.ops import QKNormRope, TokenPlaces
from minisgl_backend.kernels.torch_ops import TorchOps
from minisgl_backend.kv.layout import FP8, KVScales, LayerKV
from tests.unit.kernels.fp8_numbers import assert_close_in_fp8

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels compiled", allow_module_level=True)
pytest.importorskip("triton", reason="pip install triton; tests/conftest.py turns its interpreter on")

from minisgl_backend.kernels import elementwise as fused
from minisgl_backend.kernels.attention import segments
from minisgl_backend.kernels.attention.choose import DecodeShape, decode_shape
from minisgl_backend.kernels.attention.decode import decode_attention, rotating_decode_attention
from minisgl_backend.kernels.attention.prefill import prefill_attention
from tests.attention_cases import PagedCase, check_decode, check_prefill

EARLY = DecodeShape(32, 32, 32, 4, 3, early=True, merged_at_once=16)

BALANCED = [DecodeShape(4, 64, 32, 4, 3, workers=5), DecodeShape(4, 64, 64, 4, 3, workers=1)]


def in_turn(rows: list[tuple[Any, ...]], shapes: list[DecodeShape], each: int, full: int) -> list[Any]:
    """(*row, shape) of every shape with `each` of the rows, which take turns: not all with all. With --full, `full`."""

    def pairs(each: int) -> list[tuple[int, int]]:
        return [((each * index + turn) % len(rows), index) for index in range(len(shapes)) for turn in range(each)]

    more = [pair for pair in pairs(full) if pair not in pairs(each)]
    return [
        pytest.param(*rows[row], shapes[index], marks=[pytest.mark.full] if (row, index) in more else [])
        for row, index in (*pairs(each), *more)
    ]


@pytest.mark.parametrize(
    ("page_size", "window", "shape"),
    in_turn(
        [(1, 0), (16, 0), (64, 0), (1, 24), (16, 1), (64, 64), (64, 200)],
        [DecodeShape(4, 64, 64, 4, 3), DecodeShape(1, 64, 32, 4, 3), *BALANCED],
        each=2,
        full=4,
    ),
)
def test_decode_attention(page_size, window, shape):
    check_decode(PagedCase([1, 63, 65, 300], page_size, (4, 2, 64), window=window), shape)


def shares() -> list[Any]:
    """(lengths, workers); all with all with --full."""
    short = [([1], (1, 100)), ([2, 1, 1, 33], (2, 6, 100)), ([700, 3, 64, 65, 1, 128], (1, 3, 6)), ([40] * 9, (2, 6))]
    return [
        pytest.param(lengths, workers, marks=[] if workers in kept else [pytest.mark.full])
        for lengths, kept in (*short, ([1000, 1000], (3,)))
        for workers in (1, 2, 3, 6, 100)
    ]


@pytest.mark.parametrize(("lengths", "workers"), shares())
def test_decode_attention_in_equal_shares(lengths, workers):
    """However many programs share the tiles: sequences in one part, in many, and many in one share."""
    check_decode(PagedCase(lengths, 16, (6, 2, 32)), DecodeShape(4, 64, 32, 4, 3, workers=workers))


def interpreted_shapes() -> list[DecodeShape]:
    """What decode_shape chooses, as far as the interpreter can tell. Of hundreds of programs that share a few tiles, a
    dozen: some of these have none already."""
    chosen = {decode_shape(batch, 2, group) for batch in (1, 4, 8, 64, 128, 256, 512, 1024) for group in (2, 4)}
    seen = {replace(one, num_warps=4, num_stages=3, registers=0, workers=min(one.workers, 12)) for one in chosen}
    return sorted(seen, key=str)


@pytest.mark.parametrize(
    ("page_size", "window", "shape"), in_turn([(1, 0), (16, 40), (64, 0)], interpreted_shapes(), 1, full=2), ids=str
)
def test_decode_attention_sees_no_token_of_others(page_size, shape, window):
    """What is no number stands in every place but those that a sequence may see, the rest of its last page included."""
    heads, kv_heads, dim = 4, 2, 64
    case = PagedCase([1, 31, 140], page_size, (heads, kv_heads, dim), window=window)
    k, v = torch.full_like(case.k, torch.nan), torch.full_like(case.v, torch.nan)
    for row, length in zip(case.rows.tolist(), case.kv_lens.tolist(), strict=True):
        seen = torch.arange(max(0, length - window) if window else 0, length)
        page, place = case.table[row][seen // page_size].long(), seen % page_size
        k[page, :, place], v[page, :, place] = case.k[page, :, place], case.v[page, :, place]
    workspace = case.workspace()
    q = torch.randn(3, heads, dim)
    qkv = torch.randn(3, (heads + 2 * kv_heads) * dim)
    rotation = QKNormRope(q_norm=None, k_norm=None, cos_sin=torch.randn(141, dim), eps=1e-6)

    def attended(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layer, batch = case.layer(LayerKV(k.clone(), v.clone())), case.batch(workspace, shape)
        return decode_attention(q, layer, batch), rotating_decode_attention(qkv, rotation, layer, batch)

    for found, expected in zip(attended(k, v), attended(case.k, case.v), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("page_size", "normed", "window", "shape"),
    in_turn(
        [(1, True, 0), (16, False, 0), (64, True, 0), (1, True, 40), (16, False, 1), (64, True, 2), (64, True, 100)],
        [DecodeShape(4, 64, 64, 4, 3), EARLY, *BALANCED],
        each=2,
        full=4,
    ),
)
def test_rotating_decode_attention(page_size, shape, normed, window):
    heads, kv_heads, dim = 6, 2, 48
    case = PagedCase([1, 64, 65, 200], page_size, (heads, kv_heads, dim), window=window)
    qkv = torch.randn(4, (heads + 2 * kv_heads) * dim)
    norms = [torch.randn(dim), torch.randn(dim)] if normed else [None, None]
    angles = torch.randn(201, dim // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions = case.kv_lens - 1
    pages = case.table[case.rows.long(), (positions // page_size).long()]
    slots = pages * page_size + positions % page_size
    k, v = case.k.clone(), case.v.clone()
    # Behind images the rotation has tokens elsewhere than the cache.
    shifts = None if normed else -torch.arange(len(case.table), dtype=torch.int32)
    turned = positions if shifts is None else (positions + shifts[case.rows.long()]).clamp(min=0)
    if shifts is not None:
        shifts[case.rows.long()] = turned - positions
    rotation = QKNormRope(q_norm=norms[0], k_norm=norms[1], cos_sin=cos_sin, eps=1e-6, shifts=shifts)
    q = TorchOps().rope_store(qkv.clone(), rotation, TokenPlaces(turned, slots), LayerKV(k, v), heads)
    expected = case.decoded(q, LayerKV(k, v))
    workspace = case.workspace()
    for _ in range(2):
        out = rotating_decode_attention(qkv, rotation, case.layer(), case.batch(workspace, shape))
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(case.k, k, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(case.v, v)
    assert int(workspace.counters.abs().sum()) == 0


@pytest.mark.parametrize("window", [0, 1, 24, 50])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_prefill_attention(page_size, window):
    check_prefill(PagedCase([5, 130, 33], page_size, (2, 1, 64), window=window), [5, 40, 1])


@pytest.mark.parametrize(("page_size", "window"), [(1, 0), (16, 24), (64, 50)])
def test_prefill_attention_to_later_tokens(page_size, window):
    check_prefill(PagedCase([5, 130, 33], page_size, (2, 1, 64), window=window), [5, 40, 1], causal=False)


@pytest.mark.parametrize(("page_size", "chunk"), [(1, 24), (16, 50), (64, 1)])
def test_attention_in_chunks(page_size, chunk):
    case = PagedCase([5, 130, 25, 200], page_size, (2, 1, 32), chunk=chunk)
    for shape in (DecodeShape(4, 64, 32, 4, 3), BALANCED[0]):
        check_decode(case, shape, launches=1)
    check_prefill(case, [5, 40, 1, 1])
    qkv, cos_sin = torch.randn(4, 4 * 32), torch.cat([torch.ones(200, 16), torch.zeros(200, 16)], 1)
    rotation = QKNormRope(q_norm=None, k_norm=None, cos_sin=cos_sin, eps=1e-6)
    out = rotating_decode_attention(qkv, rotation, case.layer(), case.batch(case.workspace(), EARLY))
    torch.testing.assert_close(out, case.decoded(qkv[:, :64].view(4, 2, 32)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("page_size", "window"), [(1, 24), (16, 0), (64, 100)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_attention_over_an_fp8_cache(page_size, window, dtype, tolerance):
    """Against float32 attention over what the stored numbers mean."""
    case = PagedCase([5, 130, 33, 200], page_size, (6, 2, 48), window=window)
    kv = case.quantize(KVScales(0.03, 0.5))
    q = case.queries(4)
    for shape in (DecodeShape(4, 64, 64, 4, 3), DecodeShape(1, 64, 32, 4, 3)):
        out = decode_attention(q.to(dtype), case.layer(kv), case.batch(case.workspace(), shape))
        torch.testing.assert_close(out.float(), case.decoded(q), atol=tolerance, rtol=tolerance)
    starts, q = torch.tensor([0, 5, 45, 46, 47], dtype=torch.int32), case.queries(47)
    out = prefill_attention(q.to(dtype), case.layer(kv), case.prefill_batch(starts))
    torch.testing.assert_close(out.float(), case.prefilled(q, starts), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("page_size", "window", "shape"),
    in_turn([(1, 0), (16, 24), (64, 0)], [DecodeShape(4, 64, 64, 4, 3), EARLY, *BALANCED], 1, full=3),
)
def test_rotating_decode_attention_over_an_fp8_cache(page_size, window, shape):
    """The new token is attended to as it is stored: quantized."""
    heads, kv_heads, dim = 6, 2, 48
    case = PagedCase([1, 64, 65, 200], page_size, (heads, kv_heads, dim), window=window)
    kv = case.quantize(KVScales(0.25, 0.125))
    qkv = torch.randn(4, (heads + 2 * kv_heads) * dim)
    norms = [torch.randn(dim), torch.randn(dim)]
    angles = torch.randn(201, dim // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions = case.kv_lens - 1
    slots = case.table[case.rows.long(), (positions // page_size).long()] * page_size + positions % page_size
    workspace = case.workspace()
    stored = LayerKV(kv.k.clone(), kv.v.clone(), kv.scales)
    rotation = QKNormRope(q_norm=norms[0], k_norm=norms[1], cos_sin=cos_sin, eps=1e-6)
    q = TorchOps().rope_store(qkv.clone(), rotation, TokenPlaces(positions, slots), stored, heads)
    for _ in range(2):
        out = rotating_decode_attention(qkv, rotation, case.layer(kv), case.batch(workspace, shape))
        assert_close_in_fp8(kv.k, stored.k)
        assert_close_in_fp8(kv.v, stored.v)
        meant = LayerKV(kv.k.float() * kv.scales.k, kv.v.float() * kv.scales.v)
        expected = case.decoded(q, meant)
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    assert int(workspace.counters.abs().sum()) == 0


@pytest.mark.parametrize("cache", [FP8, torch.float16])
def test_rope_store_saturates(cache):
    torch.manual_seed(0)
    heads, kv_heads, dim, page_size = 4, 2, 32, 16
    qkv = torch.randn(40, (heads + 2 * kv_heads) * dim)
    qkv[7] *= 1e6
    angles = torch.randn(50, dim // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions = torch.randint(0, 50, (40,), dtype=torch.int32)
    slots = torch.randperm(4 * page_size)[:40].int()
    scales = KVScales(0.5, 0.25) if cache == FP8 else KVScales()
    pools = []
    for rope_store in (fused.rope_store, TorchOps().rope_store):
        pool = torch.zeros(2, 4, kv_heads, page_size, dim).to(cache)
        rotation = QKNormRope(q_norm=None, k_norm=None, cos_sin=cos_sin, eps=1e-6)
        rope_store(qkv.clone(), rotation, TokenPlaces(positions, slots), LayerKV(pool[0], pool[1], scales), heads)
        pools.append(pool)
    if cache == FP8:
        assert_close_in_fp8(*pools)
    else:
        torch.testing.assert_close(*pools)
    assert pools[0].float().abs().max() == torch.finfo(cache).max


@pytest.mark.parametrize("num_tokens", [3, 40])
@pytest.mark.parametrize("normed", [True, False])
def test_rope_store(num_tokens, normed):
    torch.manual_seed(num_tokens)
    heads, kv_heads, dim, page_size = 4, 2, 32, 16
    qkv = torch.randn(num_tokens, (heads + 2 * kv_heads) * dim)
    norms = [torch.randn(dim), torch.randn(dim)] if normed else [None, None]
    angles = torch.randn(50, dim // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions = torch.randint(0, 50, (num_tokens,), dtype=torch.int32)
    slots = torch.randperm(4 * page_size)[:num_tokens].int()
    results = []
    for rope_store in (fused.rope_store, TorchOps().rope_store):
        pool = torch.zeros(2, 4, kv_heads, page_size, dim)
        rotation = QKNormRope(q_norm=norms[0], k_norm=norms[1], cos_sin=cos_sin, eps=1e-6)
        q = rope_store(qkv.clone(), rotation, TokenPlaces(positions, slots), LayerKV(pool[0], pool[1]), heads)
        results.append((q.clone(), pool))
    for out, expected in zip(*results, strict=True):
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("head_dim", "lengths"),
    [(72, [64, 64, 12, 1]), (80, [3, 130]), (64, [65]), pytest.param(16, [5, 200], marks=pytest.mark.full)],
)
def test_attention_within_segments(head_dim, lengths):
    """Of encoders: rotated in place, then every patch of an image or a window sees all of it."""
    torch.manual_seed(head_dim)
    qkv = torch.randn(sum(lengths), 3, 2, head_dim, dtype=torch.float16)
    angles = torch.randn(len(qkv), head_dim // 2)
    exact = qkv.float()
    rotate(exact, angles.cos(), angles.sin())
    segments.rotate(qkv, angles.cos(), angles.sin())
    torch.testing.assert_close(qkv.float(), exact, rtol=1e-3, atol=1e-3)
    found, expected = (Segments(lengths, qkv.device, part=32, fused=one) for one in (True, False))
    for part in ((0, len(qkv)), (32, 64), (64, len(qkv))):
        if part[0] < part[1] <= len(qkv):
            torch.testing.assert_close(
                found.attend(qkv, *part).float(), expected.attend(qkv.float(), *part), rtol=2e-3, atol=2e-3
            )


@pytest.mark.parametrize(("head_dim", "lengths"), [(72, [200]), (16, [129, 66])])
def test_two_programs_share_the_keys_of_long_segments(head_dim, lengths):
    torch.manual_seed(head_dim)
    qkv = 3 * torch.randn(sum(lengths), 3, 3, head_dim, dtype=torch.float16)
    tiled = Segments(lengths, qkv.device, part=64, fused=True)._tiles
    places = tiled.places[tiled.places[:, 1] >= 64]
    whole, shared = (
        segments.segment_attention(qkv, tiled._replace(places=places), 64, len(qkv), in_halves=one)
        for one in (False, True)
    )
    torch.testing.assert_close(shared.float(), whole.float(), rtol=2e-3, atol=2e-3)


def test_halves_pay_where_multiprocessors_would_idle():
    """With 16 heads and 132 multiprocessors: of 8, 16, 24, 32 tiles, and of many."""
    assert [segments.halves_pay(tiles, 16, 132) for tiles in (8, 16, 24, 32, 370)] == [True, False, True, False, False]
