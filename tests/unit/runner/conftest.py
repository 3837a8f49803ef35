"""A tiny checkpoint for the runner's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 checkpoint with random weights, float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.3,  # sharp distributions: greedy choices are not decided by rounding
    )
    folder = tmp_path_factory.mktemp("tiny-qwen3")
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder
