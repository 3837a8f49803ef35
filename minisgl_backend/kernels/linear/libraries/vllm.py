"""The library of an installed vLLM: where it is, and whether its operators have the known signatures.

The package `vllm` is never imported. Only one of its libraries is loaded, which uses torch's stable C interface: so
neither vLLM's Python, nor its dependencies, nor the torch that it pins has to be installed. Its operators are used only
if their signatures are those that marlin.py and machete.py call; for other versions a warning is logged.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

log = logging.getLogger(__name__)

PACKAGE = "vllm"
LIBRARY = "_C_stable_libtorch.abi3.so"
NAMESPACE = "_C"
REMEDY = "pip install --no-deps vllm==0.26.0, whose library has it, or pip uninstall vllm"
# Operators by kernel, as of vLLM 0.26.
SIGNATURES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "marlin": {
            "gptq_marlin_repack": "(Tensor b_q_weight, Tensor perm, SymInt size_k, SymInt size_n, int num_bits, "
            "bool is_a_8bit) -> Tensor",
            "marlin_gemm": "(Tensor a, Tensor? c_or_none, Tensor b_q_weight, Tensor? b_bias_or_none, Tensor b_scales, "
            "Tensor? a_scales, Tensor? global_scale, Tensor? b_zeros_or_none, Tensor? g_idx_or_none, "
            "Tensor? perm_or_none, Tensor workspace, int b_type_id, SymInt size_m, SymInt size_n, SymInt size_k, "
            "bool is_k_full, bool use_atomic_add, bool use_fp32_reduce, bool is_zp_float) -> Tensor",
        },
        "machete": {
            "machete_prepack_B": "(Tensor B, ScalarType a_type, int b_type, ScalarType? group_scales_type) -> Tensor",
            "machete_mm": "(Tensor A, Tensor B, int b_type, ScalarType? out_type, Tensor? group_scales, "
            "Tensor? group_zeros, int? group_size, Tensor? channel_scales, Tensor? token_scales, str? schedule) "
            "-> Tensor",
        },
    }
)


def find_package() -> Path | None:
    """The folder of the installed package; None: there is none."""
    spec = None
    with suppress(ImportError, ValueError):  # half removed, or a stub
        spec = importlib.util.find_spec(PACKAGE)
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    return Path(places[0]) if places else None


def is_installed() -> bool:
    """Whether the library's file exists; `operators` checks its content."""
    folder = find_package()
    return folder is not None and (folder / LIBRARY).is_file()


@cache
def operators(kernel: str) -> Any | None:
    """Namespace with the operators of one of SIGNATURES as attributes; None: no vLLM, or another version of it, which
    is logged once."""
    folder = find_package()
    if folder is None:
        return None
    refusal = _load(folder / LIBRARY) or unknown_operators(NAMESPACE, kernel)
    if refusal is None:
        return getattr(torch.ops, NAMESPACE)
    log.warning(
        "vllm %s in %s has no %s that is known here (%s): other kernels multiply with 4-bit weights; %s",
        _version(), folder, kernel, refusal, REMEDY,
    )  # fmt: skip
    return None


def unknown_operators(namespace: str, kernel: str) -> str | None:
    """What is wrong with the operators of a loaded library; None: they are those of SIGNATURES."""
    for name, signature in SIGNATURES[kernel].items():
        operator = getattr(getattr(torch.ops, namespace), name, None)
        if operator is None:
            return f"it has no operator {name}"
        expected = f"{namespace}::{name}{signature}"
        found = str(operator.default._schema) if "default" in operator.overloads() else "another overload"
        if found != expected:
            return f"{name} has other arguments: {found}"
    return None


def _load(library: Path) -> str | None:
    """Why it cannot be loaded; None: it is."""
    if not library.is_file():
        return f"it has no file {library.name}"
    try:
        torch.ops.load_library(str(library))
    except Exception as error:  # compiled libraries fail in many ways
        return " ".join(str(error.__cause__ or error).split())[:300]  # torch's own message has no reason
    return None


def _version() -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(PACKAGE)
    return "(version unknown)"
