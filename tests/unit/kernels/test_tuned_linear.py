"""What the choice of cuBLASLt algorithms does without a GPU: tile numbers, their ranking, the file of choices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from minisgl_backend.kernels.cublaslt import tile_sizes
from minisgl_backend.kernels.tuned_linear import TunedLinear, _read, _write, predicted_us


@pytest.mark.parametrize(
    ("number", "size"),
    [
        (1, (8, 8)), (15, (64, 64)), (35, (256, 32)), (36, (8, 128)), (46, (8, 768)), (47, (16, 64)), (165, (112, 128)),
        (201, (176, 128)), (312, (64, 16)), (392, (64, 760)), (393, (128, 8)), (439, (128, 448)), (447, (128, 512)),
        (448, (192, 8)), (485, (192, 336)), (513, (256, 256)), (555, (384, 168)), (600, (576, 112)), (630, (768, 80)),
    ],
)  # fmt: skip
def test_tiles_are_numbered_as_in_the_header_of_cuda_13(number, size):
    assert tile_sizes()[number] == size


def test_each_tile_size_has_one_number():
    sizes = list(tile_sizes().values())
    assert len(set(sizes)) == len(sizes) == 630


@pytest.mark.parametrize(
    ("rows", "size_out", "size_in", "winner"),
    [
        (256, 34816, 5120, (176, 128)), (192, 34816, 5120, (88, 192)), (192, 5120, 17408, (128, 64)),
        (192, 7168, 5120, (176, 64)), (128, 5120, 17408, (88, 64)), (64, 5120, 17408, (48, 64)),
    ],
)  # fmt: skip
def test_tiles_that_won_on_an_h200_rank_high(rows, size_out, size_in, winner):
    sizes = sorted(tile_sizes().values(), key=lambda tile: predicted_us(rows, size_out, size_in, tile, 132))
    assert sizes.index(winner) < 12


def test_what_is_remembered_grows_by_products(tmp_path: Path):
    path = tmp_path / "new" / "products.json"
    assert _read(path) == {}
    _write(path, "a", {"16": "00"})
    _write(path, "b", {"16": ""})
    _write(path, "a", {"16": "00", "32": "11"})
    assert _read(path) == {"a": {"16": "00", "32": "11"}, "b": {"16": ""}}
    assert [file.name for file in path.parent.iterdir()] == ["products.json"]


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": 1}', json.dumps({"a": ["b"]})])
def test_a_broken_file_is_an_empty_one(tmp_path: Path, content: str):
    path = tmp_path / "products.json"
    path.write_text(content)
    assert _read(path) == {}
    _write(path, "a", {"16": "00"})
    assert _read(path) == {"a": {"16": "00"}}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    _write(tmp_path / "file" / "products.json", "a", {})
    assert _read(None) == {}
    _write(None, "a", {})


def test_products_that_were_not_tuned_are_left_to_the_caller():
    tuned = TunedLinear(torch.device("cpu"), None)
    tuned.tune([torch.zeros(16, 16)], [8])  # four bytes a number: nothing to choose
    assert tuned.linear(torch.zeros(8, 16), torch.zeros(16, 16)) is None
