"""Rope tables against transformers' own formulas, and rotation against complex multiplication."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from minisgl_backend.kernels.torch_ops import TorchOps
from minisgl_backend.layers.rotary import default_frequencies, rotary_table
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.decoder import rope_table

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 8192},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 16, "beta_slow": 2}
    | {"original_max_position_embeddings": 4096},
    {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.25, "truncate": False}
    | {"original_max_position_embeddings": 512},
]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_scaled_tables(scaling: dict[str, Any], head_dim: int) -> None:
    hf = transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rope_scaling=dict(scaling),
        architectures=["LlamaForCausalLM"],
    )
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](hf, torch.device("cpu"))
    expected = rotary_table(frequencies, 256, torch.device("cpu"), attention_factor)
    config = ModelConfig.from_dicts(hf.to_dict(), {})
    torch.testing.assert_close(
        rope_table(config.layers[0].attention.rope, head_dim, 256, torch.device("cpu")), expected, rtol=1e-5, atol=1e-5
    )


def test_rotation_is_a_complex_product() -> None:
    head_dim, heads = 8, 3  # one query head, one key head, one value head
    table = rotary_table(default_frequencies(head_dim, 100.0), 50, torch.device("cpu"))
    qkv = torch.randn(4, heads * head_dim)
    positions = torch.tensor([0, 3, 17, 49])
    k_cache, v_cache = torch.zeros(3, 1, 4, head_dim), torch.zeros(3, 1, 4, head_dim)
    slots = torch.tensor([4, 7, 9, 2])
    q = TorchOps().rope_store(qkv.clone(), None, None, table, positions, slots, k_cache, v_cache, 1, 1e-6)
    turn = torch.polar(torch.ones(4, head_dim // 2), torch.outer(positions.float(), default_frequencies(head_dim, 100)))
    for given, rotated in ((qkv[:, :8], q[:, 0]), (qkv[:, 8:16], k_cache[slots // 4, 0, slots % 4])):
        pairs = torch.complex(given[:, :4], given[:, 4:]) * turn
        torch.testing.assert_close(rotated, torch.cat([pairs.real, pairs.imag], dim=-1))
    assert torch.equal(v_cache[slots // 4, 0, slots % 4], qkv[:, 16:])
    assert int((v_cache != 0).any(-1).sum()) == 4
