"""`LLM` is asked about images, and says what transformers says of what its processor makes of them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.llm import LLM
from minisgl_backend.request import SamplingParams
from tests.parity.vision_checkpoints import FAMILIES, save
from tests.seeing import SeeingModel

NAMES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
TOWERS = ("llava_next", "smolvlm")  # in every run
# Of towers of transformers': its image processor with the sizes of the tiny checkpoint.
SQUARE = {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}}
SPLIT = {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 24}}
PINPOINTS = [[16, 32], [32, 16], [32, 32]]
ANYRES = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}, "image_grid_pinpoints": PINPOINTS}
PROCESSORS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llava": (LlavaImageProcessorPil, SQUARE),
    "llava_next": (LlavaNextImageProcessorPil, ANYRES),
    "llava_onevision": (
        LlavaOnevisionImageProcessorPil,
        {"size": {"height": 16, "width": 16}, "image_grid_pinpoints": PINPOINTS},
    ),
    "internvl": (
        GotOcr2ImageProcessorPil,
        {"size": {"height": 24, "width": 24}, "max_patches": 4, "crop_to_patches": True},
    ),
    "idefics3": (Idefics3ImageProcessorPil, SPLIT),
    "smolvlm": (SmolVLMImageProcessorPil, SPLIT),
    "glm4v": (
        Glm4vImageProcessorPil,
        {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 128, "longest_edge": 4608}},
    ),
}
QWEN = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 2304}}
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PICTURES = [
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, size, dtype=np.uint8))
    for seed, size in enumerate([(37, 50, 3), (61, 22, 3)])
]


def made(name: str, folder: Path) -> tuple[Any, SeeingModel, Any]:
    """A model of a family in the folder, its tokens, and transformers' image processor."""
    model_class, sizes = PROCESSORS.get(name, (Qwen2VLImageProcessorPil, QWEN))
    mean, std = FAMILIES[name].mean_std
    values = {"image_mean": mean, "image_std": std, **sizes}
    kind = "qwen2_vl" if model_class is Qwen2VLImageProcessorPil else name
    seeing = SeeingModel(kind, "bytes", folder)
    model = save(name, folder, vocab_size=1024)
    (folder / "preprocessor_config.json").write_text(json.dumps({**values, "image_processor_type": name}))
    return model, seeing, model_class(**values)


@torch.inference_mode()
def expected(model: Any, seeing: SeeingModel, processor: Any, ids: list[int], pictures: list[Any]) -> list[int]:
    """Greedily, without a cache."""
    pad = seeing.plain.convert_tokens_to_ids(seeing.family.vector)
    model.config.image_token_id = model.model.config.image_token_id = pad
    pixels = processor(pictures, return_tensors="pt")
    pixels = {key: value for key, value in pixels.items() if key not in ("num_patches", "batch_num_images")}
    tokens = list(ids)
    for _ in range(PARAMS.max_tokens or 0):
        given = torch.tensor([tokens])
        types = (given == pad).int()
        types[0, len(ids) :] = 0
        more = {"mm_token_type_ids": types} if "image_grid_thw" in pixels else {}
        found = model(input_ids=given, attention_mask=torch.ones_like(given), use_cache=False, **more, **pixels)
        tokens.append(int(found.logits[0, -1].argmax()))
    return tokens[len(ids) :]


@pytest.mark.parametrize(
    "name", [*NAMES, *(pytest.param(one, marks=[] if one in TOWERS else [pytest.mark.full]) for one in PROCESSORS)]
)
def test_answers_about_pictures(name: str, tmp_path: Path) -> None:
    model, seeing, processor = made(name, tmp_path)
    first, second = ({"type": "image", "image": one} for one in PICTURES)
    text = {"type": "text", "text": "world, what is in it?"}
    options: dict[str, Any] = {"dtype": "float32", "num_pages": 300, "page_size": 4, "max_running_requests": 4}
    with contextlib.closing(LLM(str(tmp_path), **options)) as llm:
        for order, pictures in (((first, text, second), PICTURES), ((second, first, text), PICTURES[::-1])):
            messages = [{"role": "user", "content": list(order)}]
            (answer,) = llm.chat(messages, PARAMS)
            said = expected(model, seeing, processor, list(answer.prompt_token_ids), pictures)
            assert answer.token_ids == said
            (again,) = llm.chat(messages, PARAMS)
            assert again.token_ids == said


def test_without_memory_for_vectors_a_model_reads_text_alone(tmp_path: Path) -> None:
    made("qwen2_5_vl", tmp_path)
    with contextlib.closing(LLM(str(tmp_path), dtype="float32", num_pages=64, encoder_cache_mib=0)) as llm:
        with pytest.raises(InvalidRequestError, match="encoder_cache_mib is 0"):
            llm.chat([{"role": "user", "content": [{"type": "image", "image": PICTURES[0]}]}], PARAMS)
        (answer,) = llm.chat([{"role": "user", "content": "Hello"}], PARAMS)
        assert len(answer.token_ids) == 6


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3_vl", {"tp": 2}),
        ("qwen3_vl", {"max_prefill_length": 9, "tp": 2, "page_size": 1, "num_pages": 900}),
        ("glm4v", {"tp": 2, "max_prefill_length": 9}),
        pytest.param("llava_next", {"tp": 2}, marks=pytest.mark.full),
    ],
)
def test_two_ranks_say_what_one_says(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Each has the encoder, also one of transformers', and encodes some of the images; both get the vectors of all."""
    made(name, tmp_path)
    content = [{"type": "image", "image": one} for one in (*PICTURES, PICTURES[0].rotate(90))]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": "what?"}]}]
    said = []
    for more in ({}, options):
        values: dict[str, Any] = {
            "dtype": "float32",
            "num_pages": 300,
            "page_size": 4,
            "max_running_requests": 4,
            **more,
        }
        with contextlib.closing(LLM(str(tmp_path), **values)) as llm:
            said.append([one.token_ids for one in llm.chat([messages, messages[:1]], PARAMS)])
    assert said[0] == said[1]
