"""Models that see with a quantized decoder around which nothing is: as transformers' with the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests.parity.checkpoints import save_tokenizer
from tests.parity.quantized import VARIANTS, Tensors, dequantize, is_linear, quantize, rewrite
from tests.parity.seeing import Image, reference, seeing
from tests.parity.test_images import assert_same
from tests.parity.vision_checkpoints import FAMILIES, pixels, save

# As publishers write it of such models.
IGNORED = ["re:.*lm_head", "re:visual.*", "re:.*vision_tower.*", "re:.*multi_modal_projector.*", "re:.*vision_model.*"]
IGNORED += ["re:model.visual.*", "re:.*connector.*"]


@pytest.mark.parametrize(
    "name", ["llava_next", "glm4v", *(pytest.param(one, marks=pytest.mark.full) for one in ("smolvlm", "qwen2_5_vl"))]
)
def test_answers_are_those_of_the_same_weights(name: str, tmp_path: Path) -> None:
    folder, quantized, plain = (tmp_path / one for one in ("model", "quantized", "plain"))
    save(name, folder)
    save_tokenizer(folder)
    config = {**VARIANTS["ct-weights-only"][0], "ignore": IGNORED}

    def write(key: str, weight: torch.Tensor) -> tuple[Tensors, Tensors]:
        of_text = any(part in key for part in ("language_model.", "text_model.", "model.layers."))
        if not of_text or not (is_linear(key) or "gate_up_proj" in key):
            return {key: weight}, {key: weight}
        block = (1, weight.shape[1])
        numbers, scales = quantize(weight.float(), block)
        return {key: numbers, f"{key}_scale": scales}, {key: dequantize(numbers, scales, block)}

    rewrite(folder, config, quantized, plain, write)
    model = getattr(transformers, FAMILIES[name].architecture).from_pretrained(plain).eval()
    prompt = [5, 6, Image(pixels(*FAMILIES[name].sizes[0])), 8, 9]
    expected = reference(name, model, prompt)
    with seeing(name, quantized, max_prefill_length=7) as engine:
        assert_same(engine.ask(engine.request(prompt))[0], expected)
