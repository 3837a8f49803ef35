"""The compiled CPU kernels against torch in float64, and what happens where they cannot be compiled."""

from __future__ import annotations

import ctypes
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backend.config import EngineConfig
from minisgl_backend.engine.build import resolve_options
from minisgl_backend.environment import Environment
from minisgl_backend.kernels.cpu import library as library_module
from minisgl_backend.kernels.cpu import sources
from minisgl_backend.kernels.cpu.library import (
    INSTRUCTION_SETS,
    CpuLibrary,
    cpu_kernels,
    cpu_library,
    instruction_set,
)
from minisgl_backend.kernels.cpu.ops import HALF, CpuOps
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.choose import CPU_ROWS
from minisgl_backend.kernels.linear.kernels import GemmDevice, PlainKernels
from minisgl_backend.kernels.ops import Ops, QKNormRope, TokenPlaces
from minisgl_backend.kernels.sampling import layout
from minisgl_backend.kernels.select import select_ops
from minisgl_backend.kernels.torch_ops import TorchOps
from minisgl_backend.kv.layout import LayerKV
from minisgl_backend.runner.start.device import MachineFacts
from minisgl_backend.sampling.sampler import Sampler

CPU = torch.device("cpu")
EPS = 1e-6


@pytest.fixture(scope="module", params=[one.name for one in INSTRUCTION_SETS])
def ops(request: pytest.FixtureRequest) -> Iterator[CpuOps]:
    """Of each build that runs here. Their threads are torch's: several here, whatever the other tests take."""
    best, wanted = instruction_set(), next(one for one in INSTRUCTION_SETS if one.name == request.param)
    if best is None or not wanted.needs <= best.needs or cpu_library() is None:
        pytest.skip(f"no {request.param} or no C++ compiler here")
    library = library_module._library(library_module._compilers()[0], wanted)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    ops = CpuOps(library)
    ops.facts = DeviceFacts.cpu(bfloat16_units=request.param == "avx512")
    yield ops
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


def numbers(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).bfloat16()


@pytest.mark.parametrize("rows", [*range(1, 12), 16, 17, CPU_ROWS, CPU_ROWS + 1])
@pytest.mark.parametrize(
    "kind", ["plain", "norm", "bias", "residual", "gated", "gated norm", "gated tanh", "bias residual norm"]
)
@pytest.mark.parametrize(("size", "outputs"), [(256, 100), (32, 2), (1024, 62)])
def test_linear(ops: CpuOps, rows: int, kind: str, size: int, outputs: int) -> None:
    x, weight = numbers(rows, size), numbers(outputs, size, scale=size**-0.5)
    options: dict[str, Any] = {"activation": ("gelu_tanh" if "tanh" in kind else "silu") if "gated" in kind else None}
    if "norm" in kind:
        options |= {"norm_weight": numbers(size), "eps": EPS}
    if "bias" in kind:
        options["bias"] = numbers(outputs)
    if "residual" in kind:
        options["residual"] = numbers(rows, outputs)
    exact = {name: one.double() if torch.is_tensor(one) else one for name, one in options.items()}
    expected = PlainKernels(GemmDevice(TorchOps())).linear(x.double(), weight.double(), GemmCall(**exact))
    assert_close(PlainKernels(GemmDevice(ops)).linear(x, weight, GemmCall(**options)), expected)


def test_what_the_kernels_do_not_serve_is_torchs(ops: CpuOps) -> None:
    for x, weight in (
        (torch.randn(2, 64), torch.randn(6, 64)),
        (numbers(2, 40), numbers(6, 40)),
        (numbers(64, 2).t(), numbers(6, 64)),
        (numbers(0, 64), numbers(6, 64)),
    ):
        torch.testing.assert_close(
            PlainKernels(GemmDevice(ops)).linear(x, weight), PlainKernels(GemmDevice(TorchOps())).linear(x, weight)
        )
    for size in (64, 40):
        x = numbers(3, size)
        assert_close(
            ops.rms_norm(x, numbers(size).fill_(0.5), EPS),
            TorchOps().rms_norm(x.double(), torch.full((size,), 0.5), EPS),
        )


