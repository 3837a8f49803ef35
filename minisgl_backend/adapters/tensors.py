"""The tensors of an adapter's file by the module that they change; others are refused by their own sentence."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from minisgl_backend.adapters.config import LoraConfig
from minisgl_backend.adapters.patterns import LONGEST_NAME, LONGEST_NUMBER, is_bounded
from minisgl_backend.errors import ConfigError
from minisgl_backend.weights.names import TensorNames
from minisgl_backend.weights.parts import PLAIN_DTYPES

TENSOR_FILE = "adapter_model.safetensors"
DIGEST_BYTES = 16
_PREFIX = "base_model.model."
# A bare state_dict has the adapter's name behind A and B; `save_pretrained` takes it away.
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(embedding_)?(?P<factor>[AB])(\.default)?(?(2)|\.weight)")
_MAGNITUDE = re.compile(r"(?P<module>.+)\.lora_magnitude_vector(\.default)?(\.weight)?")
# The weight below an adapter, which PEFT saves of embeddings and output projections: allowed if it is the base's.
_BASE = re.compile(r"(?P<module>.+)\.base_layer\.weight")
# By what is in a tensor's name, in this order.
_REFUSED = (
    (r"\.lora_[AB](\.default)?\.bias$", "a bias of the adapter (lora_bias), which is not served"),
    (r"trainable_tokens|token_adapter", "trained embeddings of some tokens, which are not served"),
    (r"modules_to_save|original_module", "a whole module, trained beside the adapter (modules_to_save)"),
    (r"(^|\.)((embed_tokens|wte|word_embeddings)\.|lm_head\.)weight$", "whole embeddings or a whole "
     "output projection, as training with new tokens saves"),
    (r"\.bias$", "a trained bias of the base, which is not served"),
)  # fmt: skip


# Likewise, where the adapter is not merged into its base.
_MERGED_ALONE = (
    (r"\.lora_magnitude_vector", "magnitudes of DoRA, which are applied to merged weights alone (--merge-adapter)"),
    (r"\.experts(\.|$)", "of a mixture's experts, whose adapters are merged alone (--merge-adapter)"),
    (r"\.kv_b_proj\.", "of latents' expansion (kv_b_proj), which is a part of attention here: it is merged alone "
     "(--merge-adapter)"),
)  # fmt: skip
# What names begin with where the model was trained within another class than it is served as.
_WRAPPERS = (("model.language_model.", "model."), ("language_model.model.", "model."), ("", "model."))


class Factors(NamedTuple):
    """Of one module: B(A x) * scale is added to its output."""

    a: torch.Tensor  # [rank, inputs]
    b: torch.Tensor  # [outputs, rank]
    scale: float
    magnitude: torch.Tensor | None = None  # [outputs], of DoRA: the lengths of the merged weight's rows
    of_embedding: bool = False  # whose weight is [inputs, outputs], since inputs are tokens


@dataclass(frozen=True)
class AdapterTensors:
    """One adapter on the CPU, checked by itself; not yet against a model."""

    source: str  # as errors call it: its folder, but not of what a client has sent, whose folder is the server's
    config: LoraConfig
    by_module: Mapping[str, Factors]  # by names at training time
    digest: bytes  # of all that decides what it adds, DIGEST_BYTES
    base: Mapping[str, torch.Tensor]  # weights of the base that the file has, too, by module

    @classmethod
    def read(cls, folder: Path, *, merged: bool = False) -> AdapterTensors:
        """merged: into the base's weights. Raises ConfigError naming the file, the tensor and what is allowed."""
        config = LoraConfig.read(folder, merged=merged)
        path = folder / TENSOR_FILE
        if not path.is_file():
            others = [one.name for one in sorted(folder.glob("adapter_model.*"))]
            hint = f" ({others[0]} would be unpickled, which runs what it says)" if others else ""
            raise ConfigError(f"{folder} has no {TENSOR_FILE}{hint}; allowed: safetensors, as PEFT's default")
        found: dict[str, dict[str, torch.Tensor]] = {}
        base: dict[str, torch.Tensor] = {}
        for name, tensor in _tensors(path):
            why = _why_refused(name, merged)
            if why is None and (match := _BASE.fullmatch(name)):
                base[match["module"]] = tensor
                continue
            match = _FACTOR.fullmatch(name) or _MAGNITUDE.fullmatch(name)
            if why is not None or match is None:
                why = why or "neither lora_A.weight nor lora_B.weight of a module; allowed: these"
                raise ConfigError(f"{path}: {name} is {why}")
            factors, kind = found.setdefault(match["module"], {}), match.groupdict().get("factor", "magnitude")
            if kind in factors:
                raise ConfigError(f"{path}: {name} is there twice, with and without an adapter's name")
            factors[kind] = tensor
            if ".lora_embedding_" in name:
                factors["embedding"] = tensor
        if not found:
            raise ConfigError(f"{path} has no tensors; allowed: lora_A and lora_B of one module or more")
        by_module = {module: _factors(path, config, module, factors) for module, factors in found.items()}
        return cls(str(folder), config, by_module, _digest(by_module), base)

    @property
    def largest_rank(self) -> int:
        return max(len(one.a) for one in self.by_module.values())


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Of a copy in memory: the file may be written again, and one that is mapped and cut off kills the process."""
    try:
        with open(os.memfd_create("adapter", os.MFD_CLOEXEC), "r+b") as copy:
            with path.open("rb") as original:
                shutil.copyfileobj(original, copy)
            copy.flush()
            yield from _stored(path, f"/proc/self/fd/{copy.fileno()}")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _stored(path: Path, copy: str) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(copy, framework="pt") as file:
        for stored in file.keys():  # noqa: SIM118  (the handle is no dict)
            if not is_bounded(stored):
                raise ConfigError(
                    f"{path}: {stored[:100]!r}... is the name of a tensor; allowed: up to {LONGEST_NAME} "
                    f"printable characters, and numbers of {LONGEST_NUMBER} digits"
                )
            tensor = file.get_tensor(stored)
            if tensor.dtype not in PLAIN_DTYPES:
                raise ConfigError(
                    f"{path}: {stored} has the number format {str(tensor.dtype).removeprefix('torch.')}; allowed: "
                    f"{', '.join(str(one).removeprefix('torch.') for one in PLAIN_DTYPES)}"
                )
            yield stored.removeprefix(_PREFIX), tensor


def _why_refused(name: str, merged: bool) -> str | None:
    table = _REFUSED if merged else (*_MERGED_ALONE, *_REFUSED)
    return next((why for pattern, why in table if re.search(pattern, name)), None)


def module_names(names: TensorNames, module: str) -> Iterator[str]:
    """What a module with this name at training time may be called in this project's checkpoints; names: of these."""
    yield names.here(f"{module}.").removesuffix(".")
    for theirs, ours in _WRAPPERS:
        if module.startswith(theirs):
            yield ours + module.removeprefix(theirs)


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
    magnitude, of_embedding = found.get("magnitude"), "embedding" in found
    if config.has_magnitudes != (magnitude is not None) or (of_embedding and magnitude is not None):
        raise ConfigError(
            f"{path}: {module} has {'no' if magnitude is None else 'a'} lora_magnitude_vector; allowed: one of each "
            "linear layer where use_dora is true"
        )
    if magnitude is not None and magnitude.shape != (len(b),):
        raise ConfigError(
            f"{path}: {module} has lora_magnitude_vector {tuple(magnitude.shape)}; allowed: its {len(b)} outputs"
        )
    return Factors(a, b, config.scale_of(module), magnitude, of_embedding)


def _digest(by_module: Mapping[str, Factors]) -> bytes:
    """Equal for equal additions, whatever the folder's and the adapter's names are."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"minisgl adapter")
    for module, (a, b, scale, *_) in sorted(by_module.items()):  # merged ones need none
        digest.update(f"{module} {a.dtype} {tuple(a.shape)} {b.dtype} {tuple(b.shape)} {scale!r}\n".encode())
        for tensor in (a, b):
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.digest()
