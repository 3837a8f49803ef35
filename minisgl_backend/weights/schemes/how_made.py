"""Keys of a quantized checkpoint's config that no reader of its method reads: which of them change nothing that is
computed, and which do. One table for all methods, since tools write each other's formats.

Sources, each read as its current release writes: GPTQModel 7.3 (BaseQuantizeConfig and its methods' to_dict), AutoGPTQ
0.7 and 0.8 (BaseQuantizeConfig), optimum 2.3 (GPTQQuantizer.serialization_keys), transformers 5.24 (GPTQConfig,
AwqConfig, FineGrainedFP8Config, CompressedTensorsConfig), AutoAWQ 0.2.9 (AwqConfig), AutoRound 0.16
(SerializedCompressorConfig and its exports; of older ones QuantizationScheme), AutoFP8, ModelOpt 0.47
(convert_hf_quant_config_format), compressed-tensors 0.20 (QuantizationConfig, QuantizationArgs).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_CALIBRATION = (
    "amp", "batch_size", "cache_block_outputs", "calibration_data_device", "dataset", "enable_minmax_tuning",
    "enable_norm_bias_tuning", "enable_quanted_input", "enable_torch_compile", "gradient_accumulate_steps", "iters",
    "low_cpu_mem_usage", "low_gpu_mem_usage", "lr", "lr_scheduler", "max_input_length", "minmax_lr", "model_seqlen",
    "momentum", "n_samples", "not_use_best_mse", "nblocks", "nsamples", "optimizer", "pad_token_id", "sampler", "seed",
    "seqlen", "tokenizer", "train_bs",
)  # fmt: skip
_ALGORITHM = (  # how numbers were found; they are in the file
    "act_group_aware", "damp_auto_increment", "damp_percent", "disable_opt_rtn", "dynamic_max_gap", "enable_alg_ext",
    "enable_full_range", "enable_imatrix", "fallback", "foem", "gptaq", "hessian", "mock_quantization", "model_free",
    "mse", "observer", "observer_kwargs", "preprocessors", "scale_dtype", "scale_search_chunked_activations", "smooth",
    "smoother", "static_groups", "true_sequential", "v2", "v2_alpha", "zp_dtype",
)  # fmt: skip
_WHERE_IT_RAN = (
    "auto_forward_data_parallel", "compute_device_filter", "dense_vram_strategy", "dense_vram_strategy_devices",
    "device", "device_map", "gc_mode", "hf_device_map", "moe", "moe_vram_strategy", "moe_vram_strategy_devices",
    "offload_to_disk", "offload_to_disk_path", "pack_impl", "parallel_packing", "vram_strategy",
    "wait_for_submodule_finalizers",
)  # fmt: skip
_WHOSE_IT_IS = (
    "autoround_version", "global_compression_ratio", "kv_cache_quantized_layers", "meta", "model_file_base_name",
    "model_name_or_path", "producer", "provider", "quantization_status", "quantizer",
)  # fmt: skip
_WHAT_WAS_VISITED = (  # which modules stay plain is in other keys
    "block_name_to_quantize", "module_name_preceding_first_block", "multimodal", "quant_block_list",
    "quant_nontext_module", "supported_types", "to_quant_block_names",
)  # fmt: skip
_HOW_ANOTHER_ENGINE_RUNS_IT = (
    "dequantize", "disable_exllama", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse",
    "run_compressed", "sglang_backend", "use_cuda_fp16", "use_exllama", "use_optimized_inference", "use_triton",
    "vllm_backend",
)  # fmt: skip
_OF_WHAT_IS_OFF = (  # details of what other keys, which are in NUMBERS_CHANGE, switch on
    "act_data_type", "act_dynamic", "act_group_size", "act_sym", "static_attention_granularity",
    "static_kv_granularity",
)  # fmt: skip

HOW_IT_WAS_MADE = frozenset(
    (
        *_CALIBRATION, *_ALGORITHM, *_WHERE_IT_RAN, *_WHOSE_IT_IS, *_WHAT_WAS_VISITED, *_HOW_ANOTHER_ENGINE_RUNS_IT,
        *_OF_WHAT_IS_OFF,
    )
)  # fmt: skip


# Key -> (values with which it changes nothing, what it does with others). null, false, "" and empty lists and objects
# change nothing either.
NUMBERS_CHANGE: Mapping[str, tuple[tuple[object, ...], str]] = MappingProxyType(
    {
        "act_bits": ((16, 32), "activations are quantized"),
        "activation_scale_ub": ((), "activations are cut before they are quantized"),
        "adapter": ((), "an adapter is added to each layer"),
        "attention_input_activations": ((), "queries, keys and values are quantized"),
        "data_type": (("int",), "numbers are of another type"),
        "extra_config": ((), "modules have formats of their own"),
        "fp8_dtype_flavor": ((), "FP8 numbers have another range"),
        "has_zero_point": ((), "weights have zero points"),
        "input_activations": ((), "activations are quantized"),
        "linear_fp8_config": ((), "linear layers have a format of their own"),
        "lm_head": ((), "the LM head is quantized"),
        "lora_rank": ((), "an adapter is added to each layer"),
        "moe_sparsity_config": ((), "experts are left out"),
        "pack_dtype": (("int32",), "numbers are packed in words of another size"),
        "pre_quant_scale": ((), "inputs are scaled before each layer"),
        "quant_lm_head": ((), "the LM head is quantized"),
        "quantized_layers": ((), "modules have formats of their own"),
        "rotation": ((), "inputs are rotated"),
        "rotation_config": ((), "inputs are rotated"),
        "rotation_configs": ((), "inputs are rotated"),
        "static_attention_dtype": ((), "queries, keys and values are quantized"),
        "super_bits": ((), "scales are quantized"),
        "super_group_size": ((), "scales are quantized"),
        "tensor_storage": ((), "each tensor has a layout of its own"),
        "transform_config": ((), "inputs are rotated"),
        "weight_scale_method": ((), "scales are laid out in another way"),
    }
)
