"""What config.json's quantization_config is read as, and what is refused: each by name, with what is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import FineGrainedFP8Config

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.weights.formats import QuantizationConfig, SchemeRule, WeightScheme
from minisgl_backend.weights.names import SHARED_EXPERTS, Stored, TensorNames
from minisgl_backend.weights.quantization_config import read_quantization_config

NAMES = TensorNames(
    stored=(Stored(name="self_attn.qkv", of=("self_attn.q_proj", "self_attn.k_proj")), *SHARED_EXPERTS),
    prefixes=(("model.language_model.", "model."),),
)
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
FLOAT4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


def group(weights: Any = FLOAT8, activations: Any = TOKEN, *, form: str = "float-quantized", **more: Any) -> Any:
    one = {"targets": ["Linear"], "weights": weights, "input_activations": activations, **more}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": one}}


def read(quantization: Any) -> QuantizationConfig:
    return read_quantization_config(quantization, NAMES)


@pytest.mark.parametrize(
    ("patterns", "plain"),
    [
        (["lm_head"], []),
        (["model.layers.0.self_attn.q_proj"], ["0.self_attn.q_proj"]),
        (["self_attn"], ["0.self_attn.q_proj", "1.self_attn.q_proj"]),
        (["model.layers.0"], ["0.self_attn.q_proj", "0.mlp.experts", "0.mlp.shared_expert.up_proj"]),
        (["model.language_model.layers.1.mlp.experts"], ["1.mlp.experts"]),
        (["model.layers.*.mlp"], ["0.mlp.experts", "0.mlp.shared_expert.up_proj", "1.mlp.experts"]),
        (["model.layers.0.mlp.experts.0.up_proj", "experts.0.gate_proj", "experts.*.down_proj"], ["0.mlp.experts"]),
        (["shared_experts.up_proj", "gate"], ["0.mlp.shared_expert.up_proj"]),
        (["self_attn.qkv"], ["0.self_attn.q_proj", "1.self_attn.q_proj"]),
        (["re:.*layers\\.1\\..*_proj"], ["1.self_attn.q_proj"]),
    ],
)
def test_modules_that_stay_plain(patterns: list[str], plain: list[str]) -> None:
    """By their own names, by those of the checkpoint, and by parts of them; others: `test_module_patterns`."""
    paths = ["0.self_attn.q_proj", "0.mlp.experts", "0.mlp.shared_expert.up_proj", "1.self_attn.q_proj"]
    if any(one.startswith("1.mlp") for one in plain):
        paths.append("1.mlp.experts")
    found = read({"quant_method": "fp8", "modules_to_not_convert": patterns})
    assert [path for path in paths if found.scheme_of(f"model.layers.{path}") is None] == plain


def test_groups_have_their_own_modules() -> None:
    both = group()
    both["config_groups"]["group_0"]["targets"] = ["re:.*self_attn.*"]
    static = {**FLOAT8, "strategy": "tensor"}
    both["config_groups"]["group_1"] = {"targets": ["Linear"], "weights": static, "input_activations": static}
    found = read(both)
    assert "a scale an output" in str(found.scheme_of("model.layers.0.self_attn.q_proj"))
    assert "a scale a tensor" in str(found.scheme_of("model.layers.0.mlp.experts"))
    assert len(found.schemes) == 2
    groups = both["config_groups"]
    swapped = read({**both, "config_groups": {"group_0": groups["group_1"], "group_1": groups["group_0"]}})
    for path in ("self_attn.q_proj", "mlp.experts"):  # what is named more closely counts, whichever group is first
        assert swapped.scheme_of(f"model.layers.0.{path}") == found.scheme_of(f"model.layers.0.{path}")


def test_gptq_has_its_own_exceptions() -> None:
    dynamic = {"-:.*\\.1\\..*": {}, "+:.*q_proj": {"group_size": 32}, ".*v_proj": {"sym": False}}
    found = read({**GPTQ, "dynamic": dynamic})
    schemes = {path: str(found.scheme_of(f"model.layers.{path}")) for path in ("0.q_proj", "0.v_proj", "0.o_proj")}
    assert "groups of 32, symmetric" in schemes["0.q_proj"]
    assert "groups of 128, with zero points" in schemes["0.v_proj"]
    assert "groups of 128, symmetric" in schemes["0.o_proj"]
    assert found.scheme_of("model.layers.1.q_proj") is None
    some = read({**GPTQ, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]})
    assert some.scheme_of("model.layers.0.self_attn.q_proj") is not None
    assert some.scheme_of("model.layers.0.self_attn.o_proj") is None


def test_experts_have_one_format() -> None:
    found = read({**group(), "ignore": ["re:.*down_proj"]})
    with pytest.raises(ConfigError, match="down_proj is plain; allowed: one format for all weights of experts"):
        found.scheme_of("model.layers.0.mlp.experts")


def test_a_quantized_checkpoint_is_not_converted() -> None:
    with pytest.raises(ConfigError, match=r"quantization is 'fp8'; allowed for this checkpoint.*: unset"):
        read(group()).with_option("fp8")
    rule = SchemeRule(WeightScheme("fp8"))
    assert read(None).with_option("fp8").rules == (rule,)


def test_modelopt_has_a_file_of_its_own(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "vocab_size": 320,
              "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    described = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": described}))
    assert len(ModelConfig.load(tmp_path).quantization.schemes) == 1
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(ConfigError, match=r'quant_algo is "NVFP4"; allowed: FP8'):
        ModelConfig.load(tmp_path)


METHOD = r'quant_method is "{}"; allowed: .*compressed-tensors, fp8.*; or weights that are not quantized'
NOT_SERVED: list[tuple[Any, str]] = [
    *(
        ({"quant_method": name, "bits": 4}, METHOD.format(name))
        for name in (
            "bitsandbytes", "exl2", "exl3", "hqq", "aqlm", "quip", "torchao", "quanto", "fbgemm_fp8", "eetq", "vptq",
            "spqr", "higgs", "bitnet", "fp_quant", "quark", "moe_wna16", "ipex", "sinq",
        )
    ),
    ({"bits": 4}, r"quant_method is null; allowed: .*compressed-tensors"),
    ("fp8", "quantization_config is \"fp8\"; allowed: a JSON object"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, r'quant_algo is "NVFP4"; allowed: FP8'),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, r"quant_algo is .*allowed: FP8"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, r"quant_algo is .*allowed: FP8"),
    (group(FLOAT4, FLOAT4, form="nvfp4-pack-quantized"), r"group_0 is .*tensor_group.*allowed: FP8"),
    (group(FLOAT8, {**TOKEN, "num_bits": 4}), r"input_activations.num_bits is 4; allowed: 8"),
    ({**group(), "sparsity_config": {"format": "sparse-24-bitmask"}}, r"sparsity_config.format is .*sparse weights"),
    ({**group(), "transform_config": {"config_groups": {"R1": {}}}}, r"transform_config is .*allowed: absent"),
    ({**group(), "ignore": "lm_head"}, r"ignore is .*a list of strings"),
    (group(output_activations=TOKEN), r"output_activations is .*allowed: null"),
    (group({**FLOAT8, "strategy": "group", "group_size": 32}), r'weights.strategy is "group"; allowed: "tensor"'),
    (group(INT8, {**TOKEN, "type": "int", "strategy": "tensor", "dynamic": False}, form="int-quantized"),
     r"input_activations.dynamic is false; allowed: true"),
    (group(INT8, {**TOKEN, "type": "int", "symmetric": False}, form="int-quantized"),
     r"input_activations.symmetric is false; allowed: true"),
    (group({**FLOAT8, "symmetric": False}), r"weights.symmetric is false; allowed: true"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, r'fmt is "e5m2"; allowed: "e4m3"'),
    ({**AWQ, "version": "gemv"}, r'version is "gemv"; allowed: "gemm"'),
    ({**AWQ, "bits": 8}, r"bits is 8; allowed: 4"),
    ({**AWQ, "zero_point": False}, r"zero_point is false; allowed: true"),
    ({**GPTQ, "bits": 3}, r"bits is 3; allowed: 4"),
    ({**GPTQ, "group_size": 100}, r"group_size is 100; allowed: multiples of 16, or -1"),
    ({**GPTQ, "checkpoint_format": "marlin"}, r'checkpoint_format is "marlin"; allowed: "gptq", "gptq_v2"'),
    ({**GPTQ, "lm_head": True}, r"lm_head is true; allowed: false"),
    ({**GPTQ, "dynamic": {"+:.*up.*": {"bits": 8}}}, r"bits is 8; allowed: 4"),
    ({**GPTQ, "dynamic": {"+:.*up.*": {"rotation": "hadamard"}}}, r'rotation is "hadamard"; allowed: absent'),
    (group(INT4, TOKEN, form="pack-quantized"), r"input_activations is .*allowed: null, with 4-bit weights"),
    (group({**INT4, "num_bits": 8}, None, form="pack-quantized"), r"num_bits is 8; allowed: 4"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\]; allowed: \[outputs"),
    ({"quant_method": "fp8", "new_key": 7}, r"quantization_config.new_key is 7; allowed: absent"),
]  # fmt: skip


@pytest.mark.parametrize(("quantization", "message"), NOT_SERVED)
def test_what_is_not_served_is_refused_by_name(quantization: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(quantization)
    assert len(str(caught.value)) < 700


def test_attention_that_is_quantized_is_refused() -> None:
    quantized = group()
    quantized["config_groups"]["group_0"]["targets"] = ["LlamaAttention"]
    with pytest.raises(ConfigError, match=r'targets is \["LlamaAttention"\]; allowed: Linear, paths'):
        read(quantized)


def test_what_tools_write_by_default_is_served() -> None:
    """transformers' fine-grained FP8; presets of compressed-tensors, with every key that these have."""
    saved = json.loads(json.dumps(FineGrainedFP8Config().to_dict(), default=str))
    assert "blocks of 128 x 128" in str(read({**saved, "quant_method": "fp8"}).schemes[0])
    module = pytest.importorskip("compressed_tensors.quantization", reason="pip install compressed-tensors")
    for preset, form, words in (
        ("FP8", "float-quantized", "with the checkpoint's scale"),
        ("FP8_DYNAMIC", "float-quantized", "FP8 with a scale a token"),
        ("FP8_BLOCK", "float-quantized", "blocks of 128 x 128"),
        ("W8A8", "int-quantized", "INT8"),
        ("W4A16", "pack-quantized", "groups of 128, symmetric"),
        ("W4A16_ASYM", "pack-quantized", "groups of 128, with zero points"),
    ):
        groups = {"group_0": module.preset_name_to_scheme(preset, ["Linear"])}
        config = module.QuantizationConfig(config_groups=groups, format=form, ignore=["lm_head"])
        saved = {**config.model_dump(mode="json"), "quant_method": "compressed-tensors"}
        assert words in str(read(saved).schemes[0])
