"""Attention over a paged pool by the kernels and by the torch backend: one body for Triton's interpreter and for GPUs,
whose tests are tables of sizes (tests/unit/kernels, tests/gpu)."""

from __future__ import annotations

import torch

from minisgl_backend.attention.base import DecodeInputs, PrefillInputs
from minisgl_backend.attention.layer import AttentionLayer
from minisgl_backend.attention.reference import TorchBackend
from minisgl_backend.kernels.attention.calls import PrefillBatch
from minisgl_backend.kernels.attention.choose import DecodeShape
from minisgl_backend.kernels.attention.decode import DecodeBatch, DecodeWorkspace, decode_attention
from minisgl_backend.kernels.attention.prefill import prefill_attention
from minisgl_backend.kv.layout import FP8, KVScales, LayerKV
from tests.specs import one_group

CPU = torch.device("cpu")
HALF_TOLERANCE = 8e-3  # of a sequence's outputs in 16 bits: |difference| / |reference|, as norms


class PagedCase:
    """A random pool, shuffled pages and rows, and the same attention by the torch backend, in float32."""

    def __init__(
        self,
        kv_lens: list[int],
        page_size: int,
        heads: tuple[int, int, int],
        *,
        window: int = 0,
        chunk: int = 0,
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """heads: their number, that of KV heads, and their size."""
        torch.manual_seed(page_size)
        most = -(-max(kv_lens) // page_size)
        count = len(kv_lens)
        self.heads, self.kv_heads, self.head_dim = heads
        self.device, self.dtype = device, dtype
        pool = (1 + count * most, self.kv_heads, page_size, self.head_dim)
        self.k, self.v = (torch.randn(pool, device=device).to(dtype) for _ in range(2))
        self.table = (torch.randperm(count * most, device=device) + 1).int().reshape(count, most)
        self.rows = torch.randperm(count, device=device).int()
        self.kv_lens = torch.tensor(kv_lens, dtype=torch.int32, device=device)
        self.spec = one_group(
            num_q_heads=self.heads, num_kv_heads=self.kv_heads, head_dim=self.head_dim, page_size=page_size,
            max_seq_len=most * page_size, max_rows=count, window=window or None, chunk=chunk or None, device=device,
        )  # fmt: skip
        self.reference = TorchBackend(self.spec, self.spec.groups[0])

    def layer(self, kv: LayerKV | None = None) -> AttentionLayer:
        """With this pool in place of the case's."""
        return self.spec.layer(0, kv or LayerKV(self.k, self.v))

    def queries(self, count: int) -> torch.Tensor:
        return torch.randn(count, self.heads, self.head_dim, device=self.device).to(self.dtype)

    def workspace(self, max_rows: int = 0) -> DecodeWorkspace:
        count = max_rows or len(self.kv_lens)
        return DecodeWorkspace(count, self.heads, self.kv_heads, self.head_dim, self.device)

    def batch(self, workspace: DecodeWorkspace, shape: DecodeShape) -> DecodeBatch:
        return DecodeBatch(self.rows, self.kv_lens, self.table, workspace, shape)

    def prefill_batch(self, starts: torch.Tensor, *, causal: bool = True) -> PrefillBatch:
        return PrefillBatch(starts, self.kv_lens, self.rows, self.table, int(starts.diff().max()), causal)

    def decoded(self, q: torch.Tensor, kv: LayerKV | None = None) -> torch.Tensor:
        """By the torch backend, from this pool in place of the case's."""
        inputs = DecodeInputs(
            kv_lens=self.kv_lens, rows=self.rows, page_table=self.table, kv_lens_host=self.kv_lens.cpu().numpy(),
            rows_host=self.rows.cpu().numpy(),
        )  # fmt: skip
        plan = self.reference.plan_decode(inputs)
        return self.reference.decode(self.layer(kv or self._in_float32()), q.float(), plan)

    def prefilled(self, q: torch.Tensor, starts: torch.Tensor, *, causal: bool = True) -> torch.Tensor:
        inputs = PrefillInputs(
            cu_seqlens_q=starts, kv_lens=self.kv_lens, rows=self.rows, page_table=self.table,
            cu_seqlens_q_host=starts.cpu().numpy(), kv_lens_host=self.kv_lens.cpu().numpy(),
            rows_host=self.rows.cpu().numpy(), causal=causal,
        )  # fmt: skip
        plan = self.reference.plan_prefill(inputs)
        return self.reference.prefill(self.layer(self._in_float32()), q.float(), plan)

    def quantize(self, scales: KVScales) -> LayerKV:
        """The pool in FP8; what it means replaces the pool itself."""
        kv = LayerKV((self.k / scales.k).to(FP8), (self.v / scales.v).to(FP8), scales)
        self.k, self.v = kv.k.float() * scales.k, kv.v.float() * scales.v
        return kv

    def _in_float32(self) -> LayerKV:
        return LayerKV(self.k.float(), self.v.float())


def assert_attended(found: torch.Tensor, expected: torch.Tensor, counts: list[int]) -> None:
    """[tokens, heads, head_dim] of sequences with `counts` tokens: the same within 1e-5; in 16 bits each sequence
    within HALF_TOLERANCE."""
    if found.dtype == torch.float32:
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        return
    for one, other in zip(found.double().split(counts), expected.double().split(counts), strict=True):
        assert (one - other).norm() < HALF_TOLERANCE * other.norm()


def check_decode(case: PagedCase, shape: DecodeShape, *, max_rows: int = 0, launches: int = 2) -> None:
    """The counters are back at zero after each launch, so that the next one finds them so."""
    q, workspace = case.queries(len(case.kv_lens)), case.workspace(max_rows)
    expected = case.decoded(q)
    for _ in range(launches):
        out = torch.full_like(q, torch.nan)
        decode_attention(q, case.layer(), case.batch(workspace, shape), out)
        assert_attended(out, expected, [1] * len(q))
        assert int(workspace.counters.abs().sum()) == 0


def check_prefill(case: PagedCase, q_lens: list[int], *, causal: bool = True) -> None:
    starts = torch.tensor([0, *q_lens], device=case.device).cumsum(0).int()
    q = case.queries(sum(q_lens))
    found = prefill_attention(q, case.layer(), case.prefill_batch(starts, causal=causal))
    assert_attended(found, case.prefilled(q, starts, causal=causal), q_lens)
