"""Which layers share pages."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl_backend.kv.groups import MOST_GROUPS, CacheGroups, Chunk, Window, group_layers


def every(period: int, window: int, num_layers: int) -> list[int | None]:
    """Every layer has the window, but each `period`th."""
    return [None if (layer + 1) % period == 0 else window for layer in range(num_layers)]


@pytest.mark.parametrize(
    ("windows", "max_seq_len", "expected"),
    [
        ([None] * 4, 8192, (None,)),
        ([24] * 4, 8192, (24,)),
        (every(6, 512, 26), 32768, (None, *[512] * 6)),  # Gemma 3 1B: 4 and 22 layers, 4 a group
        (every(6, 1024, 62), 131072, (None, *[1024] * 6)),  # 27B: 10 and 52, 10 a group
        (every(2, 128, 24), 131072, (None, 128)),  # gpt-oss-20b
        (every(2, 4096, 26), 8192, (None, 4096)),  # Gemma 2
        (every(2, 4096, 26), 4160, (None,)),  # pages of which few would come back
        ([8, 16, None], 8192, (None, 8, 16)),
        ([Chunk(16), 8, None, 16, Chunk(8)], 8192, (None, 8, 16, Chunk(8), Chunk(16))),
        (
            [None if layer % 4 == 3 else Chunk(8192) for layer in range(48)],
            131072,
            (None, *[Chunk(8192)] * 3),
        ),  # Llama 4
    ],
)
def test_groups(windows: list[Window], max_seq_len: int, expected: tuple[Window, ...]) -> None:
    grouped = group_layers(windows, 64, max_seq_len)
    assert grouped.windows == expected
    sizes = [grouped.group_of_layer.count(group) for group in range(len(expected))]
    if len(expected) == 1:
        return
    assert max(sizes) * len(sizes) - sum(sizes) < len(sizes) * 2, "few places are empty"
    for layer, group in enumerate(grouped.group_of_layer):
        assert grouped.windows[group] == windows[layer]


def test_one_group_keeps_what_all_layers_see() -> None:
    assert group_layers([24, None], 16, 8192, most_groups=1).windows == (None,)
    assert group_layers([24, 24], 16, 8192, most_groups=1).windows == (24,)


def test_what_fits_is_told_by_group() -> None:
    groups = CacheGroups((None, 24, 24), 16)  # of 320 tokens: 20 pages, and 3 of each window
    assert groups.room_in(53, 320) == "room for 2 sequences of 320 tokens, in 3 cache groups, of which 2 keep a window"


def test_there_are_few_groups() -> None:
    for num_layers in range(2, 100, 7):
        for period in (2, 3, 6):
            grouped = group_layers(every(period, 64, num_layers), 16, 8192)
            assert len(grouped.windows) <= MOST_GROUPS
            assert sorted(set(grouped.group_of_layer)) == list(range(len(grouped.windows)))


@pytest.mark.parametrize(("page_size", "chunk"), [(1, 5), (2, 4), (2, 5), (4, 3), (16, 24)])
def test_a_chunk_is_kept_until_nothing_in_flight_sees_it(page_size: int, chunk: int) -> None:
    groups = CacheGroups((Chunk(chunk),), page_size)
    borders = np.arange(1, 40, dtype=np.int32)
    behind, before = borders * page_size, borders * page_size - 1  # the tokens around each border
    assert groups.first_needed(borders)[0].tolist() == [t // chunk * chunk // page_size for t in behind]
    kept = groups.first_kept(borders)[0]
    assert kept.tolist() == [t // chunk * chunk // page_size for t in before]
    assert (borders - kept).max() <= groups.kept[0, 0]
