"""The torch backend against attention written out position by position."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_backend.attention.base import AttentionSpec, DecodeInputs, PrefillInputs
from minisgl_backend.attention.hybrid import HybridAttention
from minisgl_backend.attention.kv_pool import KVPool
from minisgl_backend.attention.reference import TorchBackend
from minisgl_backend.errors import ConfigError

MAX_ROWS, MAX_SEQ_LEN, HEAD_DIM = 6, 1024, 8


def make_spec(page_size: int, num_q_heads: int = 4, num_kv_heads: int = 2, **changes: object) -> AttentionSpec:
    values = {
        "num_layers": 2,
        "num_q_heads": num_q_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": HEAD_DIM,
        "page_size": page_size,
        "max_seq_len": MAX_SEQ_LEN,
        "max_rows": MAX_ROWS,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        **changes,
    }
    return AttentionSpec(**values)  # type: ignore[arg-type]


class World:
    """A pool with random keys and values for every row, and the same as plain tensors."""

    def __init__(self, spec: AttentionSpec, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.spec = spec
        pages = MAX_ROWS * spec.max_pages_per_row
        self.pool = KVPool(spec, pages)
        order = torch.randperm(pages, generator=generator) + 1
        self.page_table = order.view(MAX_ROWS, -1).int()
        shape = (MAX_ROWS, MAX_SEQ_LEN, spec.num_kv_heads, spec.head_dim)
        self.k, self.v = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
        positions = torch.arange(MAX_SEQ_LEN)
        for row in range(MAX_ROWS):
            slots = self.page_table[row, positions // spec.page_size] * spec.page_size + positions % spec.page_size
            self.pool.store(1, self.k[row], self.v[row], slots)

    def expected(self, q: torch.Tensor, row: int, kv_len: int) -> torch.Tensor:
        """q [num_heads, head_dim], the token at kv_len - 1."""
        group = self.spec.num_q_heads // self.spec.num_kv_heads
        k = self.k[row, :kv_len].repeat_interleave(group, dim=1)
        v = self.v[row, :kv_len].repeat_interleave(group, dim=1)
        weights = torch.softmax(torch.einsum("hd,thd->ht", q, k) * self.spec.softmax_scale, dim=-1)
        return torch.einsum("ht,thd->hd", weights, v)

    def prefill_inputs(self, parts: list[tuple[int, int, int]]) -> PrefillInputs:
        """parts: (row, number of queries, kv_len)."""
        cu = np.cumsum([0] + [part[1] for part in parts]).astype(np.int32)
        rows = np.array([part[0] for part in parts], dtype=np.int32)
        kv_lens = np.array([part[2] for part in parts], dtype=np.int32)
        return PrefillInputs(
            cu_seqlens_q=torch.from_numpy(cu),
            kv_lens=torch.from_numpy(kv_lens),
            rows=torch.from_numpy(rows),
            page_table=self.page_table,
            cu_seqlens_q_host=cu,
            kv_lens_host=kv_lens,
            rows_host=rows,
        )

    def decode_inputs(self, parts: list[tuple[int, int]]) -> DecodeInputs:
        """parts: (row, kv_len)."""
        rows = np.array([part[0] for part in parts], dtype=np.int32)
        kv_lens = np.array([part[1] for part in parts], dtype=np.int32)
        return DecodeInputs(
            kv_lens=torch.from_numpy(kv_lens),
            rows=torch.from_numpy(rows),
            page_table=self.page_table,
            kv_lens_host=kv_lens,
            rows_host=rows,
        )

    def check(self, prefill: list[tuple[int, int, int]], decode: list[tuple[int, int]]) -> None:
        backend = TorchBackend(self.spec)
        attention = HybridAttention(backend, backend)
        num_tokens = sum(part[1] for part in prefill) + len(decode)
        q = torch.randn(num_tokens, self.spec.num_q_heads, self.spec.head_dim)
        plan = attention.plan(
            self.prefill_inputs(prefill) if prefill else None, self.decode_inputs(decode) if decode else None
        )
        out = attention.attend(q, self.pool.k(1), self.pool.v(1), plan)
        places = [(row, kv_len - count + i + 1) for row, count, kv_len in prefill for i in range(count)] + decode
        expected = torch.stack([self.expected(q[i], row, kv_len) for i, (row, kv_len) in enumerate(places)])
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("heads", [(4, 2), (4, 4), (8, 1)])
def test_mixed_steps(page_size: int, heads: tuple[int, int]) -> None:
    world = World(make_spec(page_size, *heads))
    world.check([(0, 5, 5), (3, 7, 40), (2, 1, 65)], [(1, 1), (4, 64), (5, 129)])


def test_long_chunk_after_a_cached_prefix_is_tiled() -> None:
    World(make_spec(16)).check([(0, 700, 1000)], [])


@pytest.mark.parametrize("kv_lens", [[1, 1000, 3, 900, 260, 2], [700, 700, 700, 700, 700, 700]])
def test_decode_of_very_different_lengths(kv_lens: list[int]) -> None:
    World(make_spec(16)).check([], list(enumerate(kv_lens)))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_step(data: st.DataObject) -> None:
    world = World(make_spec(data.draw(st.sampled_from([1, 2, 16]))))
    rows = data.draw(st.permutations(range(MAX_ROWS)))
    num_prefill = data.draw(st.integers(0, 3))
    lengths = st.integers(1, 300)
    prefill = []
    for row in rows[:num_prefill]:
        kv_len = data.draw(lengths)
        prefill.append((row, data.draw(st.integers(1, min(kv_len, 40))), kv_len))
    num_decode = data.draw(st.integers(0 if prefill else 1, MAX_ROWS - num_prefill))
    decode = [(row, data.draw(lengths)) for row in rows[num_prefill : num_prefill + num_decode]]
    world.check(prefill, decode)


def test_garbage_beyond_the_end_of_a_sequence_does_not_matter() -> None:
    world = World(make_spec(16))
    world.page_table[0, 3:] = -1
    last_page = int(world.page_table[0, 2])
    world.pool.k(1)[last_page, :, -1] = 1e6  # position 47, which does not exist yet
    world.check([(0, 3, 47)], [])
    world.check([], [(0, 47), (1, 100)])


def test_scale() -> None:
    assert make_spec(1).softmax_scale == 1 / math.sqrt(HEAD_DIM)
    World(make_spec(16, scale=0.7)).check([(0, 5, 9)], [(1, 33)])


@pytest.mark.parametrize("changes", [{"sliding_window": 128}, {"num_q_heads": 3}])
def test_what_it_cannot_serve_is_refused_at_start(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        TorchBackend(make_spec(16, **changes))  # type: ignore[arg-type]


def test_pool_sizes() -> None:
    spec = make_spec(16)
    pool = KVPool(spec, 10)
    assert pool.k(0).shape == (11, 2, 16, HEAD_DIM)
    used = sum(pool.k(layer).nbytes + pool.v(layer).nbytes for layer in range(2))
    assert KVPool.bytes_per_page(spec) * 11 == used


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_beyond_the_end_of_a_sequence_does_not_matter(page_size: int, poison: float) -> None:
    """In pages that another sequence has left, or that are its own now, and in what the table names beyond the end."""
    world = World(make_spec(page_size))
    bad, short = 0, 1
    held = -(-47 // page_size)
    world.page_table[short, held:] = world.page_table[bad, held:]  # entries of an earlier sequence of the row
    for cache in (world.pool.k(1), world.pool.v(1)):
        cache[world.page_table[bad].long()] = poison
        if page_size > 1:
            cache[int(world.page_table[short, held - 1]), :, 47 % page_size :] = poison
    world.check([(short, 3, 47)], [])
    world.check([], [(short, 47), (2, 100)])
    q = torch.randn(3, 4, HEAD_DIM)
    backend = TorchBackend(world.spec)
    out = backend.decode(
        q, world.pool.k(1), world.pool.v(1), backend.plan_decode(world.decode_inputs([(bad, 100), (short, 47), (2, 9)]))
    )
    assert not torch.isfinite(out[0]).any(), "the test poisons nothing"
    expected = torch.stack([world.expected(q[1], short, 47), world.expected(q[2], 2, 9)])
    torch.testing.assert_close(out[1:], expected, rtol=1e-4, atol=1e-5)
