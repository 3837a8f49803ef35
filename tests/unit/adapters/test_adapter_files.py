"""What an adapter's folder may say: every variant that would be computed wrongly is refused by its own sentence."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backend.adapters.config import LoraConfig
from minisgl_backend.adapters.tensors import AdapterTensors
from minisgl_backend.errors import ConfigError
from tests.adapter_folders import CONFIG, factors, save_adapter

Q = "model.layers.0.self_attn.q_proj"

REFUSED_KEYS: dict[str, Any] = {
    "peft_type is 'IA3'": {"peft_type": "IA3"},
    "peft_type is 'None'": {"peft_type": None},
    "use_dora is 'True': the adapter also scales the norms": {"use_dora": True},
    "modules_to_save is .*whole modules were trained": {"modules_to_save": ["lm_head"]},
    "fan_in_fan_out is 'True': the base's weights are stored transposed": {"fan_in_fan_out": True},
    "bias is 'all': biases of the base were trained": {"bias": "all"},
    "bias is 'lora_only'": {"bias": "lora_only"},
    "lora_bias is 'True': the adapter's B has biases": {"lora_bias": True},
    "init_lora_weights is 'pissa': the base's weights were changed": {"init_lora_weights": "pissa"},
    "init_lora_weights is 'pissa_niter_16'": {"init_lora_weights": "pissa_niter_16"},
    "init_lora_weights is 'olora'": {"init_lora_weights": "olora"},
    "init_lora_weights is 'corda'": {"init_lora_weights": "corda"},
    "init_lora_weights is 'loftq'": {"init_lora_weights": "loftq"},
    "init_lora_weights is 'lora_ga'": {"init_lora_weights": "lora_ga"},
    "trainable_token_indices is .*embeddings of some tokens": {"trainable_token_indices": [3]},
    "alora_invocation_tokens is .*from these tokens on": {"alora_invocation_tokens": [1, 2]},
    "layer_replication is .*other layers than its base": {"layer_replication": [[0, 4], [2, 5]]},
    "use_qalora is 'True'": {"use_qalora": True},
    "use_bdlora is": {"use_bdlora": {"target_modules_bd_a": []}, "r": 4},
    "kasa_config is": {"kasa_config": {"beta": 1e-4}},
    "monteclora_config is": {"monteclora_config": {"num_samples": 8}},
    "velora_config is": {"velora_config": {"scale": 1}},
    "arrow_config is .*chooses among several adapters": {"arrow_config": {"top_k": 3}},
    "megatron_config is .*Megatron's parallel layers": {"megatron_config": {"a": 1}},
    "target_parameters is .*no linear layers": {"target_parameters": ["mlp.experts.gate_up_proj"]},
    "some_new_key is 'True': an unknown key": {"some_new_key": True},
    "r is '0': not a rank; allowed: 1 to 512": {"r": 0},
    "r is 'True': not a rank": {"r": True},
    "lora_alpha is 'None': not a number": {"lora_alpha": None},
    "lora_alpha is 'nan'": {"lora_alpha": math.nan},
    "rank_pattern.q_proj is '-1': not a rank": {"rank_pattern": {"q_proj": -1}},
    r"alpha_pattern is '\(': not a regular expression": {"alpha_pattern": {"(": 4}},
    r"rank_pattern is '\(a\+\)\+': a pattern that may take long": {"rank_pattern": {"(a+)+": 4}},
    "alpha_pattern is .*a pattern that may take long": {"alpha_pattern": {".*a.*b.*c.*d": 4}},
    "rank_pattern is .*may take long; allowed: modules' names": {"rank_pattern": {".?" * 40 + "!": 4}},
    "rank_pattern is '5000 patterns': too many": {"rank_pattern": {str(number): 4 for number in range(5000)}},
    "use_rslora is 'yes'": {"use_rslora": "yes"},
}
HARMLESS: dict[str, Any] = {
    "base_model_name_or_path": "another/name", "eva_config": {"rho": 2.0}, "init_lora_weights": "eva",
    "layers_to_transform": [0], "target_modules": "all-linear", "lora_dropout": 0.1, "inference_mode": True,
    "exclude_modules": ["k_proj"], "modules_to_save": None, "megatron_core": "megatron.core", "a_key_of_later": None,
    "loftq_config": {}, "ensure_weight_tying": False, "peft_version": "9.9", "qalora_group_size": 16,
}  # fmt: skip

REFUSED_TENSORS: dict[str, dict[str, torch.Tensor]] = {
    "lora_magnitude_vector is magnitudes of DoRA": {f"{Q}.lora_magnitude_vector": torch.ones(6)},
    "bias is a bias of the adapter": {f"{Q}.lora_B.bias": torch.ones(6)},
    "trained embeddings of some tokens": {"model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(1, 8)},
    "a whole module, trained beside the adapter": {"score.modules_to_save.weight": torch.ones(2, 8)},
    "of a mixture's experts": {"model.layers.0.mlp.experts.base_layer.lora_A.weight": torch.ones(4, 8)},
    "of latents' expansion": {"model.layers.0.self_attn.kv_b_proj.lora_A.weight": torch.ones(4, 8)},
    "whole embeddings or a whole output projection": {"model.embed_tokens.weight": torch.ones(9, 8)},
    "lm_head.weight is whole embeddings": {"lm_head.weight": torch.ones(9, 8)},
    "a trained bias of the base": {f"{Q}.bias": torch.ones(6)},
    "neither lora_A.weight nor lora_B.weight": {f"{Q}.hada_w1_a": torch.ones(6)},
    f"{Q} has lora_A and no lora_B": {f"{Q}.lora_A.weight": torch.ones(4, 8)},
    "factors of 4 and 2 axes, as of a convolution": {
        f"{Q}.lora_A.weight": torch.ones(4, 8, 1, 1), f"{Q}.lora_B.weight": torch.ones(6, 4),
    },
    "says rank 4 for it": factors(Q, rank=3),
    "has the number format float8_e4m3fn": {f"{Q}.lora_A.weight": torch.ones(4, 8).to(torch.float8_e4m3fn)},
    "has no tensors": {},
}  # fmt: skip


@pytest.mark.parametrize(("words", "config"), REFUSED_KEYS.items(), ids=REFUSED_KEYS)
def test_a_key_that_changes_what_is_computed_is_refused(words: str, config: dict[str, Any], tmp_path: Path) -> None:
    save_adapter(tmp_path, factors(Q), **config)
    with pytest.raises(ConfigError, match=rf"adapter_config\.json: {words}") as refused:
        AdapterTensors.read(tmp_path)
    assert "; allowed: " in str(refused.value)


def test_keys_about_training_are_not_read(tmp_path: Path) -> None:
    save_adapter(tmp_path, factors(Q), **HARMLESS)
    assert AdapterTensors.read(tmp_path).by_module[Q].scale == 2.0


@pytest.mark.parametrize(("words", "tensors"), REFUSED_TENSORS.items(), ids=REFUSED_TENSORS)
def test_a_tensor_that_is_not_applied_is_refused(words: str, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save_adapter(tmp_path, tensors)
    with pytest.raises(ConfigError, match=words):
        AdapterTensors.read(tmp_path)


SLOW = (
    ".?" * 30 + "!", "a?" * 30 + "a" * 30, ".*.*.*!", ".*.*!", "(a|a)" * 30 + "!", "(a|aa)" * 30, "(a|a|a)(a|a|a)" * 3,
    "(a*)*", "(a|b)*", "(a|b)+", "(a|b){9}", "((a|b))", "[ab]*", "x{2}", r"\w+", ".+", ".*?", r"\d+\d+\d+", r"(\d+|a)",
    "(?=a)", r"(a)\1", "(a|)", ".*a.*b", "(" + "|".join("a" * size for size in range(1, 300)) + ")", "a" * 4097,
)  # fmt: skip
QUICK = {
    "model.layers.0.self_attn.q_proj": True, r"^model\.layers\.0\.self_attn\.q_proj$": True, r".*\.q_proj": True,
    r"layers\.(0|1|10|11)\.self_attn\.(q_proj|k_proj)": True, r"layers.\d+.self_attn.q_proj": True,
    r"layers\.[0-9]+\.(?:self_attn|mlp)\..*": True, "q_proj|k_proj": True, r"layers\.([0-9]+)\..*_proj": True,
    r"layers\.[0-3]\.self_attn\.[qkv]_proj": True, r"model\.layers\.1\d\..*": False, "k_proj": False, ".*attn.*": True,
}  # fmt: skip


@pytest.mark.parametrize("pattern", SLOW, ids=range(len(SLOW)))
def test_a_pattern_that_may_take_long_is_refused(pattern: str, tmp_path: Path) -> None:
    save_adapter(tmp_path, factors(Q), alpha_pattern={pattern: 4})
    with pytest.raises(ConfigError, match=r"alpha_pattern is '.*'?: .*; allowed: .*"):
        LoraConfig.read(tmp_path)


@pytest.mark.parametrize(("pattern", "is_its"), QUICK.items(), ids=QUICK)
def test_patterns_as_adapters_have_them(pattern: str, is_its: bool, tmp_path: Path) -> None:
    save_adapter(tmp_path, factors(Q), rank_pattern={pattern: 16})
    assert LoraConfig.read(tmp_path).rank_of(Q) == (16 if is_its else 4)


@pytest.mark.parametrize("name", ["a." * 256 + "q_proj", "layers." + "1" * 9], ids=["long", "digits"])
def test_a_name_that_patterns_would_search_for_long(name: str, tmp_path: Path) -> None:
    save_adapter(tmp_path, factors(name))
    with pytest.raises(ConfigError, match="is the name of a tensor; allowed: up to 512 printable"):
        AdapterTensors.read(tmp_path)


def test_files_that_are_not_there_or_not_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no adapter_config\.json"):
        AdapterTensors.read(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(ConfigError, match=r"adapter_model\.bin would be unpickled"):
        AdapterTensors.read(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors cannot be read"):
        AdapterTensors.read(tmp_path)


def test_a_file_that_is_overwritten_stays_what_was_read(tmp_path: Path) -> None:
    tensors = factors(Q, 4096, 512)
    file = save_adapter(tmp_path, tensors) / "adapter_model.safetensors"
    read = AdapterTensors.read(tmp_path)
    size = file.stat().st_size
    with file.open("r+b") as stored:  # the same file, as `cp` writes it
        stored.write(bytes(size))
    torch.testing.assert_close(read.by_module[Q].a, tensors[f"{Q}.lora_A.weight"])
    torch.testing.assert_close(read.by_module[Q].b, tensors[f"{Q}.lora_B.weight"])


def test_scales_by_rank_pattern_and_rslora(tmp_path: Path) -> None:
    patterns = {"rank_pattern": {"q_proj": 16}, "alpha_pattern": {r"layers\.1\..*": 32}}
    save_adapter(tmp_path, factors(Q), **patterns)
    config = LoraConfig.read(tmp_path)
    first, second = Q, Q.replace("layers.0", "layers.1")
    assert [config.rank_of(one) for one in (first, "model.layers.0.mlp.up_proj", "my_q_proj")] == [16, 4, 4]
    assert [config.scale_of(one) for one in (first, second, "x.k_proj")] == [0.5, 2.0, 2.0]
    save_adapter(tmp_path, factors(Q), **patterns, use_rslora=True)
    assert LoraConfig.read(tmp_path).scale_of(first) == 2.0
    assert LoraConfig.read(tmp_path).largest_rank == 16


def test_the_digest_is_of_what_is_added(tmp_path: Path) -> None:
    tensors = factors(Q)
    bare = {name.replace(".weight", ".default.weight"): tensor for name, tensor in tensors.items()}
    digests = [
        AdapterTensors.read(save_adapter(tmp_path / str(number), given, **config)).digest
        for number, (given, config) in enumerate(
            [
                (tensors, {}),
                (bare, {"lora_dropout": 0.5}),
                (tensors, {"lora_alpha": 9}),
                ({name: tensor + 1e-6 for name, tensor in tensors.items()}, {}),
                ({name: tensor.half() for name, tensor in tensors.items()}, {}),
            ]
        )
    ]
    assert digests[0] == digests[1]
    assert len({*digests}) == 4
