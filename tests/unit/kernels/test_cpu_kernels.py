"""The compiled CPU kernels against torch in float64, and what happens where they cannot be compiled."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backend.kernels.cpu_library import cpu_library, multiplies_bfloat16
from minisgl_backend.kernels.cpu_ops import MOST_ROWS, CpuOps
from minisgl_backend.kernels.ops import Ops, select_ops
from minisgl_backend.kernels.torch_ops import TorchOps

CPU = torch.device("cpu")
EPS = 1e-6


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    library = cpu_library()
    if library is None:
        pytest.skip("no AVX-512 BF16 or no C++ compiler here")
    return CpuOps(library)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


def numbers(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).bfloat16()


@pytest.mark.parametrize("rows", [*range(1, 12), 16, 17, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize("kind", ["plain", "norm", "bias", "residual", "gated", "gated norm", "bias residual norm"])
@pytest.mark.parametrize(("size", "outputs"), [(256, 100), (32, 2), (1024, 62)])
def test_linear(ops: CpuOps, rows: int, kind: str, size: int, outputs: int) -> None:
    x, weight = numbers(rows, size), numbers(outputs, size, scale=size**-0.5)
    options: dict[str, Any] = {"gated": "gated" in kind}
    if "norm" in kind:
        options |= {"norm_weight": numbers(size), "eps": EPS}
    if "bias" in kind:
        options["bias"] = numbers(outputs)
    if "residual" in kind:
        options["residual"] = numbers(rows, outputs)
    exact = {name: one.double() if torch.is_tensor(one) else one for name, one in options.items()}
    expected = TorchOps().linear(x.double(), weight.double(), **exact)
    assert_close(ops.linear(x, weight, **options), expected)


def test_what_the_kernels_do_not_serve_is_torchs(ops: CpuOps) -> None:
    for x, weight in (
        (torch.randn(2, 64), torch.randn(6, 64)),
        (numbers(2, 40), numbers(6, 40)),
        (numbers(64, 2).t(), numbers(6, 64)),
        (numbers(0, 64), numbers(6, 64)),
    ):
        torch.testing.assert_close(ops.linear(x, weight), TorchOps().linear(x, weight))
    for size in (64, 40):
        x = numbers(3, size)
        assert_close(
            ops.rms_norm(x, numbers(size).fill_(0.5), EPS),
            TorchOps().rms_norm(x.double(), torch.full((size,), 0.5), EPS),
        )


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("tokens", "head_dim", "page_size"), [(1, 128, 16), (5, 64, 1), (70, 128, 64), (3, 40, 16)])
def test_rope_store(ops: CpuOps, norms: bool, tokens: int, head_dim: int, page_size: int) -> None:
    q_heads, kv_heads, pages = 4, 2, 128
    qkv = numbers(tokens, (q_heads + 2 * kv_heads) * head_dim)
    weights = (numbers(head_dim), numbers(head_dim)) if norms else (None, None)
    table = torch.randn(300, head_dim)
    positions = torch.randint(300, (tokens,), dtype=torch.int32)
    slots = torch.randperm(pages * page_size)[:tokens].int()

    def results(of: Ops) -> list[torch.Tensor]:
        caches = [torch.zeros(pages, kv_heads, page_size, head_dim, dtype=torch.bfloat16) for _ in range(2)]
        q = of.rope_store(qkv.clone(), *weights, table, positions, slots, *caches, q_heads, EPS)
        return [q, *caches]

    for found, expected in zip(results(ops), results(TorchOps()), strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize(("rows", "size"), [(1, 5), (3, 160), (8, 151936)])
def test_argmax(ops: CpuOps, rows: int, size: int) -> None:
    logits = numbers(rows, size)
    token_ids = torch.empty((2, rows), dtype=torch.int32)

    def found() -> list[list[int]]:
        cpu_library().minisgl_argmax(logits.data_ptr(), rows, size, token_ids.data_ptr())  # type: ignore[union-attr]
        return token_ids.tolist()

    assert found() == [[int((line == line.max()).nonzero()[0]) for line in logits], [1] * rows]
    logits[:, 2:] = 100.0
    assert found() == [[2] * rows, [1] * rows], "of equal logits the lower id"
    for broken in (float("nan"), float("inf")):
        logits[0, size - 1] = broken
        assert found()[1] == [0] + [1] * (rows - 1)
    logits[0] = float("-inf")
    assert found()[1][0] == 0


def test_a_processor_is_known_by_its_flags(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert not multiplies_bfloat16(cpuinfo)
    for flags, expected in (
        ("avx2 avx512f avx512bw avx512vl avx512_bf16", True),
        ("avx2 avx512f avx512bw avx512vl", False),
        ("avx2", False),
    ):
        cpuinfo.write_text(f"processor : 0\nflags\t\t: fpu {flags}\n")
        assert multiplies_bfloat16(cpuinfo) == expected


@pytest.fixture
def another_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """As if this process began, with nothing kept. Yields where compiled kernels are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu_library.cache_clear()
    yield tmp_path / "minisgl"
    cpu_library.cache_clear()


def test_a_compiler_is_asked_once(ops: CpuOps, another_start: Path) -> None:
    assert cpu_library() is not None
    (kept,) = another_start.iterdir()
    cpu_library.cache_clear()
    before = kept.stat().st_mtime_ns
    assert cpu_library() is not None
    assert kept.stat().st_mtime_ns == before


def test_a_broken_compiler_costs_speed_alone(
    ops: CpuOps, another_start: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho no headers >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with caplog.at_level(logging.WARNING):
        assert type(select_ops(CPU, 64)) is TorchOps
    assert "no headers" in caplog.text


def test_no_compiler_is_no_error(another_start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    assert cpu_library() is None


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """To bfloat16's 8 bits, and what rounding in between costs."""
    largest = max(1.0, float(expected.abs().max()))  # sums of numbers around 1 may be small themselves
    torch.testing.assert_close(found.double(), expected.double(), rtol=2e-2, atol=2e-2 * largest)
