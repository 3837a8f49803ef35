"""Logits of GGUF files whose metadata change numbers, against transformers with the config.json that says the same."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from minisgl_backend.models.folder import find_model_dir
from minisgl_backend.weights.files import Checkpoint
from tests.parity.checkpoints import reference_model
from tests.parity.paged import PagedModel
from tests.tiny_gguf import HIDDEN, VOCAB, sizes, write

TOKENS = [random.Random(number).randrange(VOCAB) for number in range(120)]
MODELS = {
    "gemma2": ("Gemma2ForCausalLM", "gemma2"), "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "llama": ("LlamaForCausalLM", "llama"), "phi3": ("Phi3ForCausalLM", "phi3"), "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}  # fmt: skip
WINDOW = {"attention__sliding_window": 16}
YARN = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 32}
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN_OF_CONFIG = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
TURNS = 8192 / (2 * np.pi * 50000.0 ** (np.arange(0, 32, 2) / 32))
SMOOTH = np.clip((TURNS - 1) / 3, 0, 1)
SHORT, LONG = np.linspace(1, 2, 16), np.linspace(1, 6, 16)
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def tensors(**values: np.ndarray) -> Callable[[gguf.GGUFWriter], None]:
    def change(writer: gguf.GGUFWriter) -> None:
        for name, value in values.items():
            writer.add_tensor(name.replace("__", "."), value.astype(np.float32))

    return change


ROPE_FACTORS = {"rope_factors_short__weight": SHORT, "rope_factors_long__weight": LONG}
BIASES = {
    f"blk__{layer}__attn_{name}__bias": np.linspace(-1, 1, size)
    for layer in range(2)
    for name, size in (("q", 128), ("k", 64), ("v", 64), ("output", HIDDEN))
}
# The file's architecture, values and further tensors; what config.json says in their place. All were also compared with
# llama.cpp itself, but for the two whose keys its loader leaves: yarn_* and Phi 3's window.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, np.ndarray], dict[str, Any]]] = {
    "a factor without a type": (
        "llama", {"rope__scaling__factor": 4.0}, {}, {"rope_scaling": LINEAR},
    ),
    "scale_linear": ("qwen2", {"rope__scale_linear": 4.0}, {}, {"rope_scaling": LINEAR}),
    "type none": ("qwen3", {"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, {}, {}),
    "yarn": ("qwen2", YARN, {}, {"rope_scaling": YARN_OF_CONFIG}),
    "attn_factor": (
        "qwen3", {**YARN, "rope__scaling__attn_factor": 0.7}, {},
        {"rope_scaling": {**YARN_OF_CONFIG, "attention_factor": 0.7 * (0.1 * np.log(4.0) + 1)}},
    ),
    "yarn_*": (
        "llama",
        {
            **YARN, "rope__scaling__yarn_beta_fast": 8.0, "rope__scaling__yarn_beta_slow": 2.0,
            "rope__scaling__yarn_attn_factor": 0.8,
        },
        {},
        {"rope_scaling": {**YARN_OF_CONFIG, "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 0.8}},
    ),
    "rope_freqs": (
        "llama", {}, {"rope_freqs__weight": 1 / ((1 - SMOOTH) / 8 + SMOOTH)}, {"rope_scaling": LLAMA3},
    ),
    "rope_factors": (
        "phi3",
        {**WINDOW, "rope__scaling__original_context_length": 64, "rope__scaling__attn_factor": 1.2},
        ROPE_FACTORS,
        {
            "rope_scaling": {
                "type": "longrope", "short_factor": SHORT.tolist(), "long_factor": LONG.tolist(),
                "attention_factor": 1.2,
            },
            "original_max_position_embeddings": 64, "sliding_window": 16,
        },
    ),
    "part of a head": ("phi3", {"rope__dimension_count": 16}, {}, {"partial_rotary_factor": 0.5, "sliding_window": 64}),
    "window and soft caps": (
        "gemma2", {**WINDOW, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}, {},
        {
            "sliding_window": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "pattern and two ropes": (
        "gemma3",
        {
            **WINDOW, "attention__sliding_window_pattern": [False, True], "rope__freq_base_swa": 1000.0,
            "rope__scaling__type": "linear", "rope__scaling__factor": 4.0, "final_logit_softcapping": 3.0,
        },
        {},
        {
            "sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"],
            "final_logit_softcapping": 3.0, "rope_local_base_freq": 1000.0, "rope_scaling": LINEAR,
        },
    ),
    "no window": (
        "gemma3", {"attention__sliding_window": 0}, {}, {"layer_types": ["full_attention"] * 2, "sliding_window": 64},
    ),
    "no freq_base": ("qwen3", {"rope__freq_base": None}, {}, {"rope_theta": 10000.0}),
    "biases": ("llama", {}, BIASES, {"attention_bias": True}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_equivalent_config(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    architecture, values, more, config = CASES[case]
    file = write(tmp_path / "model.gguf", architecture, plain=True, change=tensors(**more), **values)
    folder = find_model_dir(str(file))
    paged = PagedModel(folder, page_size=16)
    found = torch.cat([paged.step({0: TOKENS[:70]}, {})[0], paged.step({0: TOKENS[70:]}, {})[0]])
    size = sizes(architecture)
    name, model_type = MODELS[architecture]
    plain = {
        "architectures": [name], "model_type": model_type, "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": size["inner"], "num_hidden_layers": 2, "num_attention_heads": size["heads"],
        "num_key_value_heads": size["kv_heads"], "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
        "rope_theta": 50000.0, "tie_word_embeddings": architecture.startswith("gemma"), "torch_dtype": "float32",
        "pad_token_id": 0,
        **({} if architecture in ("phi3", "qwen2") else {"head_dim": size["head"]}),
        **({"query_pre_attn_scalar": size["head"]} if architecture.startswith("gemma") else {}),
    }  # fmt: skip
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference/config.json").write_text(json.dumps({**plain, **config}))
    checkpoint = Checkpoint(folder)
    weights = {name: checkpoint.tensor(name).contiguous() for name in checkpoint.names()}
    save_file(weights, tmp_path / "reference/model.safetensors", metadata={"format": "pt"})
    with torch.inference_mode():
        expected = reference_model(tmp_path / "reference")(torch.tensor([TOKENS])).logits[0].float()
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
