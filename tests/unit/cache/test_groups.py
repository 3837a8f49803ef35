"""Which layers share pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minisgl_backend.kv.grouping import MOST_GROUPS, GroupedLayers, group_layers
from minisgl_backend.kv.groups import CacheGroup, CacheGroups, ColumnLayout, room_in
from minisgl_backend.kv.kinds import FULL, CacheKind, Chunked, Sliding
from minisgl_backend.kv.layout import LayerCache, MHALayout

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
