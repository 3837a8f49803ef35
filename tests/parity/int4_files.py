"""Writes checkpoints with 4-bit weights as AutoAWQ, GPTQModel and compressed-tensors do, and the same weights plain."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.parity.quantized import LINEAR, Tensors, rewrite

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
MODULES = (*LINEAR, "qkv_proj", "gate_up_proj")


@dataclass(frozen=True, kw_only=True)
class Variant:
    layout: str  # awq, gptq, gptq_v2 or pack-quantized
    group: int = GROUP  # -1: all inputs
    symmetric: bool = True
    act_order: bool = False
    plain: str = ""  # modules with this in their name are

    @property
    def config(self) -> dict[str, Any]:
        """quantization_config."""
        if self.layout == "awq":
            plain = [self.plain] if self.plain else None
            return {
                "quant_method": "awq", "bits": 4, "group_size": self.group, "zero_point": True, "version": "gemm",
                "modules_to_not_convert": plain,
            }  # fmt: skip
        if self.layout.startswith("gptq"):
            return {
                "quant_method": "gptq", "bits": 4, "group_size": self.group, "sym": self.symmetric,
                "desc_act": self.act_order, "checkpoint_format": self.layout, "damp_percent": 0.01, "lm_head": False,
                "dynamic": {f"-:.*{self.plain}.*": {}} if self.plain else None,
            }  # fmt: skip
        plain = [f"re:.*{self.plain}.*"] if self.plain else []
        weights = {
            "num_bits": 4, "type": "int", "symmetric": self.symmetric, "dynamic": False, "observer": "minmax",
            "strategy": "channel" if self.group < 0 else "group", "actorder": "group" if self.act_order else None,
            **({} if self.group < 0 else {"group_size": self.group}),
        }  # fmt: skip
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
            "ignore": ["lm_head", "model.layers.1.mlp", "re:.*mlp.gate$", *plain],
            "config_groups": {"group_0": group},
        }  # fmt: skip


VARIANTS: dict[str, Variant] = {
    "awq": Variant(layout="awq", symmetric=False),
    "awq-partly": Variant(layout="awq", symmetric=False, plain="layers.1.mlp"),
    "gptq": Variant(layout="gptq"),
    "gptq-zeros-dynamic": Variant(layout="gptq", symmetric=False, plain="down_proj"),
    "gptq_v2-channel": Variant(layout="gptq_v2", group=-1, symmetric=False),
    "gptq-act-order": Variant(layout="gptq", act_order=True),
    "ct": Variant(layout="pack-quantized", plain="layers.0.self_attn"),
    "ct-zeros": Variant(layout="pack-quantized", symmetric=False),
    "ct-channel": Variant(layout="pack-quantized", group=-1),
    "ct-act-order": Variant(layout="pack-quantized", symmetric=False, act_order=True),
}


@dataclass(frozen=True)
class Numbers:
    """One weight: numbers uint8 [outputs, inputs], scales float16 and zeros uint8 [outputs, groups], and each input's
    group."""

    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor, variant: Variant) -> Numbers:
        size_in = weight.shape[1]
        group = size_in if variant.group < 0 else variant.group
        groups = torch.arange(size_in) // group
        if variant.act_order:
            # As by GPTQ, every layer with the same input has the same order.
            groups = groups[torch.randperm(size_in, generator=torch.Generator().manual_seed(size_in))]
        members = [weight[:, groups == one] for one in range(int(groups.max()) + 1)]
        if variant.symmetric:
            scales = torch.stack([one.abs().amax(1) / 7 for one in members], 1).half()
            zeros = torch.full_like(scales, 8.0)
        else:
            low, high = (torch.stack([edge(one, 1) for one in members], 1) for edge in (torch.amin, torch.amax))
            scales = ((high.clamp_min(0) - low.clamp_max(0)) / 15).half()
            zeros = (-low / scales.float()).round().clamp(1, 15)  # GPTQ's first format has no place for 0
        scales = scales.clamp_min(1e-4)
        numbers = weight / scales.float()[:, groups] + zeros.float()[:, groups]
        return cls(numbers.round().clamp(0, 15).to(torch.uint8), scales, zeros.to(torch.uint8), groups.int())

    def dequantized(self) -> torch.Tensor:
        """float32 [outputs, inputs]"""
        at = self.groups.long()
        return (self.numbers.float() - self.zeros.float()[:, at]) * self.scales.float()[:, at]


def write_int4(source: Path, variant: str, quantized: Path, plain: Path) -> None:
    """source: a folder with a plain checkpoint. plain: gets the same weights, dequantized."""
    write_variant(source, VARIANTS[variant], quantized, plain)


def write_variant(source: Path, chosen: Variant, quantized: Path, plain: Path) -> None:
    """As `write_int4`."""

    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, Tensors]:
        module, _, kind = name.rpartition(".")
        is_linear = kind == "weight" and weight.dim() == 2 and module.split(".")[-1] in MODULES
        if not is_linear or (chosen.plain and chosen.plain in module):
            return {name: weight}, {name: weight}
        numbers = Numbers.of(weight.float(), chosen)
        return {f"{module}.{kind}": one for kind, one in stored(numbers, chosen).items()}, {name: numbers.dequantized()}

    rewrite(source, chosen.config, quantized, plain, write)


def stored(of: Numbers, variant: Variant) -> Tensors:
    """The tensors of one weight, by their suffixes."""
    if variant.layout == "awq":
        return {
            "qweight": pack(of.numbers.t(), AWQ_ORDER),
            "qzeros": pack(of.zeros.t(), AWQ_ORDER),
            "scales": of.scales.t(),
        }
    if variant.layout.startswith("gptq"):
        less = 1 if variant.layout == "gptq" else 0
        return {
            "qweight": pack(of.numbers).t(),
            "qzeros": pack(of.zeros.t() - less),
            "scales": of.scales.t(),
            "g_idx": of.groups,
        }
    tensors = {
        "weight_packed": pack(of.numbers),
        "weight_scale": of.scales,
        "weight_shape": torch.tensor(of.numbers.shape),
    }
    if not variant.symmetric:
        tensors["weight_zero_point"] = pack(of.zeros.t()).t()
    if variant.act_order:
        tensors["weight_g_idx"] = of.groups
    return tensors


def pack(numbers: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """uint8 [rows, columns] -> int32 [rows, columns / 8]; column order[i] of eight goes to bits 4 i."""
    eight = numbers.to(torch.int64).unflatten(1, (-1, 8))
    words = sum(eight[..., column] << (4 * i) for i, column in enumerate(order))
    assert isinstance(words, torch.Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
