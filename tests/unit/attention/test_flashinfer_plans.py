"""The `fi` backend with several cache groups: what is planned, and that no plan is overwritten before its step.

FlashInfer is a stand-in that keeps its plans where FlashInfer does, and attends by what it finds there.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from minisgl_backend.attention.base import AttentionSpec, DecodeInputs, PrefillInputs
from minisgl_backend.attention.pair import AttentionPair
from minisgl_backend.attention.registry import create_attention
from minisgl_backend.kv.groups import CacheGroup
from minisgl_backend.kv.kinds import kind_of
from minisgl_backend.kv.layout import LayerKV
from tests.specs import one_group

PAGE, HEADS, KV_HEADS, SIZE, ROWS, WINDOW = 16, 4, 2, 64, 9, 24


class Wrapper:
    """Of prefill and of decode: a plan is numbers of the two workspaces, page ids are an attribute."""

    made: list[Wrapper]

    def __init__(self, workspace: torch.Tensor, layout: str, use_cuda_graph: bool = False, **options: Any) -> None:
        self._int_workspace_buffer = torch.zeros(256, dtype=torch.int64)
        self._pin_memory_int_workspace_buffer = torch.zeros(256, dtype=torch.int64)
        self._paged_kv_indices_buf: Any = options.get("paged_kv_indices_buffer")
        self._captured = use_cuda_graph
        self.plans = 0
        Wrapper.made.append(self)

    def _plan(self, starts: Any, indptr: Any, indices: Any, last: Any, window_left: int) -> None:
        self.plans += 1
        ends = indptr[1:] * PAGE - PAGE + last
        numbers = torch.cat([torch.tensor([len(last), window_left]), starts, indptr, ends - indptr[:-1] * PAGE])
        self._pin_memory_int_workspace_buffer[: len(numbers)] = numbers
        self._int_workspace_buffer.copy_(self._pin_memory_int_workspace_buffer)
        if self._captured:
            self._paged_kv_indices_buf[: len(indices)] = indices
        else:
            self._paged_kv_indices_buf = indices

    def run(self, q: torch.Tensor, kv: Any, **scales: float) -> torch.Tensor:
        count, window_left, *rest = self._int_workspace_buffer.tolist()
        starts, indptr, lens = rest[: count + 1], rest[count + 1 : 2 * count + 2], rest[2 * count + 2 :]
        out = torch.empty_like(q)
        for i in range(count):
            pages = self._paged_kv_indices_buf[indptr[i] : indptr[i + 1]].long()
            k, v = (
                one[pages].transpose(1, 2).flatten(0, 1)[: lens[i]].repeat_interleave(HEADS // KV_HEADS, 1).float()
                for one in kv
            )
            mine = q[starts[i] : starts[i + 1]].float()
            scores = torch.einsum("qhd,khd->hqk", mine, k) * SIZE**-0.5
            at = torch.arange(lens[i])
            behind = at[-len(mine) :, None] - at[None, :]
            hidden = (behind < 0) | ((behind > window_left) if window_left >= 0 else torch.zeros_like(behind).bool())
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out[starts[i] : starts[i + 1]] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
        return out


class Prefill(Wrapper):
    def plan(
        self, starts: Any, indptr: Any, indices: Any, last: Any, *rest: Any, window_left: int, **more: Any
    ) -> None:
        self._plan(starts, indptr, indices, last, window_left)


class Decode(Wrapper):
    def plan(self, indptr: Any, indices: Any, last: Any, *rest: Any, window_left: int, **more: Any) -> None:
        self._plan(torch.arange(len(last) + 1), indptr, indices, last, window_left)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> AttentionPair:
    module: Any = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper, module.BatchDecodeWithPagedKVCacheWrapper = Prefill, Decode
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, synchronize=lambda: None))
    Wrapper.made = []
    return create_attention("fi", "fi", mixture())


def mixture() -> AttentionSpec:
    """A cache group of layers without a window, three with the same one."""
    spec = one_group(
        num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=SIZE, page_size=PAGE, max_seq_len=128, max_rows=ROWS,
        dtype=torch.bfloat16,
    )  # fmt: skip
    windows = (None, WINDOW, WINDOW, WINDOW)
    groups = tuple(replace(spec.groups[0], layers=(i,), window=w, cache_group=i) for i, w in enumerate(windows))
    return replace(spec, groups=groups, cache_groups=tuple(CacheGroup(kind_of(w, None, 128)) for w in windows))


class Pool:
    """Keys and values of each layer, and a page table for each group, all different."""

    def __init__(self, spec: AttentionSpec) -> None:
        torch.manual_seed(0)
        pages = ROWS * spec.max_pages_per_row
        shape = (pages, KV_HEADS, PAGE, SIZE)
        self.kv = [LayerKV(torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16()) for _ in spec.groups]
        self.tables = tuple(torch.randperm(pages).int().view(ROWS, -1) for _ in spec.groups)

    def decode(self, kv_lens: list[int]) -> DecodeInputs:
        lens, rows = np.array(kv_lens, dtype=np.int32), np.arange(len(kv_lens), dtype=np.int32)[::-1].copy()
        return DecodeInputs(
            kv_lens=torch.from_numpy(lens), rows=torch.from_numpy(rows), page_table=self.tables[0], kv_lens_host=lens,
            rows_host=rows, page_tables=self.tables,
        )  # fmt: skip

    def prefill(self, q_lens: list[int], kv_lens: list[int]) -> PrefillInputs:
        ends = np.cumsum([0, *q_lens]).astype(np.int32)
        lens, rows = np.array(kv_lens, dtype=np.int32), np.arange(3, 3 + len(kv_lens), dtype=np.int32)
        return PrefillInputs(
            cu_seqlens_q=torch.from_numpy(ends), kv_lens=torch.from_numpy(lens), rows=torch.from_numpy(rows),
            page_table=self.tables[0], cu_seqlens_q_host=ends, kv_lens_host=lens, rows_host=rows,
            page_tables=self.tables,
        )  # fmt: skip


def check(pair: AttentionPair, pool: Pool, plan: Any, prefill: PrefillInputs | None, decode: DecodeInputs) -> None:
    """Every layer against the `torch` backend."""
    reference = create_attention("torch", "torch", pair.spec)
    expected = reference.plan(prefill, decode)
    q = torch.randn(expected.num_prefill_tokens + decode.batch_size, HEADS, SIZE).bfloat16()
    for layer, kv in enumerate(pool.kv):
        found, right = (one.attend(one.spec.layer(layer, kv), q, p) for one, p in ((pair, plan), (reference, expected)))
        assert ((found - right).float().norm() / right.float().norm()) < 1e-2


def test_groups_with_the_same_window_have_one_plan(pair: AttentionPair) -> None:
    pool = Pool(pair.spec)
    prefill, decode = pool.prefill([5, 40], [70, 40]), pool.decode([1, 33, 100])
    check(pair, pool, pair.plan(prefill, decode), prefill, decode)
    assert sum(one.plans for one in Wrapper.made) == 4, "of prefill and decode, with the window and without"
    check(pair, pool, pair.plan(None, decode), None, decode)


def test_captured_sizes_share_their_memory_and_keep_their_plans(pair: AttentionPair) -> None:
    pool = Pool(pair.spec)
    pair.allocate_graph(4)
    plans = {size: pair.plan_capture(pool.decode([1] * size)) for size in (4, 2)}
    pair.allocate_graph(3)  # of another set of graphs, as where there are adapters
    others = {size: pair.plan_capture(pool.decode([1] * size)) for size in (2, 1)}
    for kv_lens in ([90, 3], [17, 100, 64, 65], [91, 4], [5]):
        decode = pool.decode(kv_lens)
        pair.plan_replay(decode)
        for plan in (one[len(kv_lens)] for one in (plans, others) if len(kv_lens) in one):
            check(pair, pool, plan, None, decode)
        check(pair, pool, pair.plan(None, decode), None, decode)  # a step of another kind between them
    decoding = [one for one in Wrapper.made if isinstance(one, Decode)]
    assert len({one._int_workspace_buffer.data_ptr() for one in decoding}) == 2, "one of each window"
