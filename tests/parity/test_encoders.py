"""The vectors of images: as transformers' encoders make them, and the same however the layers are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl_backend.encoder_limits import num_parts
from minisgl_backend.encoders import build
from minisgl_backend.encoders.base import Encoder
from minisgl_backend.encoders.build import build_encoder
from minisgl_backend.models.config import ModelConfig
from tests.parity.vision_checkpoints import FAMILIES, TOWERS, expected_vectors, pixels, save


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Encoder]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    reference = save(request.param, folder)
    config = ModelConfig.load(folder)
    assert config.encoder is not None, config.why_no_images
    device, dtype = torch.device("cpu"), torch.float32
    encoder = build_encoder(config.encoder, folder, device=device, dtype=dtype, model=config.architecture)
    return request.param, reference, encoder


@torch.inference_mode()
def test_vectors_are_those_of_transformers(family: tuple[str, Any, Encoder]) -> None:
    name, reference, encoder = family
    for size in FAMILIES[name].sizes:
        image = pixels(*size)
        found = encoder.encode(image, FAMILIES[name].grid(*size))
        expected = expected_vectors(name, reference, image) * getattr(encoder.config, "scale", 1.0)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert found.shape == (FAMILIES[name].tokens(*size), encoder.config.width)


@torch.inference_mode()
def test_images_together(family: tuple[str, Any, Encoder]) -> None:
    name, _, encoder = family
    sizes = FAMILIES[name].sizes
    images = [(pixels(*size, seed=3), FAMILIES[name].grid(*size)) for size in (*sizes, sizes[0])]
    for found, one in zip(encoder.encode_all(images), images, strict=True):
        torch.testing.assert_close(found, encoder.encode(*one), rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_layers_in_parts(family: tuple[str, Any, Encoder], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of patches, as those of large images: cut anywhere between two parts."""
    name, _, encoder = family
    if not encoder.config.part_patches:
        pytest.skip("its layers are not cut")
    size = FAMILIES[name].sizes[0]
    image, grid = pixels(*size, seed=1), FAMILIES[name].grid(*size)
    whole = encoder.encode(image, grid)
    monkeypatch.setattr(type(encoder.config), "part_patches", 12)
    parts = num_parts(size[0] * size[1] // FAMILIES[name].patch ** 2, 12)
    assert parts > 2
    units, found = parts * encoder.config.num_layers, []
    for step in (1, 2, parts + 1, units):
        state = encoder.begin(image, grid)
        for first in range(0, units, step):
            encoder.run(state, first, min(units, first + step))
        found.append(encoder.finish(state))
        torch.testing.assert_close(found[-1], whole, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_calls_that_are_timed_at_start(family: tuple[str, Any, Encoder], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of images that none of them gets through a layer of; by two numbers of patches seen, where sizes are free."""
    name, _, encoder = family
    monkeypatch.setattr(type(encoder.config), "part_patches", 32 * bool(encoder.config.part_patches))
    found = []
    for call in encoder.timed_calls():
        call.run()
        found.append((call.parts, call.seen))
    sizes = {} if name in TOWERS else {36} if name == "gemma3" else {512, 1024}
    assert found == [(parts, seen) for seen in sorted(sizes) for parts in (1, 2, 3, 4)]


@torch.inference_mode()
def test_slices_of_layers_change_no_bit(family: tuple[str, Any, Encoder]) -> None:
    name, _, encoder = family
    size = FAMILIES[name].sizes[0]
    image, grid = pixels(*size, seed=1), FAMILIES[name].grid(*size)
    whole = encoder.encode(image, grid)
    state = encoder.begin(image, grid)
    for layer in range(encoder.config.num_layers):
        encoder.run(state, layer, layer + 1)
        encoder.encode(pixels(*size, seed=2), grid)  # another image between two slices
    assert torch.equal(encoder.finish(state), whole)


@torch.inference_mode()
def test_names_of_transformers_4_are_read(tmp_path: Path) -> None:
    """CLIP was in a module of its own."""
    reference = save("llava", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {
        name.replace("vision_tower.", "vision_tower.vision_model."): one for name, one in load_file(file).items()
    }
    tensors["vision_tower.vision_model.embeddings.position_ids"] = torch.arange(37)[None]
    save_file(tensors, file)
    config = ModelConfig.load(tmp_path)
    assert config.encoder is not None
    encoder = build_encoder(config.encoder, tmp_path, device=torch.device("cpu"), dtype=torch.float32, model="llava")
    image = pixels(24, 24)
    expected = expected_vectors("llava", reference, image)
    torch.testing.assert_close(encoder.encode(image, (1, 0, 0)), expected, rtol=1e-5, atol=1e-5)


def test_an_encoder_leaves_the_decoders_kernels_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small decoders have all kernels of a process share multiprocessors otherwise, which large ones are slower by."""
    save("qwen3_vl", tmp_path)
    config, sizes = ModelConfig.load(tmp_path).encoder, list[int | None]()
    select = build.select_ops

    def noted(device: torch.device, hidden_size: int | None, *more: Any) -> Any:
        sizes.append(hidden_size)
        return select(device, hidden_size, *more)

    monkeypatch.setattr(build, "select_ops", noted)
    assert config is not None
    build_encoder(config, tmp_path, device=torch.device("cpu"), dtype=torch.float32, model="qwen3_vl")
    assert sizes == [None]
