"""Sizes, token counts, placeholder texts and pixels of every family against transformers' processors."""

import importlib
import json
import random
import re
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import (
    PixtralImageProcessorPil,
    get_resize_output_image_size,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

from minisgl_backend.errors import ConfigError, InvalidRequestError
from minisgl_backend.images.decode import pixels_of
from minisgl_backend.images.families import FAMILIES, family_of, why_blind


def _pixtral_processor():
    """Its module imports one that needs torchvision, for a function that another module has, too."""
    name = "transformers.models.pixtral.image_processing_pixtral"
    stand_in = ModuleType(name)
    stand_in.get_resize_output_image_size = get_resize_output_image_size
    with mock.patch.dict(sys.modules, {name: stand_in}):
        return importlib.import_module("transformers.models.pixtral.processing_pixtral").PixtralProcessor


class Case:
    """A model's files, and transformers' processors of them."""

    def __init__(self, model_type, image_class, image, processor_class, names, config=None, processor=None, call=None):
        self.model_type, self.config, self.processor = model_type, config or {}, processor or {}
        self.image_processor = image_class(**image)
        self.image = image
        self.processor_class, self.names, self.call = processor_class, names, call or {}

    def folder(self, path):
        files = {
            "config": {"model_type": self.model_type, **self.config},
            "preprocessor_config": {**self.image, "image_processor_type": type(self.image_processor).__name__},
            "processor_config": self.processor,
        }
        for name, values in files.items():
            (path / f"{name}.json").write_text(json.dumps(values))
        return path

    def expected(self, image):
        """Their pixels [tiles, height, width, 3] before scaling, and their text."""
        found = self.image_processor(image, do_rescale=False, do_normalize=False, **self.call)
        stub = SimpleNamespace(image_processor=self.image_processor, **self.names, **self.processor)
        for name in ("_get_number_of_features", "_get_unpadded_features"):
            if hasattr(self.processor_class, name):
                setattr(stub, name, getattr(self.processor_class, name).__get__(stub))
        text = self.processor_class.replace_image_token(stub, found, 0)
        pixels = found["pixel_values"]
        pixels = np.asarray(pixels[0] if np.ndim(pixels[0]) == 4 else pixels)
        return found, pixels, text


GOT = {"size": {"height": 448, "width": 448}, "min_patches": 1, "max_patches": 12}
SQUARE = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
CLIP = {"vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}}
SIGLIP = {"vision_config": {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}}
PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
_QWEN_NAMES = {"image_token": "<|image_pad|>"}
_IDEFICS_NAMES = {
    "fake_image_token": "<fake_token_around_image>",
    "global_image_tag": "<global-img>",
    "global_image_token": "<global-img>",
    "image_token": "<image>",
}
_GEMMA = {"full_image_sequence": "\n\n<start_of_image>" + "<image_soft_token>" * 256 + "<end_of_image>\n\n"}
_GEMMA_4 = {"boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>"}
_PAN = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 256, "pan_and_scan_max_num_crops": 4}
_PAN["pan_and_scan_min_ratio_to_activate"] = 1.2
QWEN_LARGE = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "patch_size": 16, "merge_size": 2}
CASES = {
    "qwen2_vl": Case(
        "qwen2_vl",
        Qwen2VLImageProcessorPil,
        {"min_pixels": 3136, "max_pixels": 200_000},
        Qwen2VLProcessor,
        _QWEN_NAMES,
    ),
    "qwen3_vl": Case("qwen3_vl", Qwen2VLImageProcessorPil, QWEN_LARGE, Qwen2VLProcessor, _QWEN_NAMES),
    "glm4v": Case(
        "glm4v",
        Glm4vImageProcessorPil,
        {"size": {"shortest_edge": 12544, "longest_edge": 400_000}},
        Qwen2VLProcessor,
        {"image_token": "<|image|>"},
    ),
    "gemma3": Case("gemma3", Gemma3ImageProcessorPil, {"size": {"height": 896, "width": 896}}, Gemma3Processor, _GEMMA),
    "gemma3 in crops": Case(
        "gemma3", Gemma3ImageProcessorPil, {"size": {"height": 896, "width": 896}}, Gemma3Processor, _GEMMA, call=_PAN
    ),
    "gemma4": Case("gemma4", Gemma4ImageProcessorPil, {}, Gemma4Processor, _GEMMA_4),
    "gemma4 of 1120": Case("gemma4", Gemma4ImageProcessorPil, {"max_soft_tokens": 1120}, Gemma4Processor, _GEMMA_4),
    "mistral3": Case(
        "mistral3",
        PixtralImageProcessorPil,
        {"size": {"longest_edge": 1540}, "patch_size": 28, "do_pad": False},
        _pixtral_processor(),
        {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
        processor={"patch_size": 14, "spatial_merge_size": 2},
    ),
    "idefics3": Case(
        "idefics3",
        Idefics3ImageProcessorPil,
        {},
        Idefics3Processor,
        _IDEFICS_NAMES,
        processor={"image_seq_len": 169},
        call={"return_row_col_info": True},
    ),
    "smolvlm": Case(
        "smolvlm",
        SmolVLMImageProcessorPil,
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
        SmolVLMProcessor,
        _IDEFICS_NAMES,
        processor={"image_seq_len": 64},
        call={"return_row_col_info": True},
    ),
    "smolvlm whole": Case(
        "smolvlm",
        SmolVLMImageProcessorPil,
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}, "do_image_splitting": False},
        SmolVLMProcessor,
        _IDEFICS_NAMES,
        processor={"image_seq_len": 64},
        call={"return_row_col_info": True},
    ),
    "internvl": Case(
        "internvl",
        GotOcr2ImageProcessorPil,
        GOT,
        InternVLProcessor,
        {"start_image_token": "<img>", "end_image_token": "</img>", "image_token": "<IMG_CONTEXT>"},
        config={"vision_config": {"image_size": [448, 448], "patch_size": [14, 14]}},
        processor={"image_seq_length": 256},
        call={"crop_to_patches": True},
    ),
    "llava": Case(
        "llava",
        LlavaImageProcessorPil,
        SQUARE,
        LlavaProcessor,
        {"image_token": "<image>"},
        config=CLIP,
        processor={
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "llava padded": Case(
        "llava",
        LlavaImageProcessorPil,
        {**SQUARE, "do_pad": True},
        LlavaProcessor,
        {"image_token": "<image>"},
        config=CLIP,
        processor={
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "llava with siglip": Case(
        "llava",
        SiglipImageProcessorPil,
        {"size": {"height": 384, "width": 384}, "do_center_crop": False},
        LlavaProcessor,
        {"image_token": "<image>"},
        config=SIGLIP,
        processor={
            "patch_size": 14,
            "vision_feature_select_strategy": "full",
            "num_additional_image_tokens": 0,
        },
    ),
    "llava_next": Case(
        "llava_next",
        LlavaNextImageProcessorPil,
        {**SQUARE, "image_grid_pinpoints": PINPOINTS},
        LlavaNextProcessor,
        {"image_token": "<image>"},
        config=CLIP,
        processor={
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "llava_next with siglip": Case(  # Granite Vision 3
        "llava_next",
        LlavaNextImageProcessorPil,
        {
            **{"size": {"height": 384, "width": 384}, "crop_size": {"height": 384, "width": 384}},
            "image_grid_pinpoints": [[384, 384 * a] for a in range(1, 11)] + [[768, 768], [1152, 384], [3840, 384]],
        },
        LlavaNextProcessor,
        {"image_token": "<image>"},
        config=SIGLIP,
        processor={"patch_size": 14, "vision_feature_select_strategy": "full", "num_additional_image_tokens": 0},
    ),
    "llava with pixtral": Case(  # Pixtral 12B
        "llava",
        PixtralImageProcessorPil,
        {"size": {"longest_edge": 1024}, "patch_size": {"height": 16, "width": 16}, "do_pad": False},
        _pixtral_processor(),
        {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
        config={"vision_config": {"model_type": "pixtral", "image_size": 1024, "patch_size": 16}},
        processor={"patch_size": 16, "spatial_merge_size": 1},
    ),
    "llava_onevision": Case(
        "llava_onevision",
        LlavaOnevisionImageProcessorPil,
        {"image_grid_pinpoints": [[384 * a, 384 * b] for a in range(1, 7) for b in range(1, 7)]},
        LlavaOnevisionProcessor,
        {"image_token": "<image>", "num_image_tokens": 729},
        config=SIGLIP,
        processor={"vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"},
    ),
}
SHAPES = [(640, 480), (30, 3000), (1, 1), (1, 150), (97, 53), (448, 448), (1280, 720)]


def _image(width, height):
    rng = np.random.default_rng(width * 10_000 + height)
    coarse = rng.integers(0, 255, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def _text(size, family):
    return "".join(part if isinstance(part, str) else family.vector * part for part in size.layout)


def _family(case, path):
    family = family_of(case.folder(path))
    return family.changed({"do_pan_and_scan": True}) if case.call.get("do_pan_and_scan") else family


def _tiles(case, found, pixels, size):
    """Their pixels as tiles [tiles, height, width, 3], whichever form they have."""
    if "image_grid_thw" in found:
        _, rows, columns = (int(one) for one in np.asarray(found["image_grid_thw"])[0])
        assert size.grid == (1, rows, columns)
        patch = case.image_processor.patch_size
        patches = pixels.reshape(rows // 2, columns // 2, 2, 2, 3, 2, patch, patch)
        assert (patches[:, :, :, :, :, 0] == patches[:, :, :, :, :, 1]).all()
        return patches[:, :, :, :, :, 0].transpose(0, 2, 5, 1, 3, 6, 4).reshape(1, rows * patch, columns * patch, 3)
    if "image_position_ids" in found:
        columns, rows = (int(one) + 1 for one in np.asarray(found["image_position_ids"])[0].max(0))
        assert size.grid == (1, rows, columns)
        patches = pixels[0, : rows * columns].reshape(rows, columns, 16, 16, 3)
        return patches.swapaxes(1, 2).reshape(1, rows * 16, columns * 16, 3)
    return pixels.transpose(0, 2, 3, 1)


@pytest.mark.parametrize("name", CASES)
def test_pixels_and_texts_are_those_of_transformers(name, tmp_path):
    case = CASES[name]
    family = _family(case, tmp_path)
    for width, height in SHAPES:
        image = _image(width, height)
        found, pixels, text = case.expected(image)
        size = family.size(width, height)
        assert _text(size, family) == text
        got = pixels_of(image, size.views, size.shape, family.resample)
        expected = _tiles(case, found, pixels, size)
        assert expected.shape == size.shape, (width, height)
        assert np.array_equal(got, expected), (width, height)


@pytest.mark.parametrize("name", CASES)
def test_sizes_at_random_shapes_are_those_of_transformers(name, tmp_path):
    case, rng = CASES[name], random.Random(7)
    family = _family(case, tmp_path)
    for _ in range(300):
        width = int(2 ** rng.uniform(0, 12))
        height = max(1, min(4096, int(width * 2 ** rng.uniform(-7, 7))))
        size = family.size(width, height)
        if hasattr(case.image_processor, "get_number_of_image_patches") and "splits" not in family.fingerprint:
            patches = case.image_processor.get_number_of_image_patches(height, width, case.call)
            tokens = size.shape[0] if size.grid[0] > 1 else size.grid[1] * size.grid[2]
            assert patches == tokens, (width, height)
        if hasattr(case.processor_class, "_get_number_of_features"):
            stub = SimpleNamespace(image_processor=case.image_processor, **case.names, **case.processor)
            stub._get_unpadded_features = case.processor_class._get_unpadded_features.__get__(stub)
            edge = size.shape[1]
            tokens = case.processor_class._get_number_of_features(stub, height, width, edge, edge)
            assert size.num_vectors == tokens - (case.processor["vision_feature_select_strategy"] == "default")
        assert size.num_bytes == np.prod(size.shape)
        assert size.num_vectors >= 1


@pytest.mark.parametrize("name", CASES)
def test_limits_hold_at_random_shapes(name, tmp_path):
    family, rng = _family(CASES[name], tmp_path), random.Random(8)
    least = {"gemma3": 256, "internvl": 768, "llava_next": 1800, "llava_onevision": 2300, "llava": 729}
    limit = next((least[key] for key in least if name.startswith(key)), 900)
    small = family.limited(limit)
    for _ in range(200):
        width, height = int(2 ** rng.uniform(0, 12)), int(2 ** rng.uniform(0, 12))
        if max(width, height) > 200 * min(width, height):
            continue
        assert small.size(width, height).num_vectors <= limit
        assert small.low_detail().size(width, height).num_vectors <= small.size(width, height).num_vectors
    assert small.fingerprint != family.fingerprint or limit >= family.size(4000, 3000).num_vectors


def test_every_family_has_a_case():
    alike = {
        "qwen2_5_vl": "qwen2_vl",
        **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_vl_moe"), "qwen3_vl"),
        "glm4v_moe": "glm4v",
        "glm46v": "glm4v",
    }
    assert {alike.get(name, name) for name in FAMILIES} == {case.model_type for case in CASES.values()}


@pytest.mark.parametrize(("width", "height"), [(1, 20_000), (20_000, 1), (201, 1)])
@pytest.mark.parametrize("name", CASES)
def test_extreme_ratios_are_refused(name, width, height, tmp_path):
    with pytest.raises(InvalidRequestError, match="200 times"):
        _family(CASES[name], tmp_path).size(width, height)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("qwen2_vl", {"num_crops": 4}, "allowed: min_pixels, max_pixels, size"),
        ("qwen2_vl", {"max_pixels": "a"}, "max_pixels is 'a'"),
        ("qwen2_vl", {"max_pixels": True}, "max_pixels is True"),
        ("qwen2_vl", {"min_pixels": 90_000, "max_pixels": 80_000}, "min_pixels is 90000"),
        ("qwen2_vl", {"size": {"height": 3}}, "shortest_edge and longest_edge"),
        ("gemma3", {"do_pan_and_scan": 1}, "true or false"),
        ("gemma3", {"pan_and_scan_min_ratio_to_activate": 0}, "a number from 1"),
        ("internvl", {"max_dynamic_patch": 0}, "a whole number from 1"),
        ("mistral3", {"size": {"longest_edge": -1}}, "a whole number from 1"),
        ("llava", {"size": 3}, "none, with this model"),
        ("gemma4 of 1120", {"max_soft_tokens": 70.0}, "max_soft_tokens is 70.0; allowed: 70, 140"),
        ("gemma4 of 1120", {"max_soft_tokens": True}, "max_soft_tokens is True; allowed: 70, 140"),
        ("gemma4 of 1120", {"max_soft_tokens": [70]}, "allowed: 70, 140"),
    ],
)
def test_options_that_are_not_served_are_refused_by_name(name, options, said, tmp_path):
    with pytest.raises(InvalidRequestError, match=said):
        _family(CASES[name], tmp_path).changed(options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen2_vl", {"max_pixels": 10**9}),
        ("qwen2_vl", {"size": {"longest_edge": 10**9}}),
        ("mistral3", {"size": {"longest_edge": 10**6}}),
        ("internvl", {"max_patches": 99}),
        ("smolvlm", {"size": {"longest_edge": 4096}}),
    ],
)
def test_options_never_go_beyond_the_servers_own(name, options, tmp_path):
    family = _family(CASES[name], tmp_path)
    assert family.changed(options).size(3000, 2000) == family.size(3000, 2000)


def test_other_models_are_refused_with_the_list(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "molmo2"}')
    with pytest.raises(ConfigError, match=r"'molmo2'.*qwen3_vl"):
        family_of(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json"):
        family_of(tmp_path)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"model_type": "aya_vision", "vision_config": {"hidden_size": 8}},
            "not served with model_type 'aya_vision'.*qwen3_vl",
        ),
        ({"model_type": "llama"}, "^$"),
        ({"model_type": "qwen2_vl", "vision_config": {"depth": 2}}, "has no preprocessor_config.json"),
        (None, "^$"),  # a .gguf file
    ],
)
def test_why_images_are_refused(tmp_path, config, said):
    folder = tmp_path / "model"
    if config is None:
        folder.write_bytes(b"GGUF")
    else:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    assert re.search(said, why_blind(folder, ""))
