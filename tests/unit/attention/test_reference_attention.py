"""The torch backend against attention written out position by position."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_backend.attention.base import AttentionSpec, DecodeInputs, PrefillInputs
from minisgl_backend.attention.reference import TorchBackend
from minisgl_backend.attention.registry import create_attention
from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.torch_ops import store_tokens
from minisgl_backend.kv.groups import CacheGroup
from minisgl_backend.kv.kinds import Sliding
from minisgl_backend.kv.layout import FP8, KVScales, LayerKV
from minisgl_backend.kv.pool import bytes_per_page
from tests.specs import make_pool, one_group

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
        **changes,
    }
    return one_group(**values)  # type: ignore[arg-type]


class World:
    """A pool with random keys and values for every row, and the same as plain tensors."""

    def __init__(self, spec: AttentionSpec, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.spec = spec
        pages = MAX_ROWS * spec.max_pages_per_row
        self.pool: Any = make_pool(spec, pages)
        (self.group,) = spec.groups
        self.sinks: torch.Tensor | None = None
        order = torch.randperm(pages, generator=generator) + 1
        self.page_table = order.view(MAX_ROWS, -1).int()
        shape = (MAX_ROWS, MAX_SEQ_LEN, self.group.num_kv_heads, self.group.head_dim)
        self.k, self.v = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
        positions = torch.arange(MAX_SEQ_LEN)
        for row in range(MAX_ROWS):
            slots = self.page_table[row, positions // spec.page_size] * spec.page_size + positions % spec.page_size
            store_tokens(self.pool.layer(1).k, self.k[row], slots)
            store_tokens(self.pool.layer(1).v, self.v[row], slots)

    def expected(self, q: torch.Tensor, row: int, kv_len: int) -> torch.Tensor:
        """q [num_heads, head_dim], the token at kv_len - 1."""
        group = self.group.num_q_heads // self.group.num_kv_heads
        first = max(0, kv_len - (self.group.window or kv_len))
        if self.group.chunk is not None:
            first = (kv_len - 1) // self.group.chunk * self.group.chunk
        k = self.k[row, first:kv_len].repeat_interleave(group, dim=1)
        v = self.v[row, first:kv_len].repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,thd->ht", q, k) * self.group.softmax_scale
        if self.group.soft_cap is not None:
            scores = self.group.soft_cap * torch.tanh(scores / self.group.soft_cap)
        total = torch.logsumexp(scores, dim=-1)
        if self.sinks is not None:
            total = torch.logaddexp(total, self.sinks)
        return torch.einsum("ht,thd->hd", torch.exp(scores - total[:, None]), v)

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

    def check(
        self, prefill: list[tuple[int, int, int]], decode: list[tuple[int, int]], *, tolerance: float = 1e-5
    ) -> None:
        attention = create_attention("torch", "torch", self.spec)
        num_tokens = sum(part[1] for part in prefill) + len(decode)
        q = torch.randn(num_tokens, self.group.num_q_heads, self.group.head_dim)
        plan = attention.plan(
            self.prefill_inputs(prefill) if prefill else None, self.decode_inputs(decode) if decode else None
        )
        out = attention.attend(self.spec.layer(1, self.pool.layer(1), self.sinks), q.to(self.spec.dtype), plan).float()
        places = [(row, kv_len - count + i + 1) for row, count, kv_len in prefill for i in range(count)] + decode
        expected = torch.stack([self.expected(q[i], row, kv_len) for i, (row, kv_len) in enumerate(places)])
        torch.testing.assert_close(out, expected, rtol=max(1e-4, tolerance), atol=tolerance)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("heads", [(4, 2), (4, 4), (8, 1)])
def test_mixed_steps(page_size: int, heads: tuple[int, int]) -> None:
    world = World(make_spec(page_size, *heads))
    world.check([(0, 5, 5), (3, 7, 40), (2, 1, 65)], [(1, 1), (4, 64), (5, 129)])


@pytest.mark.parametrize("window", [None, 24, 100])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("page_size", "heads"), [(1, (4, 2)), (16, (6, 2)), (64, (8, 1)), (16, (2, 2))])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(page_size: int, heads: tuple[int, int], head_dim: int, window: int | None, dtype: torch.dtype) -> None:
    """Decode steps and short chunks read the pages in place where there are compiled kernels."""
    world = World(make_spec(page_size, *heads, head_dim=head_dim, dtype=dtype, window=window))
    places = [(1, 1), (4, 64), (5, 129), (0, MAX_SEQ_LEN), (2, 17)]
    world.check([], places, tolerance=0.02)
    world.check([(3, 7, 40), (0, 300, 700), (5, 1, 1)], places, tolerance=0.02)


def test_long_chunk_after_a_cached_prefix_is_tiled() -> None:
    World(make_spec(16)).check([(0, 700, 1000)], [])


@pytest.mark.parametrize("window", [1, 24, 600, 1000])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_windows(page_size: int, window: int) -> None:
    """Prompts whole, behind a cached prefix, and longer than the queries that share a mask; decode at every length."""
    world = World(make_spec(page_size, window=window))
    world.check([(0, 700, 1000), (1, 40, 40), (2, 1, 90)], [(3, 1), (4, window), (5, min(window + 1, MAX_SEQ_LEN))])
    world.check([(0, MAX_SEQ_LEN, MAX_SEQ_LEN)], [(1, 1000), (2, MAX_SEQ_LEN), (3, 30), (4, 700), (5, 25)])


@pytest.mark.parametrize("chunk", [1, 24, 64, 600])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_chunks(page_size: int, chunk: int) -> None:
    """As windows."""
    world = World(make_spec(page_size, chunk=chunk))
    world.check([(0, 700, 1000), (1, 40, 40), (2, 1, 90)], [(3, 1), (4, chunk), (5, min(chunk + 1, MAX_SEQ_LEN))])
    world.check([(0, MAX_SEQ_LEN, MAX_SEQ_LEN)], [(1, 1000), (2, MAX_SEQ_LEN), (3, 30), (4, 700), (5, 25)])


def test_pages_of_earlier_chunks_are_not_read() -> None:
    world = World(make_spec(16, chunk=24))
    world.page_table[0, :3] = -1  # tokens 0 to 47
    world.check([(0, 10, 58)], [])
    world.check([], [(0, 49), (0, 72), (1, 100), (2, 3)])


def test_pages_behind_the_window_are_not_read() -> None:
    world = World(make_spec(16, window=24))
    world.page_table[0, :3] = -1  # tokens 0 to 47
    world.check([(0, 10, 90)], [])
    world.check([], [(0, 72), (1, 100), (2, 3)])


@pytest.mark.parametrize("kv_lens", [[1, 1000, 3, 900, 260, 2], [700, 700, 700, 700, 700, 700]])
def test_decode_of_very_different_lengths(kv_lens: list[int]) -> None:
    World(make_spec(16)).check([], list(enumerate(kv_lens)))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_step(data: st.DataObject) -> None:
    window = data.draw(st.sampled_from([None, None, 1, 7, 16, 24, 100]))
    chunk = None if window is not None else data.draw(st.sampled_from([None, 1, 7, 16, 24, 100]))
    world = World(make_spec(data.draw(st.sampled_from([1, 2, 16])), window=window, chunk=chunk))
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
    world.pool.layer(1).k[last_page, :, -1] = 1e6  # position 47, which does not exist yet
    world.check([(0, 3, 47)], [])
    world.check([], [(0, 47), (1, 100)])


def test_scale() -> None:
    assert make_spec(1).groups[0].softmax_scale == 1 / math.sqrt(HEAD_DIM)
    World(make_spec(16, scale=0.7)).check([(0, 5, 9)], [(1, 33)])


def test_what_it_cannot_serve_is_refused_at_start() -> None:
    spec = make_spec(16, num_q_heads=3)
    with pytest.raises(ConfigError):
        TorchBackend(spec, spec.groups[0])


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("page_size", [1, 16])
def test_an_fp8_cache(page_size: int, window: int | None) -> None:
    """Keys and values that FP8 holds exactly, with scales: what is attended is what was stored."""
    world = World(make_spec(page_size, window=window, kv_dtype=FP8))
    kv = LayerKV(world.pool.layer(1).k, world.pool.layer(1).v, KVScales(0.25, 2.0))
    positions = torch.arange(MAX_SEQ_LEN)
    for row in range(MAX_ROWS):
        slots = world.page_table[row, positions // page_size] * page_size + positions % page_size
        for cache, tokens, scale in ((kv.k, world.k[row], 0.25), (kv.v, world.v[row], 2.0)):
            tokens.copy_((tokens / scale).to(FP8).float() * scale)
            store_tokens(cache, tokens, slots, scale)
    world.pool = SimpleNamespace(layer=lambda index: kv)
    world.check([(0, 5, 5), (3, 7, 40), (2, 1, 65)], [(1, 1), (4, 64), (5, 129)])
    assert kv.k.element_size() == 1


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (24, None), (None, 24)])
@pytest.mark.parametrize(("soft_cap", "sinks"), [(2.0, False), (None, True), (50.0, True)])
def test_soft_caps_and_sinks(soft_cap: float | None, sinks: bool, window: int | None, chunk: int | None) -> None:
    world = World(make_spec(16, window=window, chunk=chunk, soft_cap=soft_cap, sinks=sinks, scale=0.7))
    world.sinks = torch.randn(4) * 3 if sinks else None
    world.check([(0, 5, 5), (3, 7, 40), (2, 1, 65)], [(1, 1), (4, 64), (5, 129)])
    world.check([], [(1, 17), (4, 64)])


def test_pool_sizes() -> None:
    spec = make_spec(16)
    pool = make_pool(spec, 10)
    assert pool.layer(0).k.shape == (11, 2, 16, HEAD_DIM)
    used = sum(pool.layer(layer).k.nbytes + pool.layer(layer).v.nbytes for layer in range(2))
    assert bytes_per_page(spec.places, 16) * 11 == used


def test_layers_of_several_cache_groups_share_memory() -> None:
    groups = [replace(make_spec(16).groups[0], layers=(layer,), cache_group=layer // 2) for layer in range(3)]
    spec = replace(make_spec(16), groups=tuple(groups), cache_groups=(CacheGroup(), CacheGroup(Sliding(24))))
    pool = make_pool(spec, 10)
    addresses = [pool.layer(layer).k.data_ptr() for layer in range(3)]
    assert addresses[0] == addresses[2] != addresses[1]
    assert [place.part for place in spec.places] == [0, 1, 0]
    pool.layer(2).k[[3, 4]] = 1.0
    pool.clear(torch.tensor([3]))
    assert (pool.layer(0).k[3] == 0).all()
    assert (pool.layer(0).k[4] == 1).all()


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_beyond_the_end_of_a_sequence_does_not_matter(
    page_size: int, poison: float, window: int | None
) -> None:
    """In pages that another sequence has left, or that are its own now, and in what the table names beyond the end."""
    world = World(make_spec(page_size, window=window))
    bad, short = 0, 1
    held = -(-47 // page_size)
    world.page_table[short, held:] = world.page_table[bad, held:]  # entries of an earlier sequence of the row
    kv = world.pool.layer(1)
    for cache in (kv.k, kv.v):
        cache[world.page_table[bad].long()] = poison
        if page_size > 1:
            cache[int(world.page_table[short, held - 1]), :, 47 % page_size :] = poison
    world.check([(short, 3, 47)], [])
    world.check([], [(short, 47), (2, 100)])
    q = torch.randn(3, 4, HEAD_DIM)
    backend = TorchBackend(world.spec, world.group)
    out = backend.decode(
        world.spec.layer(1, kv), q, backend.plan_decode(world.decode_inputs([(bad, 100), (short, 47), (2, 9)]))
    )
    assert not torch.isfinite(out[0]).any(), "the test poisons nothing"
    expected = torch.stack([world.expected(q[1], short, 47), world.expected(q[2], 2, 9)])
    torch.testing.assert_close(out[1:], expected, rtol=1e-4, atol=1e-5)
