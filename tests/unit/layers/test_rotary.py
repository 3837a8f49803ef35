"""Rope tables against transformers' own formulas, and rotation against complex multiplication."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from minisgl_backend.kernels.ops import QKNormRope, TokenPlaces
from minisgl_backend.kernels.torch_ops import TorchOps
from minisgl_backend.kv.layout import LayerKV
from minisgl_backend.layers.mixer_config import RopeConfig
from minisgl_backend.layers.rotary import default_frequencies, head_order, rope_table, rotary_table
from minisgl_backend.models.config import ModelConfig

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
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
        rope_table(config.layers[0].mixer.rope, head_dim, 256, torch.device("cpu")), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("max_seq_len", [256, 4096])
@pytest.mark.parametrize("partial", [1.0, 0.75])
def test_longrope_tables(max_seq_len: int, partial: float) -> None:
    """Short factors where no sequence is longer than the original context, else the long ones."""
    pairs = int(64 * partial) // 2
    factors = {"short_factor": [1.0 + i / 9 for i in range(pairs)], "long_factor": [2.0 + i for i in range(pairs)]}
    hf = transformers.Phi3Config(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=8192,
        original_max_position_embeddings=1024,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": partial, **factors},
        architectures=["Phi3ForCausalLM"],
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS["longrope"](hf, torch.device("cpu"), seq_len=max_seq_len)
    expected = rotary_table(frequencies, 200, torch.device("cpu"), factor, still=32 - pairs)
    rope = ModelConfig.from_dicts(hf.to_dict(), {}).layers[0].mixer.rope
    found = rope_table(rope, 64, max_seq_len, torch.device("cpu"))[:200]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("rope", "order"),
    [
        (RopeConfig(), None),
        (None, None),
        (RopeConfig(rotary_dim=8), None),
        (RopeConfig(interleaved=True), (0, 2, 4, 6, 1, 3, 5, 7)),
        (RopeConfig(rotary_dim=4), (0, 1, 4, 5, 2, 3, 6, 7)),
        (RopeConfig(rotary_dim=4, interleaved=True), (0, 2, 4, 5, 1, 3, 6, 7)),
    ],
)
def test_pairs_are_half_a_head_apart(rope: RopeConfig | None, order: tuple[int, ...] | None) -> None:
    assert head_order(rope, 8) == order


def test_rotation_is_a_complex_product() -> None:
    head_dim, heads = 8, 3  # one query head, one key head, one value head
    table = rotary_table(default_frequencies(head_dim, 100.0), 50, torch.device("cpu"))
    qkv = torch.randn(4, heads * head_dim)
    positions = torch.tensor([0, 3, 17, 49])
    k_cache, v_cache = torch.zeros(3, 1, 4, head_dim), torch.zeros(3, 1, 4, head_dim)
    slots = torch.tensor([4, 7, 9, 2])
    rotation = QKNormRope(q_norm=None, k_norm=None, cos_sin=table, eps=1e-6)
    q = TorchOps().rope_store(qkv.clone(), rotation, TokenPlaces(positions, slots), LayerKV(k_cache, v_cache), 1)
    turn = torch.polar(torch.ones(4, head_dim // 2), torch.outer(positions.float(), default_frequencies(head_dim, 100)))
    for given, rotated in ((qkv[:, :8], q[:, 0]), (qkv[:, 8:16], k_cache[slots // 4, 0, slots % 4])):
        pairs = torch.complex(given[:, :4], given[:, 4:]) * turn
        torch.testing.assert_close(rotated, torch.cat([pairs.real, pairs.imag], dim=-1))
    assert torch.equal(v_cache[slots // 4, 0, slots % 4], qkv[:, 16:])
    assert int((v_cache != 0).any(-1).sum()) == 4
