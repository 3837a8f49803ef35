"""Vectors in place of embeddings, a plane behind a layer and other positions of the rotation: as transformers computes
them, whole as in chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backend.layers.model_input import ModelInput
from minisgl_backend.layers.rotary import RopeTables
from tests.parity.checkpoints import reference_model, save_checkpoint
from tests.parity.paged import PagedModel
from tests.toys.pictures import Picture

TOKENS = [3 + 7 * i % 90 for i in range(23)]
START, LENGTH = 4, 9
CHUNKS = ((23,), (4, 9, 10), (6, 1, 3, 5, 8))  # before and behind the picture, and within it


def picture(hidden_size: int, **more: Any) -> Picture:
    draw = torch.Generator().manual_seed(5)
    vectors, plane = (torch.randn(LENGTH, hidden_size, generator=draw) for _ in range(2))
    return Picture(START, vectors, **{"plane": plane, **more})


@torch.inference_mode()
def expected(folder: Path, shown: Picture) -> torch.Tensor:
    model = reference_model(folder)
    place, positions = slice(START, START + LENGTH), torch.arange(len(TOKENS))
    embedded = model.get_input_embeddings()(torch.tensor([TOKENS]))
    embedded[0, place] = shown.vectors

    def add_plane(module: Any, inputs: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        hidden[0, place] += shown.plane if shown.plane is not None else 0.0
        return output

    layers = model.get_decoder().layers
    layers[shown.behind].register_forward_hook(add_plane)
    # With a mask transformers does not take jumps of positions for other sequences.
    mask = torch.ones(1, len(TOKENS), dtype=torch.int64)
    return model(inputs_embeds=embedded, position_ids=shown.rotated_by(positions)[None], attention_mask=mask).logits[0]


def in_chunks(paged: PagedModel, row: int, shown: Any, chunks: tuple[int, ...]) -> torch.Tensor:
    """All logits; the last tokens one by one, as in decode steps."""
    found, tokens = [], TOKENS[:-2]
    for count in chunks:
        part, tokens = tokens[:count], tokens[count:]
        found.append(paged.step({row: part}, {}, change=shown)[row])
    found += [paged.step({}, {row: token}, change=shown)[row] for token in TOKENS[-2:]]
    return torch.cat(found)


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("name", ["qwen3-tied-sharded", "deepseek_v3"])
def test_as_transformers_and_whole_as_in_chunks(name: str, behind: int, tmp_path: Path) -> None:
    """Behind the first layer, and behind the last but one or the last; keys and values, and latents."""
    save_checkpoint(name, tmp_path)
    paged = PagedModel(tmp_path, page_size=4)
    config = paged.model.config
    shown = picture(config.hidden_size, behind=behind * (config.num_layers - 1))
    reference = expected(tmp_path, shown)
    for row, chunks in enumerate(CHUNKS):
        torch.testing.assert_close(in_chunks(paged, row, shown.shown, chunks), reference, rtol=2e-4, atol=2e-4)
    last = paged.step({5: TOKENS}, {}, last_only=True, change=shown.shown)[5]
    torch.testing.assert_close(last[0], reference[-1], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["qwen3-tied-sharded", "deepseek_v3", "gemma3"])
def test_angles_of_the_pass_are_positions_elsewhere(name: str, tmp_path: Path) -> None:
    """Each table of the model has its own: Gemma 3 has two."""
    save_checkpoint(name, tmp_path)
    paged = PagedModel(tmp_path, page_size=4)
    config, shown = paged.model.config, picture(paged.model.config.hidden_size)
    tables = RopeTables(256, torch.device("cpu"))
    for attention in config.attentions:
        tables.of(attention.rope, attention.rope_head_dim)

    def with_angles(tokens: ModelInput) -> ModelInput:
        return shown.shown(tokens, tables)

    by_positions = in_chunks(paged, 0, shown.shown, CHUNKS[0])
    assert torch.equal(in_chunks(paged, 1, with_angles, CHUNKS[0]), by_positions)
    assert not torch.allclose(in_chunks(paged, 2, lambda tokens: tokens, CHUNKS[0]), by_positions, atol=1e-2)


def test_transformers_classes_take_vectors_and_positions(tmp_path: Path) -> None:
    save_checkpoint("qwen3-tied-sharded", tmp_path)
    paged = PagedModel(tmp_path, page_size=4, model_impl="transformers")
    shown = picture(paged.model.model.config.hidden_size, plane=None)
    for row, chunks in enumerate(CHUNKS):
        found = in_chunks(paged, row, shown.shown, chunks)
        torch.testing.assert_close(found, expected(tmp_path, shown), rtol=2e-4, atol=2e-4)
    with pytest.raises(NotImplementedError, match="token ids or vectors"):
        paged.step({6: TOKENS}, {}, change=picture(64).shown)
