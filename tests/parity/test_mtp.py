"""A checkpoint's layer that predicts further tokens against transformers' decoder layer."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.build import build_model
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.load_config import LoadConfig
from minisgl_backend.models.mtp import MtpConfig
from minisgl_backend.models.mtp_head import build_mtp_head
from minisgl_backend.weights.formats import QuantizationConfig
from minisgl_backend.weights.sizes import weight_bytes
from tests.mtp_checkpoints import NUM_LAYERS, Reference, save_mtp_checkpoint
from tests.parity.paged_head import PagedHead
from tests.parity.quantized import write_fp8

CPU = torch.device("cpu")
NUM_DRAFTS = 4
PLAIN = LoadConfig(dtype=torch.float32, device=CPU, max_seq_len=64)


@pytest.mark.parametrize(
    ("name", "variant"),
    [("deepseek_v3", None), ("deepseek_v3", "ct-weights-only"), ("glm4_moe", None), ("glm4_moe_lite", None),
     ("minimax_m2", None), ("qwen3_next", None), ("qwen3_5", None)],
)  # fmt: skip
def test_drafts_are_those_of_plain_torch(name: str, variant: str | None, tmp_path: Path) -> None:
    """Latents, in FP8 too; keys and values with norms of each head, and with norms over all of them."""
    folder = plain = save_mtp_checkpoint(name, tmp_path)
    if variant is not None:
        folder, plain = tmp_path / "quantized", tmp_path / "plain"
        write_fp8(tmp_path, variant, folder, plain)
    config = ModelConfig.load(folder)
    model = build_model(config, folder, dataclasses.replace(PLAIN, uses_draft_layer=True))
    head = build_mtp_head(MtpConfig.of(config, config.quantization), folder, PLAIN, model=model)
    reference = Reference(plain)
    token_ids = torch.randint(0, 320, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    states = reference.states(token_ids[:-1])
    expected, logits = reference.drafts(states, token_ids, NUM_DRAFTS)
    drafts, found = PagedHead(head).drafts(states, token_ids, NUM_DRAFTS)
    assert drafts == expected
    assert (found - logits).abs().max() <= 1e-4 * logits.abs().max()
    if variant is not None:
        return
    own = sum(one.nbytes for one in head.parameters())
    whole = weight_bytes(folder, config.tensor_names)
    assert weight_bytes(folder, head.config.tensor_names) == own, "copies of what it shares are not loaded"
    assert whole == sum(one.nbytes for one in model.parameters())


def test_without_the_option_it_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_mtp_checkpoint("deepseek_v3", tmp_path)
    said = "tensors of the checkpoint are of no use for text and left out: model.layers.2."
    config = ModelConfig.load(folder)
    for uses in (True, False):
        assert said not in caplog.text
        with caplog.at_level(logging.WARNING):
            build_model(config, folder, dataclasses.replace(PLAIN, uses_draft_layer=uses))
    assert said in caplog.text


def test_what_has_no_such_layer_is_refused_by_name(tmp_path: Path) -> None:
    folder = save_mtp_checkpoint("deepseek_v3", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    without = ModelConfig.from_dicts({**config, "num_nextn_predict_layers": 0}, {})
    with pytest.raises(ConfigError, match=r"0 num_nextn_predict_layers\); allowed: a checkpoint with such layers"):
        MtpConfig.of(without, QuantizationConfig())
    others = dataclasses.replace(ModelConfig.load(folder), implementation="transformers")
    with pytest.raises(ConfigError, match="allowed with the method mtp: models of the native families"):
        MtpConfig.of(others, QuantizationConfig())
    head = MtpConfig.of(ModelConfig.load(folder), QuantizationConfig())
    tensors = load_file(folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks model.layers.2.eh_proj.weight, .*allowed: a checkpoint with such"):
        head.check_stored({name for name in tensors if not name.startswith(head.prefix)})
    head.check_stored(set(tensors))
    del tensors[f"model.layers.{NUM_LAYERS}.hnorm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model = build_model(ModelConfig.load(folder), folder, PLAIN)
    with pytest.raises(ConfigError, match=r"lacks 1 tensors .*: model.layers.2.hnorm.weight"):
        build_mtp_head(head, folder, PLAIN, model=model)
