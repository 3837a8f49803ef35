"""A whole tiny model that sees: weights, tokenizer, chat template and processor."""

from __future__ import annotations

import json
from pathlib import Path

from tests.parity.vision_checkpoints import FAMILIES, save
from tests.seeing import SeeingModel

NAME = "qwen2_5_vl"


def seeing_checkpoint(folder: Path) -> SeeingModel:
    """Its `model` is transformers'. An image of 56x40 pixels is not resized."""
    small = SeeingModel("qwen2_vl", "bytes", folder)
    small.model = save(NAME, folder, vocab_size=len(small.plain) + 320)
    path, family = folder / "preprocessor_config.json", FAMILIES[NAME]
    processor = json.loads(path.read_text())
    processor |= {"patch_size": family.patch, "merge_size": family.merge, "min_pixels": 64, "max_pixels": 4096}
    path.write_text(json.dumps(processor))
    return small
