"""Where the rotation has tokens of prompts with images: as transformers' get_rope_index, of any part of a prompt."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from minisgl_backend.layers.mixer_config import RopeConfig
from minisgl_backend.layers.rotary import RopeTables
from minisgl_backend.models.rope import axes_of
from minisgl_backend.request import Content
from minisgl_backend.runner.image_positions import positions_of, shift_of
from tests.parity.vision_checkpoints import save

MERGE = 2


def layout(rng: random.Random) -> tuple[list[int], list[Content]]:
    """Kinds of tokens, 1 of images, and the images: between texts, at both ends, next to each other."""
    kinds: list[int] = []
    contents = []
    for _ in range(rng.randrange(1, 6)):
        kinds += [0] * rng.choice([0, 1, 2, 5, 40])
        rows, columns = rng.randrange(1, 9), rng.randrange(1, 9)
        if rng.random() < 0.8 and not (kinds and kinds[-1]):  # transformers tells neighbours by a text token between
            grid = (1, MERGE * rows, MERGE * columns)
            contents.append(Content(start=len(kinds), length=rows * columns, digest=b"", grid=grid))
            kinds += [1] * (rows * columns)
    return kinds or [0], contents


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, rng = save(name, tmp_path).model, random.Random(5)
    for _ in range(200):
        kinds, contents = layout(rng)
        grids = torch.tensor([one.grid for one in contents]) if contents else None
        ids, types = torch.zeros(1, len(kinds), dtype=torch.int64), torch.tensor([kinds])
        expected, deltas = model.get_rope_index(ids, types, image_grid_thw=grids)
        found = positions_of(contents, 0, len(kinds), MERGE)
        assert np.array_equal(found, expected[:, 0].numpy())
        assert shift_of(contents, MERGE) == int(deltas) if contents else True
        start = rng.randrange(len(kinds))
        end = rng.randrange(start, len(kinds) + 3)  # the answer's first tokens, too
        behind = np.arange(len(kinds), end, dtype=np.int32) + shift_of(contents, MERGE)
        whole = np.concatenate([found, np.tile(behind, (3, 1))], axis=1)
        assert np.array_equal(positions_of(contents, start, end, MERGE), whole[:, start:end])


@pytest.mark.parametrize(
    ("mrope", "sections"), [("in sections", [2, 3, 3]), ("interleaved", [4, 2, 2]), ("interleaved", [2, 3, 3])]
)
def test_a_table_of_a_step_has_each_pair_at_its_axis(mrope: str, sections: list[int]) -> None:
    axes = axes_of(sections, mrope, 8)  # type: ignore[arg-type]
    assert sorted(set(axes)) == [0, 1, 2]
    table = RopeTables(64, torch.device("cpu")).of(RopeConfig(axes=axes), 16)
    positions = torch.randint(0, 64, (3, 11))
    found = table.of_step(positions)
    for pair, axis in enumerate(axes):
        for column in (pair, pair + 8):
            assert torch.equal(found[:, column], table.cos_sin[positions[axis], column])
    alike = positions[:1].expand(3, -1)
    assert torch.equal(table.of_step(alike), table.cos_sin[positions[0]])
