"""Writes checkpoints with FP8 weights as the tools do that publish them, and the same weights in float32."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FP8 = torch.float8_e4m3fn
BLOCK = (32, 64)  # outputs, inputs
INPUT_SCALE = 0.03  # static: what is above 13 is cut off
LINEAR: tuple[str, ...] = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "w1",
    "w2",
    "w3",
)
LINEAR += ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")

LINEAR += ("in_proj", "out_proj", "in_proj_qkvz", "in_proj_qkv", "in_proj_z")
# Linear layers that publishers of models with states leave as they are, and list by their full names.
LEFT_OUT = ("in_proj_ba", "in_proj_b", "in_proj_a")

Tensors = dict[str, torch.Tensor]


def _group(
    weights: dict[str, Any], activations: dict[str, Any] | None, form: str = "float-quantized"
) -> dict[str, Any]:
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    inputs = activations and {**common, "dynamic": True, **activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": [
            "lm_head",
            "model.layers.1.mlp",
            "model.layers.0.self_attn",
            "re:.*mlp.gate$",
            "re:.*block_sparse_moe.gate$",
        ],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**common, "dynamic": False, **weights},
                "input_activations": inputs,
                "output_activations": None,
            }
        },
    }


# Name -> quantization_config, and how activations are quantized: token, group, static or none.
VARIANTS: dict[str, tuple[dict[str, Any], str | None]] = {
    "fp8-blocks-128": (
        {
            "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
            "modules_to_not_convert": None,
        },
        "group",
    ),
    "fp8-blocks": (
        {
            "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(BLOCK),
            "modules_to_not_convert": ["lm_head"],
        },
        "group",
    ),
    "fp8-static": ({"quant_method": "fp8", "activation_scheme": "static"}, "static"),
    "fp8-tensor": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "token"),
    "ct-blocks": (
        _group({"strategy": "block", "block_structure": list(BLOCK)}, {"strategy": "group", "group_size": BLOCK[1]}),
        "group",
    ),
    "ct-channel": (_group({"strategy": "channel"}, {"strategy": "token"}), "token"),
    "ct-tensor-static": (_group({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}), "static"),
    "ct-blocks-weights-only": (_group({"strategy": "block", "block_structure": list(BLOCK)}, None), None),
    "ct-weights-only": (_group({"strategy": "channel"}, None), None),
    "ct-int8": (
        _group({"type": "int", "strategy": "channel"}, {"type": "int", "strategy": "token"}, "int-quantized"), "int8",
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*.gate"]}, "static"),
}  # fmt: skip


def quantize(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [outputs, inputs] -> FP8, and scales [blocks of outputs, blocks of inputs]."""
    outputs, inputs = weight.shape
    rows, columns = -(-outputs // block[0]), -(-inputs // block[1])
    padded = weight.new_zeros(rows * block[0], columns * block[1])
    padded[:outputs, :inputs] = weight
    blocks = padded.view(rows, block[0], columns, block[1])
    scales = blocks.abs().amax((1, 3)).clamp_min(1e-10) / 448
    numbers = (blocks / scales[:, None, :, None]).clamp(-448, 448).view_as(padded)[:outputs, :inputs]
    return numbers.to(FP8), scales


def quantize_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [outputs, inputs] -> int8, and scales [outputs, 1]."""
    scales = weight.abs().amax(1, keepdim=True).clamp_min(1e-10) / 127
    return (weight / scales).round().clamp(-127, 127).to(torch.int8), scales


def dequantize(numbers: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    whole = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return numbers.float() * whole[: len(numbers), : numbers.shape[1]]


def write_fp8(source: Path, variant: str, quantized: Path, plain: Path) -> None:
    """source: a folder with a plain checkpoint. plain: gets the same weights, dequantized."""
    config, activations = VARIANTS[variant]
    of_blocks = "blocks" in variant
    size = (128, 128) if variant == "fp8-blocks-128" else BLOCK
    scale_name = "weight_scale_inv" if variant.startswith("fp8-blocks") else "weight_scale"

    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, Tensors]:
        if not is_linear(name):
            return {name: weight}, {name: weight}
        by_channel = config.get("config_groups", {}).get("group_0", {}).get("weights", {}).get("strategy") == "channel"
        block = size if of_blocks else (1, weight.shape[1]) if by_channel else None
        whole = block or (weight.shape[0], weight.shape[1])
        numbers, scales = quantize(weight.float(), whole) if variant != "ct-int8" else quantize_int8(weight.float())
        module = name.removesuffix(".weight")
        stored = {name: numbers, f"{module}.{scale_name}": scales if block else scales.view(1)}
        if variant == "modelopt":
            stored[f"{module}.{scale_name}"] = scales.view(())
        if activations == "static" or variant == "fp8-tensor":
            stored[f"{module}.input_scale"] = torch.tensor(INPUT_SCALE)
        return stored, {name: dequantize(numbers, scales, whole)}

    rewrite(source, config, quantized, plain, write)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip


def quantize_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [..., outputs, inputs] -> blocks uint8 [..., outputs, blocks, 16] and scales uint8 [..., outputs, blocks],
    by section 6.3 of the OCP's Microscaling Formats 1.0: a block's largest number has the exponent of E2M1's."""
    blocks = weight.unflatten(-1, (-1, 32))
    exponents = blocks.abs().amax(-1).clamp_min(1e-30).log2().floor() - 2
    scaled = blocks / exponents.exp2().unsqueeze(-1)
    numbers = (scaled.abs().unsqueeze(-1) - E2M1).abs().argmin(-1) + 8 * (scaled < 0)
    packed = numbers[..., ::2] | numbers[..., 1::2] << 4
    return packed.to(torch.uint8), (exponents + 127).to(torch.uint8)


def write_mxfp4(source: Path, quantized: Path, plain: Path) -> None:
    """As `write_fp8`, of gpt-oss, whose experts are dequantized by transformers' own function for it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, Tensors]:
        if not name.endswith((".gate_up_proj", ".down_proj")):
            return {name: weight}, {name: weight}
        blocks, scales = quantize_mxfp4(weight.transpose(1, 2))
        stored = {f"{name}_blocks": blocks, f"{name}_scales": scales}
        return stored, {name: convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)}

    rewrite(source, MXFP4, quantized, plain, write)


def is_linear(name: str) -> bool:
    return name.endswith(".weight") and name.split(".")[-2] in LINEAR


def rewrite(
    source: Path,
    config: dict[str, Any],
    quantized: Path,
    plain: Path,
    write: Callable[[str, torch.Tensor], tuple[Tensors, Tensors]],
) -> None:
    """Writes both folders. write: (name, tensor) -> what the quantized checkpoint has for it, and what the plain one.

    config: quantization_config.
    """
    stored: Tensors = {}
    same: Tensors = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            one, other = write(name, tensor)
            stored.update(one)
            same.update(other)
    left_out = [name.removesuffix(".weight") for name in stored if name.split(".")[-2:][0] in LEFT_OUT]
    if left_out:
        config = {**config, **_leaving_out(left_out, config["quant_method"])}
    described = json.loads((source / "config.json").read_text())
    for folder, tensors, more in ((quantized, stored, {"quantization_config": config}), (plain, same, {})):
        folder.mkdir(exist_ok=True)
        for file in source.glob("*.json"):
            if file.name != "model.safetensors.index.json":
                shutil.copy(file, folder)
        save_file({name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**described, **more}))


def _leaving_out(modules: list[str], method: str) -> dict[str, Any]:
    """What quantization_config says of modules that are not quantized."""
    if method == "gptq":
        return {"dynamic": {f"-:{re.escape(module)}": {} for module in modules}}
    return {"ignore" if method == "compressed-tensors" else "modules_to_not_convert": [*modules, "lm_head"]}
