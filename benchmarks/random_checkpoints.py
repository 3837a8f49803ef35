"""Random weights in a folder, in the number format that its `config.json` names: for measuring starts from disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file

SHARD_BYTES = 5 << 30


def write_weights(folder: Path, config: dict[str, Any]) -> None:
    """What transformers' model of this configuration holds, linear layers in the format of `quantization_config`.

    Dense models in FP8 blocks, AWQ and GPTQ are written, and every plain model; ValueError names another method."""
    from transformers import AutoConfig, AutoModelForCausalLM

    method = config.get("quantization_config", {}).get("quant_method")
    if method is not None and method not in LINEAR:
        raise ValueError(f"quant_method is {method!r}; random checkpoints are written for: {', '.join(LINEAR)}")
    of_model = {key: value for key, value in config.items() if key not in ("quantization_config", "model_type")}
    settings = AutoConfig.for_model(config["model_type"], **of_model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device("meta" if method else device):
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
    if method:
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        _save(_tensors(shapes, LINEAR[method], torch.Generator(device).manual_seed(0)), folder)
    else:
        model.save_pretrained(folder, max_shard_size=SHARD_BYTES)
        # Saving rewrites the config in the newer spelling; ours is the one that every reader knows.
        (folder / "config.json").write_text(json.dumps(config, indent=1))


def _save(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
    """In files of at most SHARD_BYTES."""
    shard: dict[str, torch.Tensor] = {}
    count = size = 0
    for name, tensor in tensors:
        tensor_bytes = tensor.numel() * tensor.element_size()
        if shard and size + tensor_bytes > SHARD_BYTES:
            save_file(shard, folder / f"model-{count:05}.safetensors")
            shard, count, size = {}, count + 1, 0
        shard[name], size = tensor.cpu(), size + tensor_bytes
    save_file(shard, folder / f"model-{count:05}.safetensors")


def _tensors(
    shapes: Mapping[str, tuple[int, ...]], linear: Linear, random: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, shape in shapes.items():
        if name.endswith("_proj.weight"):
            outputs, inputs = shape
            yield from linear(name.removesuffix("weight"), outputs, inputs, random)
        elif name.endswith("norm.weight"):
            yield name, torch.ones(shape, dtype=torch.bfloat16)
        else:
            yield name, _normal(shape, random)


def _normal(shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=random.device).normal_(std=0.02, generator=random)


def _words(rows: int, columns: int, random: torch.Generator) -> torch.Tensor:
    """int32 [rows, columns] of eight 4-bit numbers each."""
    least, most = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
    return torch.randint(least, most, (rows, columns), dtype=torch.int32, device=random.device, generator=random)


Linear = Callable[[str, int, int, torch.Generator], Iterator[tuple[str, torch.Tensor]]]
GROUP, BLOCK = 128, 128  # those of model_shapes.SHAPES


def _fp8_blocks(prefix: str, outputs: int, inputs: int, random: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    yield f"{prefix}weight", (_normal((outputs, inputs), random) * 2000).to(torch.float8_e4m3fn)
    yield f"{prefix}weight_scale_inv", torch.full((-(-outputs // BLOCK), -(-inputs // BLOCK)), 1 / 2000)


def _awq(prefix: str, outputs: int, inputs: int, random: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    yield f"{prefix}qweight", _words(inputs, outputs // 8, random)
    yield f"{prefix}qzeros", _words(inputs // GROUP, outputs // 8, random)
    yield f"{prefix}scales", torch.full((inputs // GROUP, outputs), 0.004, dtype=torch.float16)


def _gptq(prefix: str, outputs: int, inputs: int, random: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    yield f"{prefix}qweight", _words(inputs // 8, outputs, random)
    yield f"{prefix}qzeros", torch.full((inputs // GROUP, outputs // 8), 0x77777777, dtype=torch.int32)
    yield f"{prefix}scales", torch.full((inputs // GROUP, outputs), 0.004, dtype=torch.float16)
    yield f"{prefix}g_idx", torch.arange(inputs, dtype=torch.int32) // GROUP


LINEAR: Mapping[str, Linear] = MappingProxyType({"fp8": _fp8_blocks, "awq": _awq, "gptq": _gptq})
