"""Which layers share pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minisgl_backend.attention.base import AttentionSpec, LayerGroup
from minisgl_backend.kv.grouping import GroupedLayers, group_layers
from minisgl_backend.kv.groups import MOST_GROUPS, CacheGroup, CacheGroups, ColumnLayout, room_in
from minisgl_backend.kv.kinds import FULL, CacheKind, Chunked, Sliding
from minisgl_backend.kv.layout import LayerCache, MHALayout
from minisgl_backend.kv.pool import bytes_per_page

LAYOUT = MHALayout(num_kv_heads=1, head_dim=8, dtype=torch.float32)


def every(period: int, kind: CacheKind, num_layers: int) -> list[CacheKind]:
    """Every layer is of this kind, but each `period`th sees everything."""
    return [FULL if (layer + 1) % period == 0 else kind for layer in range(num_layers)]


def grouped_alike(kinds: list[CacheKind], page_size: int, max_seq_len: int, **options: int) -> GroupedLayers:
    return group_layers([LayerCache(kind, LAYOUT) for kind in kinds], page_size, max_seq_len, **options)


@pytest.mark.parametrize(
    ("kinds", "max_seq_len", "expected"),
    [
        ([FULL] * 4, 8192, (FULL,)),
        ([Sliding(24)] * 4, 8192, (Sliding(24),)),
        (every(6, Sliding(512), 26), 32768, (FULL, *[Sliding(512)] * 6)),  # Gemma 3 1B: 4 and 22 layers, 4 a group
        (every(6, Sliding(1024), 62), 131072, (FULL, *[Sliding(1024)] * 6)),  # 27B: 10 and 52, 10 a group
        (every(2, Sliding(128), 24), 131072, (FULL, Sliding(128))),  # gpt-oss-20b
        (every(2, Sliding(4096), 26), 8192, (FULL, Sliding(4096))),  # Gemma 2
        (every(2, Sliding(4096), 26), 4160, (FULL,)),  # pages of which few would come back
        ([Sliding(8), Sliding(16), FULL], 8192, (FULL, Sliding(8), Sliding(16))),
        (
            [Chunked(16), Sliding(8), FULL, Sliding(16), Chunked(8)],
            8192,
            (FULL, Sliding(8), Sliding(16), Chunked(8), Chunked(16)),
        ),
        (every(4, Chunked(8192), 48), 131072, (FULL, *[Chunked(8192)] * 3)),  # Llama 4
    ],
)
def test_groups(kinds: list[CacheKind], max_seq_len: int, expected: tuple[CacheKind, ...]) -> None:
    grouped = grouped_alike(kinds, 64, max_seq_len)
    assert grouped.groups == tuple(map(CacheGroup, expected))
    sizes = [grouped.group_of_layer.count(group) for group in range(len(expected))]
    if len(expected) == 1:
        return
    assert max(sizes) * len(sizes) - sum(sizes) < len(sizes) * 2, "few places are empty"
    for layer, group in enumerate(grouped.group_of_layer):
        assert grouped.groups[group].kind == kinds[layer]


def test_one_group_keeps_what_all_layers_see() -> None:
    window = Sliding(24)
    assert grouped_alike([window, FULL], 16, 8192, most_groups=1).groups == (CacheGroup(FULL),)
    assert grouped_alike([window, window], 16, 8192, most_groups=1).groups == (CacheGroup(window),)


def test_what_fits_is_told_by_group() -> None:
    columns = ColumnLayout([CacheGroup(kind) for kind in (FULL, Sliding(24), Sliding(24))])
    # Of 320 tokens: 20 pages, and 3 of each window.
    expected = "room for 2 sequences of 320 tokens, in 3 cache groups, of which 2 keep a window"
    assert room_in(columns, 16, 53, 320) == expected


def test_there_are_few_groups() -> None:
    for num_layers in range(2, 100, 7):
        for period in (2, 3, 6):
            grouped = grouped_alike(every(period, Sliding(64), num_layers), 16, 8192)
            assert len(grouped.groups) <= MOST_GROUPS
            assert sorted(set(grouped.group_of_layer)) == list(range(len(grouped.groups)))


@pytest.mark.parametrize(("page_size", "chunk"), [(1, 5), (2, 4), (2, 5), (4, 3), (16, 24)])
def test_a_chunk_is_kept_until_nothing_in_flight_sees_it(page_size: int, chunk: int) -> None:
    groups = CacheGroups((Chunked(chunk),), page_size)
    borders = np.arange(1, 40, dtype=np.int32)
    behind, before = borders * page_size, borders * page_size - 1  # the tokens around each border
    assert groups.first_needed(borders)[0].tolist() == [t // chunk * chunk // page_size for t in behind]
    kept = groups.first_kept(borders)[0]
    assert kept.tolist() == [t // chunk * chunk // page_size for t in before]
    assert (borders - kept).max() <= groups.most_kept[0, 0]


@pytest.mark.parametrize(
    ("window", "windows", "full", "expected"),  # (layers, KV heads, head size) with a window and without
    [
        (1024, (50, 16, 256), (10, 4, 512), 2),  # Gemma 4 31B: pages of a column with a window
        (1024, (25, 8, 256), (5, 2, 512), 2),  # 26B
        (512, (35, 2, 256), (7, 2, 512), 1),  # E4B
        (512, (28, 1, 256), (7, 1, 512), 1),  # E2B
        (1024, (25, 4, 256), (5, 1, 512), 2),  # 26B on two GPUs
        (1024, (50, 4, 256), (10, 1, 512), 2),  # 31B on four
        (1024, (25, 2, 256), (5, 1, 512), 1),  # 26B on four: equal pages of other shapes
        (128, (39, 8, 192), (9, 4, 192), 2),  # MiMo-V2-Flash
        (4096, (24, 2, 128), (8, 2, 192), 2),  # two pages beside three
    ],
)
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("max_seq_len", [8192, 32768, 262144])
def test_rows_hold_what_layers_of_any_sizes_need(
    window: int,
    windows: tuple[int, int, int],
    full: tuple[int, int, int],
    expected: int,
    page_size: int,
    max_seq_len: int,
) -> None:
    def layers(kind: CacheKind, sizes: tuple[int, int, int]) -> list[LayerCache]:
        count, heads, size = sizes
        return [LayerCache(kind, MHALayout(num_kv_heads=heads, head_dim=size, dtype=torch.bfloat16))] * count

    length = 8192
    caches = layers(FULL, full) + layers(Sliding(window), windows)
    grouped = group_layers(caches, page_size, max_seq_len)
    columns = ColumnLayout(grouped.groups)
    assert (columns.groups[0].kind, columns.groups[-1].num_pages) == (FULL, expected)
    spec = AttentionSpec(
        groups=tuple(
            LayerGroup(layers=(layer,), num_q_heads=cache.layout.num_kv_heads, kv=cache.layout, cache_group=group)
            for layer, (cache, group) in enumerate(zip(caches, grouped.group_of_layer, strict=True))
        ),
        cache_groups=grouped.groups,
        page_size=page_size,
        max_seq_len=max_seq_len,
        max_rows=2,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    held = columns.of_rows(page_size).pages_of_row(length) * bytes_per_page(spec.places, page_size)
    tokens = [length if cache.kind == FULL else min(window, length) for cache in caches]
    needed = sum(count * cache.layout.bytes_per_page(1) for count, cache in zip(tokens, caches, strict=True))
    assert held <= (1.1 if window >= 8 * page_size else 1.25) * needed  # a row holds one column more
