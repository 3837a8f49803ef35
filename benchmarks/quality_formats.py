"""The quantized checkpoints whose quality is measured, each made of a plain one.

Weights are rounded to the nearest by the writers of the tests, or by GPTQ (Frantar et al., 2022), layer by layer, every
one by the inputs that it has in the plain model. GPTQ and static scales of activations are calibrated with what the
model itself writes (as LLM-QAT does: Liu et al., 2023), so that no other text is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.parity.checkpoints import reference_model
from tests.parity.int4_files import Numbers, Variant, stored, write_variant
from tests.parity.quantized import LINEAR, Tensors, rewrite, write_fp8
from tests.parity.test_fp8_weights import fp8

GROUP = 64  # inputs with one scale: SmolLM2 has 576, of which 128 is no part
SEQUENCES, LENGTH = 16, 256  # of the model's own words
DAMPING = 0.01  # GPTQ's, of the mean of a Hessian's diagonal
LARGEST_FP8 = 448.0
_COLUMNS = 128  # that GPTQ rounds before it passes their errors on

OfInput = Callable[[str, torch.Tensor], torch.Tensor]  # (path of a linear layer, its input) -> what it multiplies with


@dataclass
class Calibration:
    """Of each linear layer, by its path: the sum of x.T @ x over its inputs, and their largest number."""

    hessians: dict[str, torch.Tensor] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)

    @classmethod
    @torch.inference_mode()
    def of(cls, folder: Path, sequences: int = SEQUENCES, length: int = LENGTH) -> Calibration:
        found, model = cls(), reference_model(folder)
        generator = torch.Generator().manual_seed(0)
        first = torch.randint(model.config.vocab_size, (sequences, 1), generator=generator)
        torch.manual_seed(0)
        words = model.generate(
            first, attention_mask=torch.ones_like(first), do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
            min_new_tokens=length - 1, max_new_tokens=length - 1, pad_token_id=0,
        )  # fmt: skip
        for path, layer in model.named_modules():
            if isinstance(layer, torch.nn.Linear) and path.startswith("model.layers."):
                layer.register_forward_pre_hook(found._hook(path))
        for one in words:
            model(one.unsqueeze(0), use_cache=False, logits_to_keep=1)
        return found

    def _hook(self, path: str) -> Callable[[Any, Any], None]:
        def see(layer: Any, inputs: Any) -> None:
            x = inputs[0].flatten(0, -2).float()
            self.hessians[path] = self.hessians.get(path, 0) + x.t() @ x
            self.largest[path] = max(self.largest.get(path, 0.0), x.abs().max().item())

        return see


Write = Callable[[Path, Path, Path, Calibration], None]  # source, quantized checkpoint, the same dequantized


@dataclass(frozen=True, kw_only=True)
class Format:
    """Engine options and, for what is no conversion while loading, how the checkpoint is written."""

    title: str
    options: Mapping[str, str] = field(default_factory=dict)
    write: Write | None = None
    calibrates: bool = False
    # For a reference that quantizes activations alike; None: they are as in the plain model.
    activations: Callable[[Calibration], OfInput] | None = None


def of_tokens(calibration: Calibration) -> OfInput:
    return lambda path, x: fp8(x)


def of_groups(calibration: Calibration) -> OfInput:
    def groups(path: str, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1]
        padded = torch.nn.functional.pad(x, (0, -size % 128))
        return fp8(padded.unflatten(-1, (-1, 128))).flatten(-2)[..., :size]

    return groups


def of_static(calibration: Calibration) -> OfInput:
    def static(path: str, x: torch.Tensor) -> torch.Tensor:
        scale = calibration.largest[path] / LARGEST_FP8
        return (x / scale).clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn).float() * scale

    return static


def of_tokens_int8(calibration: Calibration) -> OfInput:
    def int8(path: str, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 127
        return (x / scale).round().clamp(-127, 127) * scale

    return int8


def _written_by_tests(variant: str) -> Write:
    def write(source: Path, quantized: Path, plain: Path, calibration: Calibration) -> None:
        write_fp8(source, variant, quantized, plain)
        file = quantized / "model.safetensors"
        tensors = load_file(file)
        scales = [name for name in tensors if name.endswith(".input_scale")]
        for name in scales:
            largest = calibration.largest[name.removesuffix(".input_scale")]
            tensors[name] = torch.tensor(largest / LARGEST_FP8)
        if scales:
            save_file(tensors, file)

    return write


def _rounded(variant: Variant) -> Write:
    return lambda source, quantized, plain, calibration: write_variant(source, variant, quantized, plain)


def _by_gptq(variant: Variant) -> Write:
    def write(source: Path, quantized: Path, plain: Path, calibration: Calibration) -> None:
        def one(name: str, weight: torch.Tensor) -> tuple[Tensors, Tensors]:
            module, _, kind = name.rpartition(".")
            if kind != "weight" or module.split(".")[-1] not in LINEAR:
                return {name: weight}, {name: weight}
            numbers = gptq(weight.float(), calibration.hessians[module], variant.group)
            tensors = {f"{module}.{kind}": tensor for kind, tensor in stored(numbers, variant).items()}
            return tensors, {name: numbers.dequantized()}

        rewrite(source, variant.config, quantized, plain, one)

    return write


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "bfloat16": Format(title="bfloat16", options={"dtype": "bfloat16"}),
        "fp8": Format(title="`quantization=fp8`", options={"quantization": "fp8"}, activations=of_tokens),
        "fp8-blocks": Format(
            title="FP8, blocks of 128 x 128", write=_written_by_tests("fp8-blocks-128"), activations=of_groups
        ),
        "fp8-channel": Format(
            title="FP8, a scale an output", write=_written_by_tests("ct-channel"), activations=of_tokens
        ),
        "fp8-static": Format(
            title="FP8, a scale a tensor, static",
            write=_written_by_tests("modelopt"),
            calibrates=True,
            activations=of_static,
        ),
        "int8": Format(title="INT8 (W8A8)", write=_written_by_tests("ct-int8"), activations=of_tokens_int8),
        "awq": Format(
            title="4 bits, AWQ's files, rounded", write=_rounded(Variant(layout="awq", group=GROUP, symmetric=False))
        ),
        "gptq": Format(title="4 bits, GPTQ", calibrates=True, write=_by_gptq(Variant(layout="gptq", group=GROUP))),
        "w4a16": Format(
            title="4 bits, pack-quantized, rounded", write=_rounded(Variant(layout="pack-quantized", group=GROUP))
        ),
    }
)


@torch.inference_mode()
def gptq(weight: torch.Tensor, hessian: torch.Tensor, group: int) -> Numbers:
    """weight float32 [outputs, inputs] rounded to symmetric 4 bits, column by column: what one loses, those behind it
    make up for. hessian [inputs, inputs]: of its inputs."""
    weight, size = weight.clone(), weight.shape[1]
    hessian = hessian + DAMPING * hessian.diagonal().mean() * torch.eye(size)
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
    numbers, scales = torch.empty_like(weight), []
    for start in range(0, size, _COLUMNS):
        stop = min(start + _COLUMNS, size)
        errors = torch.empty(len(weight), stop - start)
        for column in range(start, stop):
            if column % group == 0:
                scales.append((weight[:, column : column + group].abs().amax(1) / 7).half().clamp_min(1e-4))
            scale = scales[-1].float()
            numbers[:, column] = (weight[:, column] / scale + 8).round().clamp(0, 15)
            error = (weight[:, column] - (numbers[:, column] - 8) * scale) / inverse[column, column]
            weight[:, column:stop] -= error.unsqueeze(1) * inverse[column, column:stop]
            errors[:, column - start] = error
        weight[:, stop:] -= errors @ inverse[start:stop, stop:]
    found = torch.stack(scales, 1)
    groups = torch.arange(size, dtype=torch.int32) // group
    return Numbers(numbers.to(torch.uint8), found, torch.full(found.shape, 8, dtype=torch.uint8), groups)