@pytest.mark.parametrize("of_weight", [*HALF, torch.float32])
@pytest.mark.parametrize("dtype", list(HALF))
def test_norms(ops: CpuOps, dtype: torch.dtype, of_weight: torch.dtype) -> None:
    """Weights in float32 are those that something was added to, as Gemma's."""
    for rows, size in ((1, 64), (5, 640), (70, 640), (3, 40)):
        x, hidden, weight = numbers(rows, size).to(dtype), numbers(rows, size).to(dtype), numbers(size).to(of_weight)
        assert_close(ops.rms_norm(x, weight, EPS), TorchOps().rms_norm(x, weight, EPS))
        for multiplier in (1.0, 0.3):
            expected = TorchOps().add_norm(hidden, x, weight, EPS, multiplier)
            assert_close(ops.add_norm(hidden.clone(), x, weight, EPS, multiplier), expected)


@pytest.mark.parametrize("norms", [None, "as numbers", "float32"])
@pytest.mark.parametrize(("tokens", "head_dim", "page_size"), [(1, 128, 16), (5, 64, 1), (70, 128, 64), (3, 40, 16)])
@pytest.mark.parametrize("dtype", list(HALF))
def test_rope_store(
    ops: CpuOps, norms: str | None, tokens: int, head_dim: int, page_size: int, dtype: torch.dtype
) -> None:
    q_heads, kv_heads, pages = 4, 2, 128
    qkv = numbers(tokens, (q_heads + 2 * kv_heads) * head_dim).to(dtype)
    of_norm = torch.float32 if norms == "float32" else dtype
    weights = (numbers(head_dim).to(of_norm), numbers(head_dim).to(of_norm)) if norms else (None, None)
    table = torch.randn(300, head_dim)
    positions = torch.randint(300, (tokens,), dtype=torch.int32)
    slots = torch.randperm(pages * page_size)[:tokens].int()

    def results(of: Ops) -> list[torch.Tensor]:
        caches = [torch.zeros(pages, kv_heads, page_size, head_dim, dtype=dtype) for _ in range(2)]
        rotation = QKNormRope(q_norm=weights[0], k_norm=weights[1], cos_sin=table, eps=EPS)
        q = of.rope_store(qkv.clone(), rotation, TokenPlaces(positions, slots), LayerKV(*caches), q_heads)
        return [q, *caches]

    for found, expected in zip(results(ops), results(TorchOps()), strict=True):
        assert_close(found, expected)


def sampled(ops: CpuOps, logits: torch.Tensor, params: torch.Tensor, positions: torch.Tensor) -> list[list[int]]:
    """Of the rows of `params` in reverse, whose row i has logits[-1 - i]."""
    count, size = logits.shape
    rows, token_ids = torch.arange(count - 1, -1, -1, dtype=torch.int32), torch.empty((2, count), dtype=torch.int32)
    ops.library.minisgl_sample(
        HALF[logits.dtype], logits.data_ptr(), count, size, rows.data_ptr(), positions.data_ptr(), params.data_ptr(),
        layout.NUM_PARAMS, token_ids.data_ptr(),
    )  # fmt: skip
    return token_ids.tolist()


@pytest.mark.parametrize(("rows", "size"), [(1, 5), (3, 160), (8, 151936)])
@pytest.mark.parametrize("dtype", list(HALF))
def test_greedy_sampling(ops: CpuOps, rows: int, size: int, dtype: torch.dtype) -> None:
    logits, params = numbers(rows, size).to(dtype), torch.zeros(rows, layout.NUM_PARAMS, dtype=torch.int32)

    def found() -> list[list[int]]:
        return sampled(ops, logits, params, torch.arange(rows, dtype=torch.int32))

    assert found() == [[int((line == line.max()).nonzero()[0]) for line in logits], [1] * rows]
    logits[:, 2:] = 100.0
    assert found() == [[2] * rows, [1] * rows], "of equal logits the lower id"
    for broken in (float("nan"), float("inf")):
        logits[0, size - 1] = broken
        assert found()[1] == [0] + [1] * (rows - 1)
    logits[0] = float("-inf")
    assert found()[1][0] == 0


