"""quantization_config as today's tools write it: what only tells how a file was made changes nothing; what changes
numbers is read, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl_backend.errors import ConfigError
from minisgl_backend.weights.formats import QuantizationConfig
from minisgl_backend.weights.names import TensorNames
from minisgl_backend.weights.quantization_config import read_quantization_config
from minisgl_backend.weights.schemes.arguments import QuantizationArgs
from minisgl_backend.weights.schemes.how_made import HOW_IT_WAS_MADE, NUMBERS_CHANGE
from minisgl_backend.weights.schemes.keys import SchemeKeys

NAMES = TensorNames(prefixes=(("model.language_model.", "model."),))
GPTQ_WORDS = "4-bit weights (gptq), groups of 128, symmetric; activations as they are"
AWQ_WORDS = "4-bit weights (awq), groups of 128, with zero points; activations as they are"
PACKED_WORDS = "4-bit weights (pack-quantized), groups of 128, symmetric; activations as they are"

# GPTQModel 7.3, gptqmodel/quantization/config.py: BaseQuantizeConfig.to_dict, meta of models/writer.py.
GPTQMODEL_META = {
    "quantizer": ["gptqmodel:7.3.4"], "uri": "https://github.com/modelcloud/gptqmodel", "damp_percent": 0.05,
    "damp_auto_increment": 0.01, "static_groups": False, "true_sequential": True, "mse": 0.0, "gptaq": None,
    "act_group_aware": True, "fallback": {"strategy": "rtn", "threshold": "0.5%", "smooth": {"type": "mad", "k": 2.75}},
    "offload_to_disk": True, "offload_to_disk_path": "./gptqmodel_offload/abc/", "pack_impl": "cpu",
    "gc_mode": "interval", "wait_for_submodule_finalizers": False, "auto_forward_data_parallel": True,
    "dense_vram_strategy": "exclusive", "dense_vram_strategy_devices": None, "moe_vram_strategy": "exclusive",
    "moe_vram_strategy_devices": None, "mock_quantization": False,
    "hessian": {"chunk_size": None, "chunk_bytes": None, "staging_dtype": "float32"},
}  # fmt: skip
GPTQMODEL = {
    "bits": 4, "group_size": 128, "desc_act": False, "lm_head": False, "method": "gptq", "quant_method": "gptq",
    "format": "gptq", "checkpoint_format": "gptq", "pack_dtype": "int32", "meta": GPTQMODEL_META, "sym": True,
}  # fmt: skip
GPTQMODEL_AWQ = {
    "bits": 4, "group_size": 128, "desc_act": False, "lm_head": False, "method": "awq", "quant_method": "awq",
    "format": "gemm", "checkpoint_format": "gemm", "pack_dtype": "int32", "meta": GPTQMODEL_META, "zero_point": True,
    "version": "gemm",
}  # fmt: skip
# GPTQModel 5.6.12, as an issue of it has the file: https://github.com/ModelCloud/GPTQModel/issues
GPTQMODEL_5_AWQ = {
    "bits": 4, "group_size": 128, "desc_act": True, "sym": False, "quant_method": "awq", "checkpoint_format": "gemm",
    "pack_dtype": "int32", "zero_point": True, "version": "gemm", "format": "gemm",
}  # fmt: skip
# AutoRound 0.16: SerializedCompressorConfig after filter_quantization_config; export_to_autogptq, export_to_awq and
# export_to_autoround.
AUTO_ROUND = {
    "bits": 4, "data_type": "int", "group_size": 128, "sym": True, "iters": 1000, "nsamples": 512, "lr": 0.002,
    "minmax_lr": 0.002, "batch_size": 4, "seqlen": 4096, "gradient_accumulate_steps": 2, "low_gpu_mem_usage": True,
    "enable_quanted_input": False, "static_attention_granularity": "tensor", "static_kv_granularity": "tensor",
    "to_quant_block_names": "model.layers", "autoround_version": "0.16.1",
}  # fmt: skip
AUTO_ROUND_GPTQ = {
    **AUTO_ROUND, "lm_head": False, "provider": "auto-round", "quant_method": "gptq", "desc_act": False,
    "true_sequential": False, "damp_percent": 0.01,
    "dynamic": {"-:.*model\\.layers\\.0\\.mlp\\.down_proj.*": {}, "+:.*layers\\.1\\..*": {"bits": 4, "group_size": 32,
                                                                                        "sym": False}},
}  # fmt: skip
AUTO_ROUND_AWQ = {
    **AUTO_ROUND, "provider": "auto-round", "quant_method": "awq", "zero_point": False, "version": "gemm",
    "modules_to_not_convert": ["lm_head"],
}  # fmt: skip
# AutoRound 0.12 to 0.14, quantization_config.json of models that were quantized with them.
AUTO_ROUND_OWN = {
    "bits": 4, "data_type": "int", "group_size": 128, "sym": True, "iters": 0, "low_gpu_mem_usage": True,
    "autoround_version": "0.12.2", "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq",
}  # fmt: skip
AUTO_ROUND_EARLY = {
    **{key: value for key, value in AUTO_ROUND_OWN.items() if key != "packing_format"},
    "backend": "auto_round:gptq:exllamav2", "scale_dtype": "torch.float16",
}  # fmt: skip
# AutoGPTQ 0.7: BaseQuantizeConfig.to_dict.
AUTO_GPTQ = {
    "bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": False, "static_groups": False, "sym": True,
    "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model", "quant_method": "gptq",
    "checkpoint_format": "gptq", "is_marlin_format": False,
}  # fmt: skip
# transformers 5.24: GPTQConfig.to_dict; optimum 2.3 adds its version to meta.
TRANSFORMERS_GPTQ = {
    "quant_method": "gptq", "bits": 4, "tokenizer": None, "dataset": ["a text"], "group_size": 128,
    "damp_percent": 0.1, "desc_act": False, "act_group_aware": True, "sym": True, "true_sequential": True,
    "format": "gptq", "meta": {"quantizer": ["optimum:2.3.0", "gptqmodel:7.3.4"]}, "backend": "auto",
    "model_seqlen": None, "block_name_to_quantize": None, "module_name_preceding_first_block": None, "batch_size": 1,
    "pad_token_id": None, "max_input_length": None, "cache_block_outputs": True, "modules_in_block_to_quantize": None,
    "use_cuda_fp16": False, "use_exllama": True, "exllama_config": {"version": 1},
}  # fmt: skip
# AutoAWQ 0.2.9: AwqConfig.to_transformers_dict; transformers 4 and 5 save more.
AUTO_AWQ = {
    "quant_method": "awq", "zero_point": True, "group_size": 128, "bits": 4, "version": "gemm",
    "modules_to_not_convert": None,
}  # fmt: skip
TRANSFORMERS_AWQ = {
    **AUTO_AWQ, "backend": "autoawq", "do_fuse": False, "exllama_config": None, "fuse_max_seq_len": None,
    "modules_to_fuse": None,
}  # fmt: skip
TRANSFORMERS_5_AWQ = {
    "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "desc_act": False, "sym": False,
    "backend": "auto", "format": "gemm", "version": "gemm", "modules_to_not_convert": ["lm_head"],
    "true_sequential": True, "damp_percent": 0.1, "meta": None,
}  # fmt: skip
# compressed-tensors 0.10 to 0.20 in llm-compressor: ModelCompressor.update_config.
WEIGHTS_4: dict[str, Any] = {
    "actorder": "weight", "block_structure": None, "dynamic": False, "group_size": 128, "num_bits": 4,
    "observer": "memoryless_minmax", "observer_kwargs": {}, "scale_dtype": None, "strategy": "group",
    "symmetric": True, "type": "int", "zp_dtype": None,
}  # fmt: skip


def compressed(weights: Any, form: str = "pack-quantized", activations: Any = None, **more: Any) -> dict[str, Any]:
    group = {
        "format": form, "input_activations": activations, "output_activations": None, "targets": ["Linear"],
        "weights": weights,
    }  # fmt: skip
    return {
        "config_groups": {"group_0": group}, "format": form, "global_compression_ratio": None, "ignore": ["lm_head"],
        "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed",
        "sparsity_config": {}, "transform_config": {}, "version": "0.12.3.a20251114", **more,
    }  # fmt: skip


def read(said: Any) -> QuantizationConfig:
    return read_quantization_config(said, NAMES)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (GPTQMODEL, GPTQ_WORDS),
        ({**GPTQMODEL, "format": "gptq_v2", "checkpoint_format": "gptq_v2", "bits": "4"}, GPTQ_WORDS),
        (GPTQMODEL_AWQ, AWQ_WORDS),
        ({**GPTQMODEL_AWQ, "zero_point": False}, AWQ_WORDS),
        (GPTQMODEL_5_AWQ, AWQ_WORDS),
        (AUTO_ROUND_GPTQ, GPTQ_WORDS),
        (AUTO_ROUND_AWQ, AWQ_WORDS),
        ({**AUTO_ROUND_AWQ, "sym": False, "zero_point": True}, AWQ_WORDS),
        (AUTO_ROUND_OWN, GPTQ_WORDS),
        ({**AUTO_ROUND_OWN, "packing_format": "auto_round:auto_awq", "quant_method": "intel/auto-round"}, AWQ_WORDS),
        # AutoRound 0.4, before it had packing_format; saved again by transformers, whose class has this default.
        ({**AUTO_ROUND_EARLY, "quant_method": "intel/auto-round"}, GPTQ_WORDS),
        ({**AUTO_ROUND_OWN, "packing_format": "auto_round:gptq", "backend": "auto"}, GPTQ_WORDS),
        (AUTO_GPTQ, GPTQ_WORDS),
        (TRANSFORMERS_GPTQ, GPTQ_WORDS),
        (AUTO_AWQ, AWQ_WORDS),
        ({"quant_method": "AWQ", "zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}, AWQ_WORDS),
        (TRANSFORMERS_AWQ, AWQ_WORDS),
        (TRANSFORMERS_5_AWQ, AWQ_WORDS),
        (compressed(WEIGHTS_4), PACKED_WORDS),
        (compressed({**WEIGHTS_4, "strategy": "GROUP", "type": "INT", "num_bits": "4"}), PACKED_WORDS),
        (compressed({**WEIGHTS_4, "strategy": None}), PACKED_WORDS),
        (compressed({**WEIGHTS_4, "strategy": None, "group_size": -1}), "(pack-quantized), one group an output"),
        (compressed(WEIGHTS_4, provider="auto-round"), PACKED_WORDS),
        (compressed(WEIGHTS_4, transform_config={"config_groups": {}}), PACKED_WORDS),
        ({"quantization_config": compressed(WEIGHTS_4), "sparsity_config": {}, "quant_method": "compressed-tensors",
          "run_compressed": True}, PACKED_WORDS),
        (compressed(WEIGHTS_4, quant_method="compressed_tensors"), PACKED_WORDS),
        # ModelOpt 0.47: convert_hf_quant_config_format; a file around it; without the method, as older ones.
        ({"config_groups": {"group_0": {"input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
                                        "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
                                        "targets": ["Linear"]}},
          "ignore": ["lm_head"], "quant_algo": "FP8", "kv_cache_scheme": {"dynamic": False, "num_bits": 8,
                                                                         "type": "float"},
          "producer": {"name": "modelopt", "version": "0.29.0"}, "quant_method": "modelopt"}, "FP8 weights, a scale a"),
        ({"producer": {"name": "modelopt", "version": "0.19.0"}, "quant_method": "modelopt",
          "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}, "FP8"),
        ({"quant_algo": "FP8", "exclude_modules": ["lm_head"]}, "FP8 weights, a scale a tensor"),
        # The keys of DeepSeek-V3.1, Qwen3-FP8 and Devstral-2 (tests/released), and of AutoFP8; letters of either case.
        ({"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
          "weight_block_size": [128, 128]}, "blocks of 128 x 128"),
        ({"activation_scheme": "DYNAMIC", "modules_to_not_convert": ["lm_head"], "quant_method": "fp8",
          "weight_block_size": [128, 128]}, "blocks of 128 x 128"),
        ({"activation_scheme": "static", "dequantize": False, "modules_to_not_convert": ["lm_head"],
          "quant_method": "fp8", "weight_block_size": None}, "the checkpoint's scale"),
        ({"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8",
          "kv_cache_scheme": "static"}, "the checkpoint's scale"),
        (compressed({**WEIGHTS_4, "type": "float", "num_bits": 8, "strategy": "block", "block_structure": "128x128",
                     "group_size": None}, "float-quantized"), "blocks of 128 x 128"),
    ],
)  # fmt: skip
def test_what_tools_write_is_served(said: dict[str, Any], words: str) -> None:
    assert any(words in str(scheme) for scheme in read(said).schemes)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({**GPTQMODEL, "rotation": "hadamard"}, r'rotation is "hadamard"; allowed: absent: inputs are rotated'),
        ({**GPTQMODEL, "pack_dtype": "int16"}, r'pack_dtype is "int16"; allowed: "int32", absent: numbers are packed'),
        ({**GPTQMODEL, "method": "qqq"}, r'method is "qqq"; allowed: what quant_method is, gptq'),
        ({**GPTQMODEL, "format": "gptq_v2"}, r'checkpoint_format is "gptq"; allowed: what format is, "gptq_v2"'),
        ({**GPTQMODEL, "format": "gptq_p"}, r'format is "gptq_p"; allowed: "gptq", "gptq_v2"'),
        ({**GPTQMODEL, "adapter": {"name": "lora", "rank": 64}}, r"adapter is .*: an adapter is added"),
        ({**GPTQMODEL, "lm_head": True}, r"lm_head is true; allowed: false"),
        ({**GPTQMODEL, "tensor_storage": {"lm_head": {"quant_format": "exl3"}}}, r"tensor_storage is "),
        ({**GPTQMODEL, "a_new_key": 1}, r"a_new_key is 1; allowed: absent: this engine does not know what it changes"),
        ({**GPTQMODEL_AWQ, "checkpoint_format": "gemv_fast"}, r'checkpoint_format is "gemv_fast"; allowed: "gemm"'),
        ({**GPTQMODEL_AWQ, "input_activations": {"dtype": "float8_e4m3fn"}}, r"input_activations is .*activations are"),
        ({**TRANSFORMERS_AWQ, "backend": "llm-awq"}, r'backend is "llm-awq"; allowed: "autoawq"'),
        ({**AUTO_AWQ, "zero_point": False}, r"zero_point is false; allowed: true"),
        ({**AUTO_ROUND_GPTQ, "data_type": "mx_fp"}, r'data_type is "mx_fp"; allowed: "int", absent: numbers are of'),
        ({**AUTO_ROUND_GPTQ, "act_bits": 8}, r"act_bits is 8; allowed: 16, 32, absent: activations are quantized"),
        ({**AUTO_ROUND_GPTQ, "super_bits": 6}, r"super_bits is 6; allowed: absent: scales are quantized"),
        ({**AUTO_ROUND_AWQ, "bits": 2}, r"bits is 2; allowed: 4"),
        ({**AUTO_ROUND_AWQ, "static_attention_dtype": "fp8"}, r"static_attention_dtype is .*queries, keys and values"),
        ({**AUTO_ROUND_AWQ, "extra_config": {"a": {"bits": 16}}}, r"extra_config is .*modules have formats"),
        ({**AUTO_ROUND_OWN, "packing_format": "auto_round:llm_compressor"}, r'packing_format is .*"auto_round:auto_gp'),
        ({**AUTO_ROUND_EARLY, "backend": "auto_round:awq:gemm"}, r"packing_format is null; .*beside backend"),
        ({**AUTO_ROUND_OWN, "rotation_config": {"hadamard_type": "hadamard"}}, r"rotation_config is .*rotated"),
        ({**AUTO_ROUND_OWN, "extra_config": {"lm_head": {"bits": 8}}}, r"bits is 8; allowed: 4"),
        (compressed(WEIGHTS_4, transform_config={"config_groups": {"R1": {}}}), r"transform_config is .*rotated"),
        (compressed(WEIGHTS_4, moe_sparsity_config={"method": "prune"}), r"moe_sparsity_config is .*experts are left"),
        (compressed(WEIGHTS_4, attention_input_activations={"num_bits": 8}), r"attention_input_activations is "),
        (compressed(WEIGHTS_4, fp8_dtype_flavor="gaudi2"), r"fp8_dtype_flavor is .*another range"),
        (compressed({**WEIGHTS_4, "group_size": None, "strategy": None}), r"strategy is null; allowed: \"group\""),
        (compressed({**WEIGHTS_4, "group_size": 0}), r"group_size is 0; allowed: multiples of 16"),
        (compressed({**WEIGHTS_4, "dynamic": "local"}), r'dynamic is "local"; allowed: false'),
        (compressed({**WEIGHTS_4, "actorder": "by_size"}), r'actorder is "by_size"; allowed: "weight"'),
        (compressed({**WEIGHTS_4, "a_new_key": True}), r"group_0.weights.a_new_key is true"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "config_groups": {}, "pre_quant_scale": True},
         r"pre_quant_scale is true; .*scaled before each layer"),
        # GPTQModel 7.3: FP8Config, whose activations are in 16 bits.
        ({"bits": 8, "quant_method": "fp8", "weight_scale_method": "row"}, r"bits is 8"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, r"quant_method is null; allowed: .*gptq"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, r'quant_method is "bitsandbytes"; allowed: '),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, r'quant_method is "fbgemm_fp8"; allowed: '),
        ({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [128, 128]}, "activation_scheme"),
    ],
)  # fmt: skip
def test_what_changes_numbers_is_refused_by_name(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(said)


@pytest.mark.parametrize("said", [GPTQMODEL, GPTQMODEL_AWQ, AUTO_ROUND_AWQ, compressed(WEIGHTS_4)])
def test_what_tells_how_is_the_same_for_all_methods(said: dict[str, Any]) -> None:
    plain = read(said)
    for key in HOW_IT_WAS_MADE.difference(said):
        assert read({**said, key: "anything"}) == plain, key
    assert HOW_IT_WAS_MADE.isdisjoint(NUMBERS_CHANGE)


def test_modules_with_formats_of_their_own() -> None:
    found = read(AUTO_ROUND_GPTQ)
    assert found.scheme_of("model.layers.0.mlp.down_proj") is None
    assert "groups of 32, with zero points" in str(found.scheme_of("model.layers.1.mlp.down_proj"))
    assert GPTQ_WORDS in str(found.scheme_of("model.layers.2.mlp.down_proj"))
    plain, other = {"bits": 16, "data_type": "float"}, {"group_size": 32}
    extra = {".*shared_expert.*": plain, "model.language_model.layers.1.mlp.up_proj": other, "lm_head": plain}
    for blocks in ("model.language_model.layers,model.visual", ["model.layers"], None):
        found = read({**AUTO_ROUND_OWN, "extra_config": extra, "block_name_to_quantize": blocks})
        assert found.scheme_of("model.layers.0.mlp.shared_expert.up_proj") is None
        assert "groups of 32" in str(found.scheme_of("model.layers.1.mlp.up_proj"))
        assert GPTQ_WORDS in str(found.scheme_of("model.layers.11.mlp.up_proj"))
    found = read({**GPTQMODEL_AWQ, "dynamic": {"-:.*\\.0\\..*": {}, "+:^model\\.layers\\.1\\..*": {"group_size": 64}}})
    assert found.scheme_of("model.layers.0.mlp.down_proj") is None
    assert "(awq), groups of 64" in str(found.scheme_of("model.layers.1.mlp.down_proj"))
    found = read({**AUTO_ROUND_OWN, "block_name_to_quantize": "model.layers.0."})
    assert found.scheme_of("model.layers.1.mlp.up_proj") is None


@pytest.mark.parametrize(
    "named",
    [
        [["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"], ["mlp.experts.0.up_proj", "experts.0.gate_proj"],
         ["mlp.experts.0.down_proj"]],
        ["self_attn.q_proj", "gate_proj", "up_proj", "down_proj"],
        ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp"],
    ],
)  # fmt: skip
def test_gptq_names_what_it_quantized_in_lists_of_any_depth(named: Any) -> None:
    found = read({**AUTO_GPTQ, "modules_in_block_to_quantize": named})
    assert found.scheme_of("model.layers.0.self_attn.q_proj") is not None
    assert found.scheme_of("model.layers.0.mlp.experts") is not None
    assert found.scheme_of("model.layers.0.self_attn.o_proj") is None
    with pytest.raises(ConfigError, match=r"modules_in_block_to_quantize is 3; allowed: names of modules"):
        read({**AUTO_GPTQ, "modules_in_block_to_quantize": 3})


@pytest.mark.parametrize(
    ("order", "reorders"),
    [("weight", False), ("static", False), ("GROUP", True), ("dynamic", True), (True, True), (False, False),
     (None, False)],
)  # fmt: skip
def test_orders_of_inputs_have_many_names(order: Any, reorders: bool) -> None:
    assert ("in another order" in str(read(compressed({**WEIGHTS_4, "actorder": order})).schemes[0])) == reorders


FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.mark.parametrize(
    ("said", "key"),
    [
        (compressed(WEIGHTS_4, kv_cache_scheme={**FLOAT8, "strategy": "attn_head"}), "kv_cache_scheme"),
        (compressed(WEIGHTS_4, kv_cache_scheme={**FLOAT8, "type": "int"}), "kv_cache_scheme"),
        (compressed(WEIGHTS_4, kv_cache_scheme={**FLOAT8, "num_bits": 4}), "kv_cache_scheme"),
        (compressed(WEIGHTS_4, kv_cache_scheme={**FLOAT8, "dynamic": True}), "kv_cache_scheme"),
        (compressed(WEIGHTS_4, config_groups={}, kv_cache_scheme={**FLOAT8, "symmetric": False}), "kv_cache_scheme"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo"),
        ({"quant_method": "modelopt", "kv_cache_scheme": "INT8", "ignore": []}, "kv_cache_scheme"),
        ({**AUTO_ROUND_OWN, "static_kv_dtype": "fp8", "static_kv_granularity": "head"}, "static_kv_granularity"),
    ],
)
def test_scales_of_another_cache_refuse_no_weights(said: dict[str, Any], key: str) -> None:
    assert f"{key} is" in str(read(said).cache_refusal)
    assert "one scale a tensor" in str(read(said).cache_refusal)


@pytest.mark.parametrize(
    "said",
    [
        compressed(WEIGHTS_4, kv_cache_scheme=FLOAT8),
        compressed(WEIGHTS_4, kv_cache_scheme={**FLOAT8, "strategy": "TENSOR", "type": "FLOAT"}),
        compressed(WEIGHTS_4, config_groups={}, kv_cache_scheme=FLOAT8),
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8", "exclude_modules": []},
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "fp8"},
        {"quant_method": "modelopt", "ignore": ["lm_head"], "kv_cache_scheme": {"num_bits": 8, "type": "float"},
         "producer": {"name": "modelopt", "version": "0.47.0"}},
        {**AUTO_ROUND_OWN, "static_kv_dtype": "float8_e4m3fn"},
    ],
)  # fmt: skip
def test_scales_of_an_fp8_cache_are_taken(said: dict[str, Any]) -> None:
    assert read(said).cache_refusal is None
    if said["quant_method"] == "modelopt" and not said.get("quant_algo"):
        assert read(said).schemes == ()


@pytest.mark.parametrize(
    "said",
    [
        {"num_bits": 4},
        {"num_bits": "4", "group_size": 128},
        {"num_bits": 4, "group_size": -1},
        {"num_bits": 8, "type": "FLOAT", "strategy": "Channel"},
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128x64"},
        {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": False, "actorder": "static"},
        {"type": "float", "strategy": "token", "dynamic": True},
        {"type": "float", "strategy": "attn_head"},
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
        {"group_size": 0},
        {"dynamic": "sometimes"},
        {"strategy": "column"},
        {"type": "bool"},
    ],
)
def test_compressed_tensors_derives_the_same(said: dict[str, Any]) -> None:
    module = pytest.importorskip("compressed_tensors.quantization", reason="pip install compressed-tensors")
    try:
        expected = module.QuantizationArgs.model_validate(said)
    except ValueError:
        with pytest.raises(ConfigError):
            read(compressed(said))
        return
    found = QuantizationArgs.read(SchemeKeys({"weights": said}), "weights")
    assert found is not None
    for name in ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic"):
        assert getattr(found, name) == getattr(expected, name), name
    if expected.block_structure is not None:
        assert list(found.block_structure()) == expected.block_structure
