"""Over how many ranks released quantized models split: their methods are made in full shape, without data."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.model_shapes import SHAPES
from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.torch_ops import TorchOps
from minisgl_backend.layers.weights import LayerContext
from minisgl_backend.models.build import weight_parts
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.decoder import CausalLM
from minisgl_backend.tensor_parallel import TensorParallel
from minisgl_backend.weights.methods import WeightMethods
from tests.unit.models.test_released_configs import DEEPSEEK_V2_LITE, DEEPSEEK_V3, GLM_4_5_AIR, GPT_OSS_20B, MINIMAX_M2

META = torch.device("meta")
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
CHANNELS = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {**_FLOAT8, "strategy": "channel", "dynamic": False},
        "input_activations": {**_FLOAT8, "strategy": "token", "dynamic": True},
    }},
}  # fmt: skip
AWQ = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 128, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
MINIMAX_BLOCKS = {**BLOCKS, "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]}
QWEN3_235B = {
    **SHAPES["qwen3-30b-a3b"], "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64,
    "moe_intermediate_size": 1536,
}  # fmt: skip
RANKS = (2, 4, 8)
# 10,944 inputs of the first layer's down_proj: 85.5 blocks, over four ranks of 16 inputs each.
CUT_TOO_SMALL = ("tp gives each rank 2736 inputs of", "tp gives each rank 1368 inputs of")
# Config, quantization_config -> for each number of ranks: served, or what the refusal says.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, tuple[str, ...]]] = {
    "qwen3-14b-fp8": (SHAPES["qwen3-14b"], BLOCKS, ("", "", "")),
    "qwen3-32b-fp8": (SHAPES["qwen3-32b"], BLOCKS, ("", "", "")),
    "qwen3-30b-a3b-fp8": (SHAPES["qwen3-30b-a3b"], BLOCKS, ("", "", "")),
    "qwen3-235b-a22b-fp8": (QWEN3_235B, BLOCKS, ("", "", "")),
    "glm-4.5-air-fp8": (GLM_4_5_AIR, CHANNELS, ("", "", "")),
    "glm-4.5-air in blocks": (GLM_4_5_AIR, BLOCKS, ("", *CUT_TOO_SMALL)),
    "deepseek-v3": (DEEPSEEK_V3, BLOCKS, ("", "", "")),
    "deepseek-v3-awq": (DEEPSEEK_V3, AWQ, ("", "", "")),
    "deepseek-v2-lite in blocks": (DEEPSEEK_V2_LITE, BLOCKS, ("", *CUT_TOO_SMALL)),
    "minimax-m2": (MINIMAX_M2, MINIMAX_BLOCKS, ("", "", "")),
    "gpt-oss-20b": (GPT_OSS_20B, GPT_OSS_20B["quantization_config"], ("", "", "")),
    "qwen3-14b-awq": (SHAPES["qwen3-14b"], AWQ, ("", "", "")),
    "qwen3-14b-gptq": (SHAPES["qwen3-14b"], GPTQ, ("", "", "")),
    "qwen3-30b-a3b-gptq": (SHAPES["qwen3-30b-a3b"], GPTQ, ("", "", "")),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks(name: str) -> None:
    config, quantization, expected = CASES[name]
    found = tuple(refusal(config, quantization, ranks) for ranks in RANKS)
    assert all(words in said and bool(words) == bool(said) for words, said in zip(expected, found, strict=True)), found


def refusal(config: dict[str, Any], quantization: dict[str, Any] | None, ranks: int) -> str:
    """What some rank says; "" where each can be made and says what it reads of the checkpoint."""
    layers = config.get("first_k_dense_replace", 0) + 2
    shorter = {"num_hidden_layers": layers, "quantization_config": quantization}
    if "layer_types" in config:
        shorter["layer_types"] = config["layer_types"][:layers]
    if "attn_type_list" in config:
        shorter["attn_type_list"] = config["attn_type_list"][:layers]
    model_config = ModelConfig.from_dicts({**config, **shorter}, {})
    try:
        model_config.check_tensor_parallel(ranks)
        for rank in range(ranks):
            ops = TorchOps()
            methods = WeightMethods(
                model_config.quantization, WeightMethods.all_plain(ops, dtype=torch.bfloat16, device=META).kernels,
                dtype=torch.bfloat16, device=META,
            )  # fmt: skip
            tp = TensorParallel(rank, ranks, None, META)
            context = LayerContext(device=META, dtype=torch.bfloat16, ops=ops, tp=tp, methods=methods)
            weight_parts(CausalLM(model_config, context, 64))
    except ConfigError as error:
        return str(error)
    return ""