@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 5.0, 1e4])
@pytest.mark.parametrize("size", [7, 160, 50001])
def test_drawn_tokens_are_torchs(ops: CpuOps, temperature: float, size: int) -> None:
    rows, dtype = 24, torch.bfloat16
    logits = numbers(rows, size, scale=4.0).to(dtype)
    logits[3, 1:] = float("-inf")
    params = torch.randint(-(2**31), 2**31 - 1, (rows, layout.NUM_PARAMS), dtype=torch.int32)
    params.view(torch.float32)[:, layout.TEMPERATURE] = temperature
    params.view(torch.float32)[5, layout.TEMPERATURE] = 0.0
    positions = torch.randint(100000, (rows,), dtype=torch.int32)
    expected = Sampler._draw(None, logits.float(), params.flip(0), positions, None)  # type: ignore[arg-type]
    assert sampled(ops, logits, params, positions) == expected.tolist()


def test_a_processor_is_known_by_its_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> str | None:
        best = instruction_set(cpuinfo)
        return best and best.name

    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    cpuinfo = tmp_path / "cpuinfo"
    assert found() is None
    avx2 = "avx2 fma f16c bmi1 bmi2"
    avx512 = f"{avx2} avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni"
    for flags, expected in ((avx512, "avx2"), (avx2, "avx2"), ("avx fma", None), (f"{avx512} avx512_bf16", "avx512")):
        cpuinfo.write_text(f"processor : 0\nflags\t\t: fpu {flags}\n")
        assert found() == expected
    for told, allowed in (("avx2", "avx2"), ("default", None)):
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", told)
        assert found() == allowed, "torch's own variable counts"


@pytest.fixture
def another_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """As if this process began, with nothing kept, on a processor that has what is needed. The source is functions
    that do nothing: they compile faster. Yields where compiled kernels are kept."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler here")
    source = tmp_path / "empty.cpp"
    source.write_text("".join(f'extern "C" void {name}() {{}}\n' for name in library_module._ARGUMENTS))
    monkeypatch.setattr(sources, "SOURCES", (source,))
    monkeypatch.setattr(library_module, "instruction_set", lambda: INSTRUCTION_SETS[-1])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    cpu_kernels.cache_clear()
    yield tmp_path / "minisgl"
    cpu_kernels.cache_clear()


def compiler(path: Path, script: str) -> str:
    """A program that is found as a compiler; the folder is to be on PATH, or the file CXX."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_compiler_is_asked_once(another_start: Path) -> None:
    assert cpu_library() is not None
    (kept,) = another_start.iterdir()
    assert another_start.stat().st_mode & 0o777 == 0o700
    cpu_kernels.cache_clear()
    before = kept.stat().st_mtime_ns
    assert cpu_library() is not None
    assert kept.stat().st_mtime_ns == before


