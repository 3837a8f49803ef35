"""LoRA adapters in PEFT's files, and what they make of a model: merged into the weights of transformers'."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}


def save_adapter(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    """tensors: without `base_model.model.`; config: changes of CONFIG."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file(
        {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}, folder / "adapter_model.safetensors"
    )
    return folder


def factors(module: str, size_in: int = 8, size_out: int = 6, rank: int = 4) -> dict[str, torch.Tensor]:
    """A and B of one module, neither of them trivial."""
    return {
        f"{module}.lora_A.weight": torch.randn(rank, size_in),
        f"{module}.lora_B.weight": torch.randn(size_out, rank),
    }


def linear_modules(model: torch.nn.Module, pattern: str) -> dict[str, torch.nn.Linear]:
    """Those of transformers' model whose names the pattern finds, by name."""
    found = model.named_modules()
    return {name: one for name, one in found if isinstance(one, torch.nn.Linear) and re.search(pattern, name)}


def save_for(
    folder: Path, model: torch.nn.Module, pattern: str, *, rank: int = 4, seed: int = 1, **config: Any
) -> Path:
    """An adapter of these modules of transformers' model."""
    tensors: dict[str, torch.Tensor] = {}
    for index, (name, one) in enumerate(linear_modules(model, pattern).items()):
        generator = torch.Generator().manual_seed(1000 * seed + index)
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, one.in_features, generator=generator) * 0.3
        tensors[f"{name}.lora_B.weight"] = torch.randn(one.out_features, rank, generator=generator) * 0.3
    return save_adapter(folder, tensors, r=rank, **config)


@torch.no_grad()
def merge(model: torch.nn.Module, folder: Path) -> None:
    """Adds an adapter to the weights of transformers' model: what PEFT's merge_and_unload does."""
    config = json.loads((folder / "adapter_config.json").read_text())
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = tensors[name.replace("lora_A", "lora_B")]
            linear = model.get_submodule(module)
            # A parameter of its own: an output projection may share the embedding's, which the adapter leaves alone.
            linear.weight = torch.nn.Parameter(linear.weight + scale * (b @ a))  # type: ignore[operator]
