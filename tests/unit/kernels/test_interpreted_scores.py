"""Soft caps, sinks and head sizes that are no power of two, by kernels in Triton's interpreter against torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from minisgl_backend.attention.base import DecodeInputs, PrefillInputs
from minisgl_backend.attention.reference import TorchBackend
from minisgl_backend.kernels.ops import QKNormRope, TokenPlaces
from minisgl_backend.kernels.torch_ops import TorchOps
from minisgl_backend.kv.layout import LayerKV
from tests.specs import one_group

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels compiled", allow_module_level=True)
pytest.importorskip("triton", reason="pip install triton; tests/conftest.py turns its interpreter on")

from minisgl_backend.kernels.attention.calls import PrefillBatch
from minisgl_backend.kernels.attention.choose import DecodeShape
from minisgl_backend.kernels.attention.decode import (
    DecodeBatch,
    DecodeWorkspace,
    decode_attention,
    rotating_decode_attention,
)
from minisgl_backend.kernels.attention.prefill import prefill_attention

PAGE, HEADS, KV_HEADS = 16, 4, 2
KV_LENS = [1, 63, 150]
# In parts that are merged, in one part, from registers first, and in equal shares.
SPLIT, WHOLE = DecodeShape(4, 32, 32, 4, 3), DecodeShape(1, 64, 64, 4, 3)
EARLY, SHARED = DecodeShape(8, 32, 32, 4, 3, early=True), DecodeShape(4, 64, 32, 4, 3, workers=3)


class Case:
    def __init__(self, dim: int, soft_cap: float | None, sinks: bool, window: int | None = None) -> None:
        torch.manual_seed(dim)
        most = -(-max(KV_LENS) // PAGE)
        self.spec = one_group(
            num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=dim, page_size=PAGE, max_seq_len=most * PAGE,
            max_rows=len(KV_LENS), window=window, scale=0.3, soft_cap=soft_cap, sinks=sinks,
        )  # fmt: skip
        self.kv = LayerKV(*torch.randn(2, 1 + len(KV_LENS) * most, KV_HEADS, PAGE, dim))
        self.table = (torch.randperm(len(KV_LENS) * most) + 1).int().reshape(len(KV_LENS), most)
        self.rows = torch.randperm(len(KV_LENS)).int()
        self.kv_lens = torch.tensor(KV_LENS, dtype=torch.int32)
        self.layer = self.spec.layer(0, self.kv, torch.randn(HEADS) * 4 if sinks else None)
        self.reference = TorchBackend(self.spec, self.spec.groups[0])
        self.workspace = DecodeWorkspace(len(KV_LENS), HEADS, KV_HEADS, dim, torch.device("cpu"))

    def batch(self, shape: DecodeShape) -> DecodeBatch:
        return DecodeBatch(self.rows, self.kv_lens, self.table, self.workspace, shape)

    def decoded(self, q: torch.Tensor) -> torch.Tensor:
        inputs = DecodeInputs(
            kv_lens=self.kv_lens, rows=self.rows, page_table=self.table, kv_lens_host=self.kv_lens.numpy(),
            rows_host=self.rows.numpy(),
        )  # fmt: skip
        return self.reference.decode(self.layer, q, self.reference.plan_decode(inputs))


CASES = [(64, 2.0, False, None), (80, None, True, None), (96, 30.0, True, 24), (192, None, False, None)]


@pytest.mark.parametrize(("dim", "soft_cap", "sinks", "window"), CASES)
@pytest.mark.parametrize("shape", [SPLIT, WHOLE, SHARED])
def test_decode(dim: int, soft_cap: float | None, sinks: bool, window: int | None, shape: DecodeShape) -> None:
    case = Case(dim, soft_cap, sinks, window)
    q = torch.randn(len(KV_LENS), HEADS, dim)
    out = decode_attention(q, case.layer, case.batch(shape))
    torch.testing.assert_close(out, case.decoded(q), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("dim", "soft_cap", "sinks", "window"), CASES)
@pytest.mark.parametrize("shape", [SPLIT, EARLY])
def test_decode_with_rope(
    dim: int, soft_cap: float | None, sinks: bool, window: int | None, shape: DecodeShape
) -> None:
    case = Case(dim, soft_cap, sinks, window)
    qkv = torch.randn(len(KV_LENS), (HEADS + 2 * KV_HEADS) * dim)
    cos_sin = torch.randn(max(KV_LENS), dim)
    positions = case.kv_lens - 1
    slots = case.table[case.rows.long(), (positions // PAGE).long()] * PAGE + positions % PAGE
    found = LayerKV(case.kv.k.clone(), case.kv.v.clone())
    rotation = QKNormRope(q_norm=None, k_norm=None, cos_sin=cos_sin, eps=1e-6)
    q = TorchOps().rope_store(qkv.clone(), rotation, TokenPlaces(positions, slots), case.kv, HEADS)
    out = rotating_decode_attention(qkv, rotation, replace(case.layer, kv=found), case.batch(shape))
    torch.testing.assert_close(found.k, case.kv.k, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out, case.decoded(q), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("dim", "soft_cap", "sinks", "window"), CASES)
def test_prefill(dim: int, soft_cap: float | None, sinks: bool, window: int | None) -> None:
    case = Case(dim, soft_cap, sinks, window)
    q_lens = [1, 5, 40]
    starts = torch.tensor([0, 1, 6, 46], dtype=torch.int32)
    q = torch.randn(sum(q_lens), HEADS, dim)
    inputs = PrefillInputs(
        cu_seqlens_q=starts, kv_lens=case.kv_lens, rows=case.rows, page_table=case.table,
        cu_seqlens_q_host=starts.numpy(), kv_lens_host=case.kv_lens.numpy(), rows_host=case.rows.numpy(),
    )  # fmt: skip
    expected = case.reference.prefill(case.layer, q, case.reference.plan_prefill(inputs))
    batch = PrefillBatch(starts, case.kv_lens, case.rows, case.table, max(q_lens))
    out = prefill_attention(q, case.layer, batch)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