@pytest.mark.parametrize("packed", ["whole", "of other sources", "no library"])
def test_a_wheels_build_needs_no_compiler(
    packed: str, another_start: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiled = tmp_path / "compiled"
    compiled.mkdir()
    instructions = INSTRUCTION_SETS[-1]
    built = library_module._built(library_module._compilers()[0], instructions, compiled)
    monkeypatch.setattr(library_module, "PACKED", tmp_path / "packed")
    monkeypatch.setenv("PATH", "/nowhere")
    target = tmp_path / "packed" / sources.packed_name(instructions)
    target.parent.mkdir()
    if packed == "no library":
        target.write_text("none")
    else:
        shutil.copy(built, target if packed == "whole" else target.with_stem("cpu-avx2-0"))
    cpu_kernels.cache_clear()
    assert (cpu_library() is not None) == (packed == "whole")
    assert not another_start.exists()


@pytest.mark.parametrize("place", ["no folder", "not absolute", "written by others", "a link", "nothing runs there"])
def test_where_nothing_can_be_kept_they_are_compiled_at_each_start(
    place: str, another_start: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if place == "no folder":
        another_start.write_text("a file, as a folder that cannot be made")
    elif place == "not absolute":  # what is left of ~/.cache without a home
        monkeypatch.setenv("XDG_CACHE_HOME", "~/.cache")
        monkeypatch.chdir(tmp_path)
    elif place == "written by others":
        another_start.mkdir()
        another_start.chmod(0o777)
    elif place == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        another_start.symlink_to(tmp_path / "elsewhere")
    else:

        def refuse(name: str) -> CpuLibrary:
            if Path(name).parent == another_start:
                raise OSError("failed to map segment from shared object")
            return CpuLibrary(name)

        monkeypatch.setattr("minisgl_backend.kernels.cpu.library.CpuLibrary", refuse)
    before = sorted(tmp_path.rglob("*"))
    assert cpu_library() is not None
    if place != "nothing runs there":
        assert sorted(tmp_path.rglob("*")) == before, "nothing is written there"


@pytest.mark.parametrize("left", [0.0, 0.01, 0.5, 0.99])
def test_a_damaged_file_is_compiled_anew(
    left: float, another_start: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert cpu_library() is not None
    (first,) = another_start.iterdir()
    name, content = first.name, first.read_bytes()
    # Elsewhere: a file of this name is loaded already.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
    kept = tmp_path / "second" / "minisgl" / name
    kept.parent.mkdir(mode=0o700, parents=True)
    kept.write_bytes(content[: int(left * len(content))])
    kept.chmod(0o600)
    cpu_kernels.cache_clear()
    assert cpu_library() is not None
    ctypes.CDLL(str(kept))
    assert [path.name for path in kept.parent.iterdir()] == [name]


def test_a_file_that_others_may_write_is_not_loaded(another_start: Path) -> None:
    assert cpu_library() is not None
    (kept,) = another_start.iterdir()
    kept.chmod(0o666)
    cpu_kernels.cache_clear()
    before = kept.stat().st_ino
    assert cpu_library() is not None
    assert kept.stat().st_ino != before
    assert kept.stat().st_mode & 0o777 == 0o600


def test_the_compiler_of_cxx_may_have_arguments(
    another_start: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    monkeypatch.setenv("CXX", compiler(tmp_path / "ccache", f'echo "$1" >> {calls}; exec "$@"') + " g++")
    assert cpu_library() is not None
    assert set(calls.read_text().split()) == {"g++"}


def test_where_the_compiler_of_cxx_fails_another_is_taken(
    another_start: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path / "mine", "echo no headers >&2; exit 1"))
    with caplog.at_level(logging.WARNING):
        assert type(select_ops(CPU, 64, torch.bfloat16)) is CpuOps
    assert not caplog.text


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo no headers >&2; exit 1", ["cannot compile", "no headers"]),
        ("exit 3", ["cannot compile", "exit status 3"]),
        ('while [ $# -gt 1 ]; do shift; done; case "$1" in /*) echo no library > "$1";; esac', ["cannot be loaded"]),
    ],
)
def test_a_broken_compiler_costs_speed_alone(
    script: str,
    words: list[str],
    another_start: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiler(tmp_path / "bin" / "g++", script)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with caplog.at_level(logging.WARNING):
        assert not MachineFacts.detect().bfloat16() or torch.cuda.is_available()
        assert type(select_ops(CPU, 64, torch.bfloat16)) is TorchOps
    assert len(caplog.records) == 1
    for word in words:
        assert word in caplog.text
        assert word in cpu_kernels().refusal


def test_other_formats_neither_compile_nor_warn(
    another_start: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiler(tmp_path / "bin" / "g++", f": > {tmp_path}/asked; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    environment = Environment.read()
    with caplog.at_level(logging.WARNING):
        runtime, _ = resolve_options(EngineConfig(dtype="float32"), environment)
        assert type(select_ops(CPU, 64, torch.float32)) is TorchOps
    assert runtime.dtype == "float32"
    assert not (tmp_path / "asked").exists()
    assert not caplog.text
    resolve_options(EngineConfig(), environment)
    assert (tmp_path / "asked").exists() or torch.cuda.is_available()


def test_no_compiler_is_no_error(another_start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for wanted in ("", "g++", "'g++"):
        monkeypatch.setenv("CXX", wanted)
        cpu_kernels.cache_clear()
        assert cpu_library() is None
        assert cpu_kernels().refusal == "no C++ compiler is installed"
        assert "none, since no C++ compiler is installed: weights become float32" in str(cpu_kernels())


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """To bfloat16's 8 bits, and what rounding in between costs."""
    largest = max(1.0, float(expected.abs().max()))  # sums of numbers around 1 may be small themselves
    torch.testing.assert_close(found.double(), expected.double(), rtol=2e-2, atol=2e-2 * largest)
