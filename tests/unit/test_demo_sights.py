"""The images and questions of the demo model with eyes, and the model as it is published."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer

from benchmarks import demo_sights
from benchmarks.demo_scenes import COLUMN, FIELDS, NUMBER, ROW, SCATTER, Figure, Scene, draw_image, draw_scene
from minisgl_backend.models.folder import find_model_dir
from scripts import demo_vl_data, demo_vl_model

LAYOUTS = (ROW, COLUMN, SCATTER, NUMBER, FIELDS)
RED, BLUE = Figure("circle", "red"), Figure("square", "blue")


@pytest.mark.parametrize("kind", demo_sights.KINDS)
def test_questions_are_the_same_for_a_seed_and_held_out(kind: str) -> None:
    asked, again = demo_sights.questions(kind, 12, seed=5), demo_sights.questions(kind, 12, seed=5)
    assert [one.messages for one in asked] == [one.messages for one in again]
    for one in asked:
        assert one.kind == kind
        assert one.is_right(f"{one.sight.answer} ")
        assert not one.is_right(f"not {one.sight.answer}")
        assert len(one.images) == len(one.sight.scenes) >= (2 if kind == "order" else 1)
        assert all(scene.is_held_out for scene in one.sight.scenes if scene.can_be_held_out)


def test_training_sees_nothing_that_is_held_out() -> None:
    rng = Random(1)
    scenes = [draw_scene(rng, LAYOUTS, held_out=False) for _ in range(200)]
    assert not any(scene.is_held_out for scene in scenes if scene.can_be_held_out)
    told = [sight for _ in range(40) for sight in demo_sights.training_sights(scenes, rng)]
    assert {id(scene) for sight in told for scene in sight.scenes} <= {id(scene) for scene in scenes}
    assert all(sight.answer for sight in told)


@pytest.mark.parametrize(
    ("scene", "kind", "question", "answer"),
    [
        (Scene(ROW, (RED, BLUE), background="white"), "side", "What is left of the blue square?", "a red circle"),
        (Scene(COLUMN, (RED, BLUE), background="white"), "side", "What is below the red circle?", "a blue square"),
        (Scene(ROW, (RED, BLUE), background="white"), "colour", "What colour is the square?", "blue"),
        (Scene(SCATTER, (RED, BLUE, BLUE), background="white"), "count", "How many figures are there?", "3"),
        (Scene(FIELDS, fields=(("red", "blue"),)), "side", "What colour is on the right?", "blue"),
        (Scene(NUMBER, number="407", colour="red", background="white"), "digits", "What number is shown?", "407"),
        (Scene(ROW, (RED, BLUE), background="white"), "describe", "What do you see?", "a red circle and a blue square"),
    ],
)
def test_answers(scene: Scene, kind: str, question: str, answer: str) -> None:
    found = {asked for seed in range(30) for asked in demo_sights.about(scene, kind, Random(seed))}
    assert (question, answer) in found


def test_images_show_their_scenes() -> None:
    image = draw_image(Scene(ROW, (RED, BLUE), background="white"), Random(3))
    pixels = np.asarray(image).astype(int)
    red = (pixels[..., 0] > 180) & (pixels[..., 2] < 80)
    blue = (pixels[..., 2] > 120) & (pixels[..., 0] < 80)
    assert np.nonzero(red)[1].max() < np.nonzero(blue)[1].min()


def test_the_model_is_what_was_trained_and_transformers_loads_it() -> None:
    """Pixels of transformers' image processor, logits of its model."""
    from transformers import AutoImageProcessor, Qwen3VLForConditionalGeneration

    folder = find_model_dir("demo-vl")
    own = demo_vl_model.load_folder(folder).eval()
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    images = [Image.new("RGB", size, colour) for size, colour in (((150, 90), "red"), ((300, 420), "blue"))]
    seen = [demo_vl_data.patches_of(image) for image in images]
    patches, grids = np.stack([one for one, _ in seen]), np.array([grid for _, grid in seen], np.int32)
    rows = demo_vl_data.Rows(Tokenizer.from_file(str(folder / "tokenizer.json")), 1, 128)
    rows.fill(0, [([0, 1, "What is in image 2?"], "only blue")], grids)
    ids, _, positions, vector = (torch.from_numpy(one) for one in rows.arrays)
    ids, positions, vector = (one[..., : int((ids[0] != demo_vl_model.PAD).sum())] for one in (ids, positions, vector))
    made = AutoImageProcessor.from_pretrained(folder)(images=images, return_tensors="pt")
    with torch.inference_mode():
        found = own(torch.from_numpy(patches), torch.from_numpy(grids), ids, positions, vector)
        of_image = (ids == demo_vl_model.IMAGE).int()
        expected = model(input_ids=ids.long(), mm_token_type_ids=of_image, **made).logits
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
