"""The Triton-language kernels against their torch references, in Triton's interpreter: no GPU needed.

tests/gpu runs them compiled. In small shapes here, since the interpreter executes one program after the other.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from minisgl_backend.attention.base import DecodeInputs, PrefillInputs
from minisgl_backend.attention.reference import TorchBackend
from minisgl_backend.kernels.torch_ops import TorchOps
from minisgl_backend.kv.layout import FP8, KVScales, LayerKV
from minisgl_backend.request import SamplingParams
from minisgl_backend.sampling.logits_processors import TokenRules
from minisgl_backend.sampling.metadata import SamplingInputs
from minisgl_backend.sampling.params import encode_params, flags_of
from minisgl_backend.sampling.penalties import PenaltyCounts
from minisgl_backend.sampling.sampler import Sampler
from tests.specs import one_group

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels compiled", allow_module_level=True)
pytest.importorskip("triton", reason="pip install triton; tests/conftest.py turns its interpreter on")

from minisgl_backend.kernels import fused, moe_few, moe_one, moe_wide, rows, sampling, small_linear
from minisgl_backend.kernels.decode_attention import (
    DecodeShape,
    DecodeWorkspace,
    decode_attention,
    decode_shape,
    rotating_decode_attention,
)
from minisgl_backend.kernels.moe import moe, route
from minisgl_backend.kernels.moe_tiles import align
from minisgl_backend.kernels.prefill_attention import prefill_attention
from minisgl_backend.kernels.triton_ops import TritonOps
from tests.sampling_cases import SamplingCase, logits_of

CPU = torch.device("cpu")


class PagedCase:
    """A random pool, shuffled pages and rows, and the same attention by the torch backend."""

    def __init__(
        self, kv_lens: list[int], page_size: int, heads: int, kv_heads: int, head_dim: int, window: int = 0
    ) -> None:
        torch.manual_seed(page_size)
        most = -(-max(kv_lens) // page_size)
        count = len(kv_lens)
        pool = (1 + count * most, kv_heads, page_size, head_dim)
        self.k, self.v = torch.randn(pool), torch.randn(pool)
        self.table = (torch.randperm(count * most) + 1).int().reshape(count, most)
        self.rows = torch.randperm(count).int()
        self.kv_lens = torch.tensor(kv_lens, dtype=torch.int32)
        self.spec = one_group(
            num_q_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, page_size=page_size,
            max_seq_len=most * page_size, max_rows=count, window=window or None,
        )  # fmt: skip
        self.reference = TorchBackend(self.spec, self.spec.groups[0])

    def quantize(self, scales: KVScales) -> LayerKV:
        """The pool in FP8; what it means replaces the pool itself."""
        kv = LayerKV((self.k / scales.k).to(FP8), (self.v / scales.v).to(FP8), scales)
        self.k, self.v = kv.k.float() * scales.k, kv.v.float() * scales.v
        return kv


EARLY = DecodeShape(32, 32, 32, 4, 3, early=True, merged_at_once=16)
BALANCED = [DecodeShape(4, 64, 32, 4, 3, workers=5), DecodeShape(4, 64, 64, 4, 3, workers=1)]


@pytest.mark.parametrize(("page_size", "window"), [(1, 0), (16, 0), (64, 0), (1, 24), (16, 1), (64, 64), (64, 200)])
@pytest.mark.parametrize("shape", [DecodeShape(4, 64, 64, 4, 3), DecodeShape(1, 64, 32, 4, 3), *BALANCED])
def test_decode_attention(page_size, window, shape):
    case = PagedCase([1, 63, 65, 300], page_size, heads=4, kv_heads=2, head_dim=64, window=window)
    q = torch.randn(4, 4, 64)
    workspace = DecodeWorkspace(4, 4, 2, 64, CPU)
    inputs = DecodeInputs(
        kv_lens=case.kv_lens, rows=case.rows, page_table=case.table, kv_lens_host=case.kv_lens.numpy(),
        rows_host=case.rows.numpy(),
    )  # fmt: skip
    expected = case.reference.decode(q, LayerKV(case.k, case.v), case.reference.plan_decode(inputs))
    for _ in range(2):  # the counters are back at zero after each launch
        out = decode_attention(
            q, case.k, case.v, case.rows, case.kv_lens, case.table, workspace, shape, 0.125, window=window
        )
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert int(workspace.counters.abs().sum()) == 0


@pytest.mark.parametrize("workers", [1, 2, 3, 6, 100])
@pytest.mark.parametrize("lengths", [[1], [2, 1, 1, 33], [700, 3, 64, 65, 1, 128], [40] * 9, [1000, 1000]])
def test_decode_attention_in_equal_shares(lengths, workers):
    """However many programs share the tiles: sequences in one part, in many, and many in one share."""
    case = PagedCase(lengths, 16, heads=6, kv_heads=2, head_dim=32)
    q = torch.randn(len(lengths), 6, 32)
    workspace = DecodeWorkspace(len(lengths), 6, 2, 32, CPU)
    inputs = DecodeInputs(
        kv_lens=case.kv_lens, rows=case.rows, page_table=case.table, kv_lens_host=case.kv_lens.numpy(),
        rows_host=case.rows.numpy(),
    )  # fmt: skip
    scale = case.spec.groups[0].softmax_scale
    expected = case.reference.decode(q, LayerKV(case.k, case.v), case.reference.plan_decode(inputs))
    shape = DecodeShape(4, 64, 32, 4, 3, workers=workers)
    for _ in range(2):
        out = decode_attention(q, case.k, case.v, case.rows, case.kv_lens, case.table, workspace, shape, scale)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert int(workspace.counters.abs().sum()) == 0


@pytest.mark.parametrize(("page_size", "window"), [(1, 0), (16, 40), (64, 0)])
@pytest.mark.parametrize(
    "shape",
    sorted(
        {decode_shape(batch, 2, group) for batch in (1, 4, 8, 64, 128, 256, 512, 1024) for group in (2, 4)}, key=str
    ),
    ids=str,
)
def test_decode_attention_sees_no_token_of_others(page_size, shape, window):
    """What is no number stands in every place but those that a sequence may see, the rest of its last page included."""
    heads, kv_heads, dim = 4, 2, 64
    case = PagedCase([1, 31, 140], page_size, heads, kv_heads, dim, window)
    k, v = torch.full_like(case.k, torch.nan), torch.full_like(case.v, torch.nan)
    for row, length in zip(case.rows.tolist(), case.kv_lens.tolist(), strict=True):
        seen = torch.arange(max(0, length - window) if window else 0, length)
        page, place = case.table[row][seen // page_size].long(), seen % page_size
        k[page, :, place], v[page, :, place] = case.k[page, :, place], case.v[page, :, place]
    workspace = DecodeWorkspace(3, heads, kv_heads, dim, CPU)
    q = torch.randn(3, heads, dim)
    qkv, cos_sin = torch.randn(3, (heads + 2 * kv_heads) * dim), torch.randn(141, dim)

    def attended(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rest = (case.rows, case.kv_lens, case.table, workspace, shape, 0.125)
        k, v = k.clone(), v.clone()
        return (
            decode_attention(q, k, v, *rest, window=window),
            rotating_decode_attention(qkv, None, None, cos_sin, k, v, *rest, 1e-6, window=window),
        )

    for found, expected in zip(attended(k, v), attended(case.k, case.v), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("page_size", "normed", "window"),
    [(1, True, 0), (16, False, 0), (64, True, 0), (1, True, 40), (16, False, 1), (64, True, 2), (64, True, 100)],
)
@pytest.mark.parametrize("shape", [DecodeShape(4, 64, 64, 4, 3), EARLY, *BALANCED])
def test_rotating_decode_attention(page_size, shape, normed, window):
    heads, kv_heads, dim = 6, 2, 48
    case = PagedCase([1, 64, 65, 200], page_size, heads, kv_heads, dim, window)
    qkv = torch.randn(4, (heads + 2 * kv_heads) * dim)
    norms = [torch.randn(dim), torch.randn(dim)] if normed else [None, None]
    angles = torch.randn(201, dim // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions = case.kv_lens - 1
    pages = case.table[case.rows.long(), (positions // page_size).long()]
    slots = pages * page_size + positions % page_size
    inputs = DecodeInputs(
        kv_lens=case.kv_lens, rows=case.rows, page_table=case.table, kv_lens_host=case.kv_lens.numpy(),
        rows_host=case.rows.numpy(),
    )  # fmt: skip
    k, v = case.k.clone(), case.v.clone()
    q = TorchOps().rope_store(qkv.clone(), *norms, cos_sin, positions, slots, k, v, heads, 1e-6)
    expected = case.reference.decode(q, LayerKV(k, v), case.reference.plan_decode(inputs))
    workspace = DecodeWorkspace(4, heads, kv_heads, dim, CPU)
    for _ in range(2):
        out = rotating_decode_attention(
            qkv, *norms, cos_sin, case.k, case.v, case.rows, case.kv_lens, case.table, workspace, shape,
            case.spec.groups[0].softmax_scale, 1e-6, window=window,
        )  # fmt: skip
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(case.k, k, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(case.v, v)
    assert int(workspace.counters.abs().sum()) == 0


@pytest.mark.parametrize("window", [0, 1, 24, 50])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_prefill_attention(page_size, window):
    q_lens, kv_lens = [5, 40, 1], [5, 130, 33]
    case = PagedCase(kv_lens, page_size, heads=2, kv_heads=1, head_dim=64, window=window)
    starts = torch.tensor([0, 5, 45, 46], dtype=torch.int32)
    q = torch.randn(sum(q_lens), 2, 64)
    inputs = PrefillInputs(
        cu_seqlens_q=starts, kv_lens=case.kv_lens, rows=case.rows, page_table=case.table,
        cu_seqlens_q_host=starts.numpy(), kv_lens_host=case.kv_lens.numpy(), rows_host=case.rows.numpy(),
    )  # fmt: skip
    expected = case.reference.prefill(q, LayerKV(case.k, case.v), case.reference.plan_prefill(inputs))
    out = prefill_attention(q, case.k, case.v, starts, case.kv_lens, case.rows, case.table, max(q_lens), 0.125, window)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("page_size", "window"), [(1, 24), (16, 0), (64, 100)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_attention_over_an_fp8_cache(page_size, window, dtype, tolerance):
    """Against float32 attention over what the stored numbers mean."""
    q_lens, kv_lens = [5, 40, 1, 1], [5, 130, 33, 200]
    case = PagedCase(kv_lens, page_size, heads=6, kv_heads=2, head_dim=48, window=window)
    kv = case.quantize(KVScales(0.03, 0.5))
    scale = case.spec.groups[0].softmax_scale
    decode = DecodeInputs(
        kv_lens=case.kv_lens, rows=case.rows, page_table=case.table, kv_lens_host=case.kv_lens.numpy(),
        rows_host=case.rows.numpy(),
    )  # fmt: skip
    q = torch.randn(4, 6, 48)
    meant = LayerKV(case.k, case.v)
    expected = case.reference.decode(q, meant, case.reference.plan_decode(decode))
    for shape in (DecodeShape(4, 64, 64, 4, 3), DecodeShape(1, 64, 32, 4, 3)):
        workspace = DecodeWorkspace(4, 6, 2, 48, CPU)
        out = decode_attention(
            q.to(dtype), kv.k, kv.v, case.rows, case.kv_lens, case.table, workspace, shape, scale, window=window,
            scales=kv.scales,
        )  # fmt: skip
        torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
    starts = torch.tensor([0, 5, 45, 46, 47], dtype=torch.int32)
    q = torch.randn(47, 6, 48)
    prefill = PrefillInputs(
        cu_seqlens_q=starts, kv_lens=case.kv_lens, rows=case.rows, page_table=case.table,
        cu_seqlens_q_host=starts.numpy(), kv_lens_host=case.kv_lens.numpy(), rows_host=case.rows.numpy(),
    )  # fmt: skip
    expected = case.reference.prefill(q, meant, case.reference.plan_prefill(prefill))
    out = prefill_attention(
        q.to(dtype), kv.k, kv.v, starts, case.kv_lens, case.rows, case.table, max(q_lens), scale, window, kv.scales
    )
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shape", [DecodeShape(4, 64, 64, 4, 3), EARLY, *BALANCED])
@pytest.mark.parametrize(("page_size", "window"), [(1, 0), (16, 24), (64, 0)])
def test_rotating_decode_attention_over_an_fp8_cache(page_size, window, shape):
    """The new token is attended to as it is stored: quantized."""
    heads, kv_heads, dim = 6, 2, 48
    case = PagedCase([1, 64, 65, 200], page_size, heads, kv_heads, dim, window)
    kv = case.quantize(KVScales(0.25, 0.125))
    qkv = torch.randn(4, (heads + 2 * kv_heads) * dim)
    norms = [torch.randn(dim), torch.randn(dim)]
    angles = torch.randn(201, dim // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions = case.kv_lens - 1
    slots = case.table[case.rows.long(), (positions // page_size).long()] * page_size + positions % page_size
    workspace = DecodeWorkspace(4, heads, kv_heads, dim, CPU)
    inputs = DecodeInputs(
        kv_lens=case.kv_lens, rows=case.rows, page_table=case.table, kv_lens_host=case.kv_lens.numpy(),
        rows_host=case.rows.numpy(),
    )  # fmt: skip
    stored = LayerKV(kv.k.clone(), kv.v.clone(), kv.scales)
    q = TorchOps().rope_store(
        qkv.clone(), *norms, cos_sin, positions, slots, stored.k, stored.v, heads, 1e-6, kv.scales
    )
    for _ in range(2):
        out = rotating_decode_attention(
            qkv, *norms, cos_sin, kv.k, kv.v, case.rows, case.kv_lens, case.table, workspace, shape,
            case.spec.groups[0].softmax_scale, 1e-6, window=window, scales=kv.scales,
        )  # fmt: skip
        assert_close_in_fp8(kv.k, stored.k)
        assert_close_in_fp8(kv.v, stored.v)
        meant = LayerKV(kv.k.float() * kv.scales.k, kv.v.float() * kv.scales.v)
        expected = case.reference.decode(q, meant, case.reference.plan_decode(inputs))
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    assert int(workspace.counters.abs().sum()) == 0


def assert_close_in_fp8(found, expected):
    """Few numbers may differ: the interpreter, where it rounds up, forgets the carry into the exponent.
    tests/gpu/test_kv_formats.py compares what the hardware stores."""
    assert (found.view(torch.uint8) != expected.view(torch.uint8)).float().mean() < 0.03


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
        rope_store(qkv.clone(), None, None, cos_sin, positions, slots, pool[0], pool[1], heads, 1e-6, scales=scales)
        pools.append(pool)
    if cache == FP8:
        assert_close_in_fp8(*pools)
    else:
        torch.testing.assert_close(*pools)
    assert pools[0].float().abs().max() == torch.finfo(cache).max


@pytest.mark.parametrize("num_rows", [1, 2, 5, 17])
@pytest.mark.parametrize("split", [1, 3])
def test_small_linear(num_rows, split):
    torch.manual_seed(num_rows)
    x, weight = torch.randn(num_rows, 160), torch.randn(60, 160) / math.sqrt(160)
    norm, bias, residual = torch.randn(160), torch.randn(60), torch.randn(num_rows, 60)
    workspace = small_linear.LinearWorkspace(CPU, max_out=128, max_split=4)
    shapes = [small_linear.LinearShape(16, 32, split, 4, 2)]
    if num_rows <= small_linear.MAX_VECTOR_ROWS:
        shapes.append(small_linear.LinearShape(8, 64, 1, 4, 1, vector=True))
    if num_rows <= small_linear.MAX_SLICED_ROWS:
        shapes.append(small_linear.LinearShape(16, 32, split, 4, 1, slices=8 // min(split, 2)))
    reference = TorchOps()
    for shape in shapes:
        for wish in ({}, {"bias": bias, "residual": residual}, {"norm_weight": norm, "eps": 1e-6}):
            expected = reference.linear(x, weight, **{k: v.clone() if k == "residual" else v for k, v in wish.items()})
            out = small_linear.linear(x, weight, workspace, shape=shape, **wish)
            torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
        gated = small_linear.linear(x, weight, workspace, shape=shape, norm_weight=norm, eps=1e-6, gated=True)
        expected = reference.linear(x, weight, norm_weight=norm, eps=1e-6, gated=True)
        torch.testing.assert_close(gated, expected, atol=1e-4, rtol=1e-4)
    assert int(workspace.counters.abs().sum()) == 0


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("num_rows", [3, 16, 17, 32])
@pytest.mark.parametrize(("size_out", "size_in"), [(3072, 1024), (12800, 5120), (17408, 5120), (5120, 12800)])
def test_stages_of_a_small_product_fit_a_multiprocessor(num_rows, size_out, size_in, gated):
    shape = small_linear.linear_shape(num_rows, size_out, size_in, gated)
    if shape.slices == 1:
        numbers = shape.tile_out * (2 if gated else 1) + max(16, num_rows)
        assert 2 * shape.num_stages * shape.tile_in * numbers <= 227 << 10


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("size_out", "size_in"), [(4096, 1024), (1024, 2048), (1024, 3072), (5120, 2048), (2048, 4096)]
)
def test_a_product_without_a_loop_holds_its_inputs_and_fits_a_small_gpu(size_out, size_in, gated):
    """99 KiB of shared memory for a block have GPUs of compute capability 8.6, 8.9 and 12."""
    for num_rows in range(2, small_linear.MAX_SLICED_ROWS + 1):
        shape = small_linear.linear_shape(num_rows, size_out, size_in, gated)
        if shape.slices > 1:
            assert shape.slices * shape.tile_in * shape.split >= size_in
            numbers = shape.tile_out * (2 if gated else 1) + 16
            assert 2 * shape.slices * shape.tile_in * numbers <= 99 << 10


def test_which_gated_products_are_small():
    """A shard of Qwen3-32B, whose norm comes before it; not where the norm would be inside, nor smaller weights."""
    ops = object.__new__(TritonOps)

    def is_small(rows, size_out, size_in, normed):
        x = torch.empty(rows, size_in, dtype=torch.bfloat16, device="meta")
        weight = torch.empty(2 * size_out, size_in, dtype=torch.bfloat16, device="meta")
        return ops._is_small(x, weight, None, True, normed)

    assert all(is_small(rows, 12800, 5120, normed=False) for rows in (1, 3, 16, 32))
    assert not is_small(33, 12800, 5120, normed=False)
    assert not is_small(8, 12800, 5120, normed=True)
    assert not is_small(8, 25600, 5120, normed=True)
    assert not is_small(8, 8704, 5120, normed=False)
    assert is_small(8, 3072, 1024, normed=True)
    assert not is_small(9, 3072, 1024, normed=True)


def test_one_row_of_many_inputs():
    for size_in in (8192, 12800, 17408):
        assert small_linear.linear_shape(1, 5120, size_in).tile_in == 4096
        assert small_linear.linear_shape(1, 5120, size_in, gated=True).tile_in == 2048


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("gated", [False, True])
def test_small_linear_with_activations_that_their_norm_weight_would_make_too_large(split, gated):
    """In float16, whose largest number is 65,504: 9,000 times 8 is more."""
    torch.manual_seed(0)
    x = torch.randn(5, 128).half()
    x[2, 7] = 9000
    norm = torch.ones(128).half()
    norm[7] = 8
    weight = (torch.randn(64, 128) * 0.1).half()
    workspace = small_linear.LinearWorkspace(CPU, max_out=128, max_split=4)
    normed = x.float() * torch.rsqrt(x.float().square().mean(1, keepdim=True) + 1e-6) * norm.float()
    expected = normed @ weight.float().T
    if gated:
        expected = torch.nn.functional.silu(expected[:, :32]) * expected[:, 32:]
    for slices in (1, 4):
        shape = small_linear.LinearShape(16, 32, split, 4, 2, slices=slices)
        out = small_linear.linear(x, weight, workspace, norm_weight=norm, eps=1e-6, gated=gated, shape=shape)
        torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)


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
        q = rope_store(qkv.clone(), *norms, cos_sin, positions, slots, pool[0], pool[1], heads, 1e-6)
        results.append((q.clone(), pool))
    for out, expected in zip(*results, strict=True):
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_norm_and_activation():
    x, weight = torch.randn(5, 96), torch.randn(96)
    torch.testing.assert_close(fused.rms_norm(x, weight, 1e-6), TorchOps().rms_norm(x, weight, 1e-6))
    gate_up = torch.randn(5, 3000)
    expected = F.silu(gate_up[:, :1500]) * gate_up[:, 1500:]
    torch.testing.assert_close(fused.silu_mul(gate_up), expected)


@pytest.mark.parametrize("kind", ["normal", "bf16", "equal"])
def test_sampling_is_that_of_the_sampler(kind: str):
    """Every option; with room for 128 tokens near a border, so that some rows need the slow way."""
    vocab_size = 300
    case = SamplingCase(vocab_size, CPU, 1)
    n = len(case.names)
    workspace = sampling.SamplingWorkspace(n, vocab_size, CPU, slice=128, candidates=128, pivots=4, rounds=2)
    logits = logits_of(kind, n, vocab_size, 1)
    before = logits.clone()
    reference, kernels = case.sampler(), case.sampler(workspace)
    expected, found = reference.sample(logits, case.inputs), kernels.sample(logits, case.inputs)
    assert found.t().tolist() == expected.t().tolist()
    assert torch.equal(reference.counts, kernels.counts)
    assert torch.equal(logits, before)
    assert int(workspace.counters.abs().sum()) == 0


@pytest.mark.parametrize("shape", ["peaked", "flat", "equal", "huge", "masked", "outlier"])
def test_borders_of_top_p_and_top_k(shape: str):
    """Against the torch sampler, on distributions that make a bracket narrow at once, late or never."""
    vocab_size, n = 1000, 9
    logits = torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(7)) * 0.5
    if shape == "peaked":
        logits *= 10
    if shape == "equal":
        logits.zero_()
    if shape == "huge":
        logits *= 1e4
    if shape == "masked":
        logits[:, torch.arange(vocab_size) % 7 != 0] = -float("inf")
        logits[0, 1:] = -float("inf")
        logits[1] = -float("inf")
    if shape == "outlier":
        logits[:, 500] = 12.0
    logits = logits.bfloat16()
    options = [
        {"temperature": 0.6, "top_p": 0.95}, {"temperature": 0.01, "top_p": 0.95}, {"temperature": 5.0, "top_p": 0.95},
        {"temperature": 1.0, "top_p": 1e-6}, {"temperature": 1.0, "top_p": 0.999999},
        {"temperature": 1.0, "top_p": 0.5, "min_p": 0.3}, {"temperature": 1.0, "top_k": 200},
        {"temperature": 1.0, "top_k": 150, "min_p": 0.3}, {"temperature": 1.0, "top_k": 200, "top_p": 0.9},
    ]  # fmt: skip
    params = [SamplingParams(**one, seed=line) for line, one in enumerate(options)]
    table = torch.stack([torch.from_numpy(encode_params(one, vocab_size).copy()) for one in params])
    rows, positions = torch.arange(n, dtype=torch.int32), torch.arange(20, 20 + n, dtype=torch.int32)
    flags = 0
    for one in params:
        flags |= flags_of(one, vocab_size)
    inputs = SamplingInputs(rows=rows, positions=positions, flags=flags, searches=True, mask_index=None, mask_bits=None)
    tokens, counts = torch.zeros(n, 64, dtype=torch.int32), PenaltyCounts(n, vocab_size, CPU)
    rules = TokenRules(n, (), 64, CPU)
    expected = Sampler(table, tokens, counts, rules).sample(logits, inputs)
    # Programs with one slice, and with several; a bracket that two rounds make narrow, and one that stays wide.
    settings = [
        {"slice": 256, "candidates": 128, "pivots": pivots, "rounds": rounds, "programs": programs}
        for programs, pivots, rounds in ((64, 8, 3), (16, 16, 2), (1, 4, 1))
    ]
    for setting in [*settings, {}]:  # the last: one slice, and room for all tokens
        workspace = sampling.SamplingWorkspace(n, vocab_size, CPU, **setting)
        found = Sampler(table, tokens, counts, rules, workspace).sample(logits, inputs)
        assert found.tolist() == expected.tolist()
        assert int(workspace.counters.abs().sum()) == 0


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_sampling_marks_unsound_rows(poison: float):
    names = ["greedy", "temperature", "top-k and top-p", "top-p", "min-p", "repetition"]
    case = SamplingCase(300, CPU, 2, names)
    logits = logits_of("normal", len(names), 300, 2)
    logits[::2, 70] = poison
    workspace = sampling.SamplingWorkspace(len(names), 300, CPU, slice=128, candidates=128)
    found = case.sampler(workspace).sample(logits, case.inputs)
    assert found[1].tolist() == [0, 1] * 3
    assert ((found[0] >= 0) & (found[0] < 300)).all()


@pytest.mark.parametrize("kind", ["normal", "equal"])
@pytest.mark.parametrize("top", [0, 5])
def test_log_probabilities(kind: str, top: int):
    vocab_size = 300
    case = SamplingCase(vocab_size, CPU, 1)
    workspace = sampling.SamplingWorkspace(2, vocab_size, CPU, slice=128, candidates=128)
    logits, token_ids = logits_of(kind, 4, vocab_size, 1), torch.tensor([7, 299, 12, 0], dtype=torch.int32)
    lines = torch.tensor([3, 0, 1], dtype=torch.int32)
    expected = case.sampler().logprobs(logits, lines, token_ids, top)
    found = case.sampler(workspace).logprobs(logits, lines, token_ids, top)
    ints, floats = [0, *range(2, 3 + top)], [1, *range(3 + top, 3 + 2 * top)]
    torch.testing.assert_close(found[:, floats].view(torch.float32), expected[:, floats].view(torch.float32))
    assert torch.equal(found[:, ints], expected[:, ints])


def test_row_tables():
    tokens = torch.randint(0, 99, (5, 40)).int()
    table = torch.randint(1, 30, (5, 10)).int()
    lines, positions = torch.tensor([4, 0, 2]).int(), torch.tensor([39, 0, 17]).int()
    ids, slots = rows.lookup(lines, positions, tokens, table, 4)
    assert ids.tolist() == tokens[lines, positions].tolist()
    assert slots.tolist() == (table[lines, positions // 4] * 4 + positions % 4).tolist()
    rows.scatter(tokens, lines, positions, torch.tensor([7, 8, 9]).int())
    assert tokens[lines, positions].tolist() == [7, 8, 9]


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("experts", "k"), [(128, 8), (6, 3), (1, 1)])
def test_route(experts, k, renormalize):
    torch.manual_seed(experts)
    logits = torch.randn(5, experts)
    logits[0, : experts - 1] = -200.0  # all but one share underflow: the padding must not be picked
    ids, weights = route(logits, k, renormalize)
    expected_ids, expected_weights = TorchOps().route(logits, k, renormalize)
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(ids[1:], expected_ids[1:])
    assert ids.dtype == torch.int64
    assert all(len(set(line)) == k and max(line) < experts for line in ids.tolist())


@pytest.mark.parametrize(
    ("num_tokens", "experts", "tma"),
    [(3, 8, False), (40, 2, False), (70, 6, False), (150, 3, False), (400, 2, False), (30, 3, True), (290, 3, True)],
)
@pytest.mark.parametrize("with_residual", [False, True])
def test_moe(num_tokens, experts, tma, with_residual, monkeypatch):
    """In tiles of 16, 32, 64 and 128, over one block of the sort and several, with tensor memory access and without."""
    if tma:
        monkeypatch.setattr(moe_wide, "serves", lambda *arguments: True)  # numbers of four bytes too
    torch.manual_seed(num_tokens)
    x = torch.randn(num_tokens, 64)
    ids = torch.stack([torch.randperm(experts)[:2] for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, 2)
    size = 192 if tma else 48
    gate_up, down = torch.randn(experts, 2 * size, 64) * 0.1, torch.randn(experts, 64, size) * 0.1
    residual = torch.randn(num_tokens, 64) if with_residual else None
    expected = TorchOps().moe(x, ids, weights, gate_up, down, residual)
    found = moe(x, ids, weights, gate_up, down, residual, tma=tma)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("experts", "k"), [(8, 2), (5, 3), (60, 8)])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("complete", [False, True])
def test_mixture_of_one_token(experts, k, renormalize, complete):
    """`complete`: with norm and residual."""
    torch.manual_seed(experts)
    hidden, size, reference = 96, 40, TorchOps()
    x, router = torch.randn(1, hidden), torch.randn(experts, hidden) * 0.3
    gate_up, down = torch.randn(experts, 2 * size, hidden) * 0.1, torch.randn(experts, hidden, size) * 0.1
    more = {"norm_weight": torch.rand(hidden) + 0.5, "eps": 1e-6, "residual": torch.randn(1, hidden)}
    arguments = (x, router, gate_up, down, k, renormalize)
    workspace = small_linear.LinearWorkspace(CPU, max_out=128, max_split=8)
    expected = reference.mixture(*arguments, **(more if complete else {}))
    for _ in range(2):  # the counter is back at zero after each launch
        found = moe_one.mixture(*arguments, workspace, **(more if complete else {}))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert int(workspace.counters.abs().sum()) == 0


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_mixture_of_one_token_that_is_no_number(poison):
    """It leads nowhere outside of the weights, and stays no number."""
    x = torch.full((1, 32), poison)
    router, gate_up, down = torch.randn(6, 32), torch.randn(6, 32, 32), torch.randn(6, 32, 16)
    workspace = small_linear.LinearWorkspace(CPU, max_out=128, max_split=8)
    found = moe_one.mixture(x, router, gate_up, down, 2, True, workspace, norm_weight=torch.ones(32), eps=1e-6)
    assert not torch.isfinite(found).any()


@pytest.mark.parametrize(
    ("num_tokens", "experts", "k"), [(2, 8, 2), (5, 5, 3), (8, 60, 8), (8, 3, 1), (11, 12, 4), (33, 3, 2), (64, 20, 4)]
)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("complete", [False, True])
def test_mixture_of_a_few_tokens(num_tokens, experts, k, renormalize, complete):
    """Planned by the router and behind it, with one tile an expert and several. `complete`: with norm and residual."""
    torch.manual_seed(num_tokens)
    hidden, size, reference = 96, 40, TorchOps()
    x, router = torch.randn(num_tokens, hidden), torch.randn(experts, hidden) * 0.3
    gate_up, down = torch.randn(experts, 2 * size, hidden) * 0.1, torch.randn(experts, hidden, size) * 0.1
    more = {"norm_weight": torch.rand(hidden) + 0.5, "eps": 1e-6, "residual": torch.randn(num_tokens, hidden)}
    arguments = (x, router, gate_up, down, k, renormalize)
    workspace = small_linear.LinearWorkspace(CPU, max_out=128, max_split=8)
    expected = reference.mixture(*arguments, **(more if complete else {}))
    for _ in range(2):  # the counter is back at zero after each launch
        found = moe_few.mixture(*arguments, workspace, **(more if complete else {}))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert int(workspace.counters.abs().sum()) == 0


@pytest.mark.parametrize("num_tokens", [3, 20])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_token_that_is_no_number_harms_no_other(num_tokens, poison):
    torch.manual_seed(num_tokens)
    x = torch.randn(num_tokens, 32)
    router, gate_up, down = torch.randn(6, 32), torch.randn(6, 32, 32), torch.randn(6, 32, 16)
    workspace = small_linear.LinearWorkspace(CPU, max_out=128, max_split=8)
    arguments, norm = (router, gate_up, down, 2, True), {"norm_weight": torch.ones(32), "eps": 1e-6}
    expected = TorchOps().mixture(x, *arguments, **norm)
    x[1] = poison
    found = moe_few.mixture(x, *arguments, workspace, **norm)
    assert not torch.isfinite(found[1]).any()
    others = torch.arange(num_tokens) != 1
    torch.testing.assert_close(found[others], expected[others], atol=1e-5, rtol=1e-4)


def test_an_expert_has_as_few_tiles_as_hold_its_tokens():
    """Of equal logits the lower expert comes first; tiles beyond those used belong to none."""
    workspace = small_linear.LinearWorkspace(CPU, max_out=128, max_split=8)
    x, router = torch.ones(20, 32), torch.zeros(6, 32)
    _, plan = moe_few.route(x, router, 2, True, workspace)
    assert plan.expert.tolist() == [0, 0, 1, 1, -1, -1, -1, -1]
    assert plan.count[:4].tolist() == [16, 4, 16, 4]
    held = [plan.slots[tile, :count].tolist() for tile, count in enumerate(plan.count[:4].tolist())]
    assert held[0] + held[1] == list(range(0, 40, 2))
    assert held[2] + held[3] == list(range(1, 40, 2))
    torch.testing.assert_close(plan.weights, torch.full((20, 2), 0.5))


@pytest.mark.parametrize(("pairs", "experts", "tile"), [(65, 128, 16), (700, 5, 16), (513, 1, 64)])
def test_pairs_are_sorted_by_expert_and_cut_into_tiles_of_one(pairs, experts, tile):
    torch.manual_seed(pairs)
    ids = torch.randint(experts, (pairs, 1))
    if experts > 2:
        ids[ids == 2] = 1  # one without pairs
    tiles = align(ids, experts, tile)
    assert tiles.order.tolist() == ids.flatten().argsort(stable=True).tolist()
    held = []
    for expert, first, end in zip(tiles.expert.tolist(), tiles.first.tolist(), tiles.end.tolist(), strict=True):
        if expert >= 0:
            assert 0 < end - first <= tile
            assert set(ids.flatten()[tiles.order[first:end].long()].tolist()) == {expert}
            held += range(first, end)
    assert held == list(range(pairs))
