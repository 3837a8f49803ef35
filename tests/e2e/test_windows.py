"""A Mistral with a window of 24 tokens behind the real server: the tokens that transformers gives."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.e2e.conftest import RunningServer
from tests.parity.checkpoint_options import VOCAB_SIZE
from tests.parity.checkpoints import reference_model, save_checkpoint, save_tokenizer

pytestmark = [pytest.mark.e2e]


def test_prompts_longer_than_the_window(tmp_path: Path) -> None:
    checkpoint = tmp_path / "mistral"
    save_checkpoint("mistral-window", checkpoint)
    save_tokenizer(checkpoint)
    generator = random.Random(0)
    prompts = [[generator.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (150, 150, 20)]
    model = reference_model(checkpoint)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = [model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in prompts]
    parameters = {"model": str(checkpoint), "dtype": "float32", "num_pages": "256", "max_seq_len_override": "256"}
    (tmp_path / "server").mkdir()
    with RunningServer(tmp_path / "server", parameters) as server:
        for prompt, tokens in zip(prompts, expected, strict=True):
            text = server.text(prompt_token_ids=prompt, max_tokens=20, temperature=0.0, ignore_eos=True)
            assert text.split() == [f"w{token}" for token in tokens if token]  # 0 is special, and no text
