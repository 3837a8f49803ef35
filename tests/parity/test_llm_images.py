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
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.llm import LLM
from minisgl_backend.request import SamplingParams
from tests.parity.vision_checkpoints import FAMILIES, save
from tests.seeing import SeeingModel

NAMES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PICTURES = [
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, size, dtype=np.uint8))
    for seed, size in enumerate([(37, 50, 3), (61, 22, 3)])
]


def made(name: str, folder: Path) -> tuple[Any, SeeingModel, Any]:
    """A model of a family in the folder, its tokens, and transformers' image processor."""
    seeing = SeeingModel("qwen2_vl", "bytes", folder)
    model = save(name, folder, vocab_size=1024)
    mean, std = FAMILIES[name].mean_std
    sizes = {"patch_size": 4, "merge_size": 2, "image_mean": mean, "image_std": std}
    sizes |= {"size": {"shortest_edge": 64, "longest_edge": 2304}}
    processor = Qwen2VLImageProcessorPil(**sizes)
    (folder / "preprocessor_config.json").write_text(json.dumps({**sizes, "image_processor_type": "Qwen2VL"}))
    return model, seeing, processor


@torch.inference_mode()
def expected(model: Any, seeing: SeeingModel, processor: Any, ids: list[int], pictures: list[Any]) -> list[int]:
    """Greedily, without a cache."""
    pad = seeing.plain.convert_tokens_to_ids("<|image_pad|>")
    model.config.image_token_id = model.model.config.image_token_id = pad
    pixels = processor(pictures, return_tensors="pt")
    tokens = list(ids)
    for _ in range(PARAMS.max_tokens or 0):
        given = torch.tensor([tokens])
        types = (given == pad).int()
        types[0, len(ids) :] = 0
        mask = torch.ones_like(given)
        found = model(input_ids=given, attention_mask=mask, mm_token_type_ids=types, use_cache=False, **pixels)
        tokens.append(int(found.logits[0, -1].argmax()))
    return tokens[len(ids) :]


@pytest.mark.parametrize("name", NAMES)
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


@pytest.mark.parametrize("options", [{"tp": 2}, {"max_prefill_length": 9, "tp": 2, "page_size": 1, "num_pages": 900}])
def test_two_ranks_say_what_one_says(options: dict[str, Any], tmp_path: Path) -> None:
    """Each encodes some of the images, and both get the vectors of all."""
    made("qwen3_vl", tmp_path)
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
