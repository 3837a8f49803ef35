"""Which modules a list means, by the library that wrote it; where that is installed, compared with its own matcher."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from minisgl_backend.errors import ConfigError
from minisgl_backend.weights.formats import QuantizationConfig
from minisgl_backend.weights.names import SHARED_EXPERTS, Stored, TensorNames
from minisgl_backend.weights.quantization_config import read_quantization_config

NAMES = TensorNames(stored=SHARED_EXPERTS, prefixes=(("model.language_model.", "model."),))
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
TOKEN = {**FLOAT8, "strategy": "token", "dynamic": True}
GROUP = {"targets": ["Linear"], "weights": FLOAT8, "input_activations": TOKEN}
# Of each method: what it says beside the list, and the key of the list.
METHODS: dict[str, tuple[dict[str, Any], str]] = {
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": GROUP}},
        "ignore",
    ),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "modules_to_not_convert"),
    "fp8, of older files": ({"quant_method": "fp8", "activation_scheme": "static"}, "ignored_layers"),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, "modules_to_not_convert"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "ignore"),
    "hf_quant_config.json": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "exclude_modules"),
}
ATTENTION, MLP = ("self_attn.q_proj", "self_attn.o_proj"), ("mlp.gate_proj", "mlp.down_proj")
EXPERTS, SHARED = "mlp.experts", "mlp.shared_expert.up_proj"
# Layers 0 and 10 are dense, 1 is a mixture.
PATHS = (
    *(f"{layer}.{path}" for layer in (0, 10) for path in (*ATTENTION, *MLP)),
    *(f"1.{path}" for path in (*ATTENTION, EXPERTS, SHARED)),
)


def left_plain(method: str, patterns: list[str]) -> list[str]:
    said, key = METHODS[method]
    found = read_quantization_config({**said, key: patterns}, NAMES)
    return [path for path in PATHS if found.scheme_of(f"model.layers.{path}") is None]


@pytest.mark.parametrize(
    ("method", "patterns", "plain"),
    [
        # Parents of quantized modules say nothing, wherever they stand.
        ("compressed-tensors", ["lm_head", "model.layers.0.mlp"], ""),
        ("compressed-tensors", ["model.layers.0", "model.layers.1.self_attn", "model", "mlp", "gate_proj"], ""),
        ("compressed-tensors", ["model.layers.1.mlp.experts", "model.layers.1.mlp.experts.0"], ""),
        ("compressed-tensors", ["model.layers.1.mlp.gate", "self_attn.q_proj", "layers.0.mlp.gate_proj"], ""),
        ("compressed-tensors", ["model.layers.0.mlp.gate_proj"], "0.mlp.gate_proj"),
        ("compressed-tensors", ["model.language_model.layers.0.mlp.gate_proj"], "0.mlp.gate_proj"),
        ("compressed-tensors", ["language_model.model.layers.0.mlp.gate_proj"], "0.mlp.gate_proj"),
        ("compressed-tensors", ["model.layers.0.self_attn.qkv_proj"], "0.self_attn.q_proj"),
        ("compressed-tensors", ["model.layers.1.mlp.shared_experts.up_proj"], "1.mlp.shared_expert.up_proj"),
        ("compressed-tensors", [f"model.layers.1.mlp.experts.0.{one}_proj" for one in ("gate", "up", "down")],
         "1.mlp.experts"),
        ("compressed-tensors", ["re:.*mlp\\.experts.*"], "1.mlp.experts"),
        ("compressed-tensors", ["re:.*experts$", "re:mlp", "re:.*up_proj_$"], ""),
        ("compressed-tensors", ["re:model\\.layers\\.1\\."], "1.self_attn.q_proj 1.self_attn.o_proj 1.mlp.experts "
         "1.mlp.shared_expert.up_proj"),
        ("compressed-tensors", ["re:.*gate_proj$"], "0.mlp.gate_proj 10.mlp.gate_proj !"),
        ("compressed-tensors", ["Linear"], " ".join(PATHS)),
        ("compressed-tensors", ["LlamaMLP", "Embedding"], ""),
        # FP8: names, parents, parts of paths, up to dots.
        ("fp8", ["model.layers.1", "lm_head", "mlp.gate", "e_score_correction_bias"], " ".join(PATHS[8:])),
        ("fp8", ["model.layers.0.mlp"], "0.mlp.gate_proj 0.mlp.down_proj"),
        ("fp8", ["gate", "self_attn.o_proj"], "0.self_attn.o_proj 10.self_attn.o_proj 1.self_attn.o_proj"),
        ("fp8", ["model.layers.*.self_attn"], " ".join(one for one in PATHS if "self_attn" in one)),
        ("fp8, of older files", ["model.layers.0.self_attn.q_proj", "lm_head"], "0.self_attn.q_proj"),
        # AWQ: anything in the name. Experts are one module, whose gate_proj is no `gate`.
        ("awq", ["gate"], "0.mlp.gate_proj 10.mlp.gate_proj"),
        ("awq", ["lm_head", "visual", "vision_tower"], ""),
        ("awq", ["model.layers.1."], " ".join(PATHS[8:])),
        ("awq", ["layers.1.mlp.experts"], "1.mlp.experts"),
        ("awq", ["experts.0.gate_proj", "experts.0.up_proj", "experts.0.down_proj"], "1.mlp.experts"),
        ("awq", ["shared_expert"], "1.mlp.shared_expert.up_proj"),
        ("awq", ["attn"], " ".join(one for one in PATHS if "self_attn" in one)),
        # ModelOpt: names and wildcards over whole names; parents as its older files have them.
        ("modelopt", ["lm_head", "model.layers.0.self_attn*"], "0.self_attn.q_proj 0.self_attn.o_proj"),
        ("modelopt", ["model.layers.1", "model.layers.1.*"], " ".join(PATHS[8:])),
        ("modelopt", ["model.layers.1*"], " ".join((*PATHS[4:8], *PATHS[8:]))),
        ("modelopt", ["*.mlp.gate", "layers.*.mlp", "model.layers.?.self_attn.[qk]_proj"],
         "0.self_attn.q_proj 1.self_attn.q_proj"),
        ("modelopt", ["model.language_model.layers.0.mlp*"], "0.mlp.gate_proj 0.mlp.down_proj"),
        ("hf_quant_config.json", ["lm_head", "model.layers.0.mlp.gate"], ""),
        ("hf_quant_config.json", ["model.layers.1.mlp.experts*"], "1.mlp.experts"),
    ],
)  # fmt: skip
def test_lists_mean_what_their_library_means(method: str, patterns: list[str], plain: str) -> None:
    if plain.endswith(" !"):  # of an expert one matrix alone
        with pytest.raises(ConfigError, match=r"gate_proj is plain.*; allowed: one format for all weights of experts"):
            left_plain(method, patterns)
        return
    assert sorted(left_plain(method, patterns)) == sorted(plain.split())


def test_a_module_of_all_experts_is_named_where_the_file_has_one() -> None:
    fused = TensorNames(
        stored=(Stored(name="mlp.experts.gate_up_proj", of=("mlp.experts.gate_proj", "mlp.experts.up_proj")),
                Stored(name="mlp.experts.down_proj", of=("mlp.experts.down_proj",))),
    )  # fmt: skip
    said, key = METHODS["compressed-tensors"]
    found = read_quantization_config({**said, key: ["model.layers.1.mlp.experts"]}, fused)
    assert found.scheme_of("model.layers.1.mlp.experts") is None
    assert found.scheme_of("model.layers.0.mlp.experts") is not None


def _model() -> nn.Module:
    """Modules as transformers names them."""

    def layer() -> nn.Module:
        expert = {f"{kind}_proj": nn.Linear(1, 1) for kind in ("gate", "up", "down")}
        attention = {f"{kind}_proj": nn.Linear(1, 1) for kind in "qkvo"}
        mlp = {"gate": nn.Linear(1, 1), "experts": nn.ModuleList([nn.ModuleDict(expert)])}
        return nn.ModuleDict({"self_attn": nn.ModuleDict(attention), "mlp": nn.ModuleDict(mlp)})

    model = nn.ModuleDict({"layers": nn.ModuleList([layer(), layer()]), "norm": nn.LayerNorm(1)})
    return nn.ModuleDict({"model": model, "lm_head": nn.Linear(1, 1)})


@pytest.mark.parametrize(
    "ignore",
    [
        ["lm_head"],
        ["lm_head", "model.layers.0.mlp"],
        ["model.layers.0.self_attn", "model.layers.1.self_attn.k_proj"],
        ["re:model\\.layers\\.1.*", "layers.0.self_attn.q_proj"],
        ["re:.*self_attn.*", "re:self_attn", "Linear_"],
        ["re:.*mlp\\.experts\\..*", "model.layers.0.mlp.gate"],
        ["model.layers.1.mlp.experts", "model.layers.1.mlp.experts.0"],
        ["Linear"],
        ["LayerNorm", "ModuleDict"],
    ],
)
def test_compressed_tensors_matches_the_same_modules(ignore: list[str]) -> None:
    match = pytest.importorskip("compressed_tensors.utils.match", reason="pip install compressed-tensors")
    with torch.device("meta"):
        model = _model()
    quantized = {name for name, _ in match.match_named_modules(model, ["Linear"], ignore)}
    found = read_quantization_config({**METHODS["compressed-tensors"][0], "ignore": ignore}, NAMES)
    for layer in range(2):
        for kind in "qkvo":
            name = f"model.layers.{layer}.self_attn.{kind}_proj"
            assert (found.scheme_of(name) is not None) == (name in quantized), name
        experts = f"model.layers.{layer}.mlp.experts"
        assert (found.scheme_of(experts) is not None) == (f"{experts}.0.up_proj" in quantized)


def _with_targets(*targets: list[str]) -> QuantizationConfig:
    weights = ({**FLOAT8, "strategy": "tensor"}, FLOAT8, {**FLOAT8, "strategy": "block", "block_structure": [128, 128]})
    groups = {
        f"group_{index}": {"targets": one, "weights": of, "input_activations": None, "output_activations": None}
        for index, (one, of) in enumerate(zip(targets, weights, strict=False))
    }
    said = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    return read_quantization_config(said, NAMES)


def test_targets_are_whole_names_too() -> None:
    found = _with_targets(["Linear"], ["re:.*layers\\.1\\..*"], ["model.layers.1.mlp.down_proj", "model.layers.0"])
    grain = {
        path: str(found.scheme_of(f"model.layers.{path}"))
        for path in ("0.mlp.down_proj", "1.mlp.gate_proj", "1.mlp.down_proj")
    }
    assert "a scale a tensor" in grain["0.mlp.down_proj"]
    assert "a scale an output" in grain["1.mlp.gate_proj"]
    assert "blocks of 128 x 128" in grain["1.mlp.down_proj"]


def test_groups_that_quantize_nothing_leave_modules_plain() -> None:
    empty = {"weights": None, "input_activations": None, "output_activations": None}
    for targets in (["re:.*self_attn.*"], ["LlamaAttention"]):
        said = {**METHODS["compressed-tensors"][0], "ignore": []}
        said["config_groups"] = {"group_0": GROUP, "group_1": {"targets": targets, **empty}}
        found = read_quantization_config(said, NAMES)
        assert (found.scheme_of("model.layers.0.self_attn.q_proj") is None) == (targets != ["LlamaAttention"])
        assert found.scheme_of("model.layers.0.mlp.up_proj") is not None
