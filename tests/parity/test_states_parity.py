"""Models with states: what they keep counts, comes from what is stored in any layout, and splits over ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.choose import load_model_config
from tests.parity.checkpoint_options import VOCAB_SIZE
from tests.parity.checkpoints import save_checkpoint
from tests.parity.paged import PagedModel

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid")
TOKENS = torch.randint(3, VOCAB_SIZE, (70,), generator=torch.Generator().manual_seed(1)).tolist()


def logits(folder: Path) -> torch.Tensor:
    return PagedModel(folder, page_size=16).step({2: TOKENS}, {})[2]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_stale_state_would_show(name: str, tmp_path: Path) -> None:
    """With the states of all earlier tokens zero other logits come, by far more than tolerances."""
    save_checkpoint(name, tmp_path)
    paged = PagedModel(tmp_path, page_size=16)
    paged.step({2: TOKENS[:64]}, {})
    expected = paged.step({2: TOKENS[64:]}, {})[2]
    assert paged.states is not None
    for stack in paged.states.pool.stacks:
        stack.states[:, 3] = 0  # of row 2
    paged.lengths[2], paged.tokens[2] = 64, TOKENS[:64]
    changed = paged.step({2: TOKENS[64:]}, {})[2]
    assert (changed - expected).abs().amax(1).min() > 1e-2 * expected.abs().max()


def test_experts_stored_together(tmp_path: Path) -> None:
    """As released; transformers saves each expert's tensors."""
    save_checkpoint("qwen3_5_moe", tmp_path)
    expected, file = logits(tmp_path), tmp_path / "model.safetensors"
    tensors = load_file(file)
    for layer in range(4):
        mlp = f"model.language_model.layers.{layer}.mlp.experts"

        def stack(kind: str, mlp: str = mlp) -> torch.Tensor:
            return torch.stack([tensors.pop(f"{mlp}.{expert}.{kind}_proj.weight") for expert in range(6)])

        tensors[f"{mlp}.gate_up_proj"] = torch.cat([stack("gate"), stack("up")], dim=1)
        tensors[f"{mlp}.down_proj"] = stack("down")
    save_file(tensors, file, metadata={"format": "pt"})
    assert torch.equal(logits(tmp_path), expected)


def test_names_of_olmo_hybrids_own_files(tmp_path: Path) -> None:
    """Layers with attention have their norms under other names than those that transformers saves."""
    save_checkpoint("olmo_hybrid", tmp_path)
    expected, file = logits(tmp_path), tmp_path / "model.safetensors"
    theirs = "layers.3.feedforward_layer_norm"
    tensors = {name.replace(theirs, "layers.3.post_attention_layernorm"): one for name, one in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    assert torch.equal(logits(tmp_path), expected)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"output_gate_type": "sigmoid"}, "output_gate_type"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"layer_types": ["linear_attention"] * 4}, "no layer has attention"),
        ({"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]}, "layer_types"),
        ({"linear_num_value_heads": 3}, "a multiple of linear_num_key_heads"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers"),
    ],
)
def test_what_is_refused(changes: dict[str, object], said: str, tmp_path: Path) -> None:
    save_checkpoint("qwen3_5", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ConfigError, match=said):
        load_model_config(tmp_path, "native")
