"""Which backends a machine gets, what is said when a package is missing, and the page size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from minisgl_backend.attention.base import AttentionSpec
from minisgl_backend.attention.reference import TorchBackend
from minisgl_backend.attention.registry import AttentionChoice, choose_attention, create_attention
from minisgl_backend.errors import ConfigError


def without(*packages: str) -> Callable[[str], str | None]:
    return lambda package: "ImportError: libnuma.so.1" if package in packages else None


def choose(requested: str, capability: int | None, *missing: str, page_size: int | None = None) -> AttentionChoice:
    return choose_attention(requested, page_size, compute_capability=capability, why_missing=without(*missing))


@pytest.mark.parametrize(
    ("capability", "missing", "pair"),
    [
        (None, (), ("torch", "torch")),
        (100, (), ("trtllm", "trtllm")),
        (103, (), ("trtllm", "trtllm")),
        (120, (), ("fi", "fi")),
        (90, (), ("fa", "triton")),
        (90, ("sgl_kernel",), ("triton", "triton")),
        (90, ("sgl_kernel", "triton"), ("torch", "torch")),
        (89, (), ("fi", "fi")),
        (80, ("flashinfer",), ("triton", "triton")),
        (75, (), ("triton", "triton")),
    ],
)
def test_automatic_choice(capability: int | None, missing: tuple[str, ...], pair: tuple[str, str]) -> None:
    choice = choose("auto", capability, *missing)
    assert (choice.prefill, choice.decode) == pair
    assert bool(choice.warnings) == bool(missing)


def test_the_warning_says_how_to_get_the_better_one() -> None:
    (warning,) = choose("auto", 90, "sgl_kernel").warnings
    assert "pip install sgl-kernel" in warning
    assert "libnuma1" in warning


@pytest.mark.parametrize(
    ("requested", "missing", "remedy"),
    [
        ("fa", "sgl_kernel", "pip install sgl-kernel"),
        ("fa,fi", "flashinfer", "pip install flashinfer-python"),
        ("fa,trtllm", "flashinfer", "pip install flashinfer-python"),
    ],
)
def test_a_named_backend_without_its_package_is_an_error(requested: str, missing: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        choose(requested, 90, missing)


def test_trtllm_without_a_prefill_kernel_names_a_hybrid() -> None:
    with pytest.raises(ConfigError, match=r"no prefill kernel.*fa,trtllm"):
        choose("trtllm", 90)
    assert choose("fa,trtllm", 90).decode == "trtllm"


@pytest.mark.parametrize("requested", ["fa", "torch,triton", "fi"])
def test_gpu_backends_are_refused_on_cpu(requested: str) -> None:
    with pytest.raises(ConfigError, match="allowed on CPU: torch"):
        choose(requested, None)


def test_unknown_name() -> None:
    with pytest.raises(ConfigError, match="attention_backend is 'fast'"):
        choose("fast", 90)


@pytest.mark.parametrize(
    ("requested", "wanted", "size", "warned"),
    [
        ("torch", None, 16, False),
        ("fa,fi", None, 64, False),
        ("fa,fi", 1, 1, False),
        ("trtllm", None, 64, False),
        ("trtllm", 32, 32, False),
        ("trtllm", 1, 64, True),
        ("fa,trtllm", 128, 64, True),
        ("trtllm,torch", None, 16, False),
        ("trtllm,fi", 8, 64, True),
    ],
)
def test_page_size(requested: str, wanted: int | None, size: int, warned: bool) -> None:
    choice = choose(requested, 100, page_size=wanted)
    assert choice.page_size == size
    assert bool(choice.warnings) == warned


def test_one_object_serves_both_parts() -> None:
    spec = AttentionSpec(
        num_layers=1,
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=8,
        page_size=16,
        max_seq_len=64,
        max_rows=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    attention = create_attention("torch", "torch", spec)
    assert isinstance(attention.prefill_backend, TorchBackend)
    assert attention.decode_backend is attention.prefill_backend
