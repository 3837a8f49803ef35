"""The tensors of an adapter's file by the module that they change; others are refused by their own sentence."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from minisgl_backend.adapters.config import LoraConfig
from minisgl_backend.errors import ConfigError
from minisgl_backend.weights.parts import PLAIN_DTYPES

TENSOR_FILE = "adapter_model.safetensors"
DIGEST_BYTES = 16
_PREFIX = "base_model.model."
# A bare state_dict has the adapter's name behind A and B; `save_pretrained` takes it away.
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])(\.default)?\.weight")
# The weight below an adapter, which PEFT saves of an output projection: it may be there if it is the base's.
_BASE = re.compile(r"(?P<module>.+)\.base_layer\.weight")
# By what is in a tensor's name, in this order.
_REFUSED = (
    (r"\.lora_magnitude_vector", "magnitudes of DoRA, which are applied to merged weights alone"),
    (r"\.lora_embedding_[AB]", "an adapter of the embedding, which is not served"),
    (r"\.lora_[AB](\.default)?\.bias$", "a bias of the adapter (lora_bias), which is not served"),
    (r"trainable_tokens|token_adapter", "trained embeddings of some tokens, which are not served"),
    (r"modules_to_save|original_module", "a whole module, trained beside the adapter (modules_to_save)"),
    (r"\.experts(\.|$)", "of a mixture's experts, whose adapters are not served"),
    (r"\.kv_b_proj\.", "of latents' expansion (kv_b_proj), which is a part of attention here and has no adapters"),
    (r"(^|\.)((embed_tokens|wte|word_embeddings)\.(base_layer\.)?|lm_head\.)weight$", "whole embeddings or a whole "
     "output projection, as training with new tokens saves"),
    (r"\.bias$", "a trained bias of the base, which is not served"),
)  # fmt: skip


class Factors(NamedTuple):
    """Of one module: B(A x) * scale is added to its output."""

    a: torch.Tensor  # [rank, inputs]
    b: torch.Tensor  # [outputs, rank]
    scale: float


@dataclass(frozen=True)
class AdapterTensors:
    """One adapter on the CPU, checked by itself; not yet against a model."""

    folder: Path
    config: LoraConfig
    by_module: Mapping[str, Factors]  # by names at training time
    digest: bytes  # of all that decides what it adds, DIGEST_BYTES
    base: Mapping[str, torch.Tensor]  # weights of the base that the file has, too, by module

    @classmethod
    def read(cls, folder: Path) -> AdapterTensors:
        """Raises ConfigError naming the file, the tensor and what is allowed."""
        config = LoraConfig.read(folder)
        path = folder / TENSOR_FILE
        if not path.is_file():
            others = [one.name for one in sorted(folder.glob("adapter_model.*"))]
            hint = f" ({others[0]} would be unpickled, which runs what it says)" if others else ""
            raise ConfigError(f"{folder} has no {TENSOR_FILE}{hint}; allowed: safetensors, as PEFT's default")
        found: dict[str, dict[str, torch.Tensor]] = {}
        base: dict[str, torch.Tensor] = {}
        for name, tensor in _tensors(path):
            refused = any(re.search(one, name) for one, _ in _REFUSED)
            if not refused and (match := _BASE.fullmatch(name)):
                base[match["module"]] = tensor
                continue
            if refused or not (match := _FACTOR.fullmatch(name)):
                raise ConfigError(f"{path}: {name} is {_why_refused(name)}")
            factors = found.setdefault(match["module"], {})
            if match["factor"] in factors:
                raise ConfigError(f"{path}: {name} is there twice, with and without an adapter's name")
            factors[match["factor"]] = tensor
        if not found:
            raise ConfigError(f"{path} has no tensors; allowed: lora_A and lora_B of one module or more")
        by_module = {module: _factors(path, config, module, factors) for module, factors in found.items()}
        return cls(folder, config, by_module, _digest(by_module), base)

    @property
    def largest_rank(self) -> int:
        return max(len(one.a) for one in self.by_module.values())


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safe_open(str(path), framework="pt") as file:
            for stored in file.keys():  # noqa: SIM118  (the handle is no dict)
                tensor = file.get_tensor(stored)
                if tensor.dtype not in PLAIN_DTYPES:
                    raise ConfigError(
                        f"{path}: {stored} has the number format {str(tensor.dtype).removeprefix('torch.')}; allowed: "
                        f"{', '.join(str(one).removeprefix('torch.') for one in PLAIN_DTYPES)}"
                    )
                yield stored.removeprefix(_PREFIX), tensor
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _why_refused(name: str) -> str:
    why = next((why for pattern, why in _REFUSED if re.search(pattern, name)), None)
    return why or "neither lora_A.weight nor lora_B.weight of a module; allowed: these"


def _factors(path: Path, config: LoraConfig, module: str, found: Mapping[str, torch.Tensor]) -> Factors:
    for factor, other in ("AB", "BA"):
        if factor not in found:
            raise ConfigError(f"{path}: {module} has lora_{other} and no lora_{factor}; allowed: both")
    a, b, rank = found["A"], found["B"], config.rank_of(module)
    if a.dim() != 2 or b.dim() != 2:
        raise ConfigError(
            f"{path}: {module} has factors of {a.dim()} and {b.dim()} axes, as of a convolution; allowed: linear layers"
        )
    if (len(a), b.shape[1]) != (rank, rank):
        raise ConfigError(
            f"{path}: {module} has lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)}; {config.path.name} says "
            f"rank {rank} for it (r, rank_pattern)"
        )
    return Factors(a, b, config.scale_of(module))


def _digest(by_module: Mapping[str, Factors]) -> bytes:
    """Equal for equal additions, whatever the folder's and the adapter's names are."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"minisgl adapter")
    for module, (a, b, scale) in sorted(by_module.items()):
        digest.update(f"{module} {a.dtype} {tuple(a.shape)} {b.dtype} {tuple(b.shape)} {scale!r}\n".encode())
        for tensor in (a, b):
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.digest()
