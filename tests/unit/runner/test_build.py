"""From settings to a ready runner on the CPU, and how many pages it gets."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from hand_made_plans import Driver

from minisgl_backend.attention.base import AttentionSpec
from minisgl_backend.attention.reference import TorchBackend
from minisgl_backend.config import EngineConfig
from minisgl_backend.environment import Environment
from minisgl_backend.errors import ConfigError
from minisgl_backend.kv.pool import bytes_per_page
from minisgl_backend.models.build import attention_spec
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.request import SamplingParams
from minisgl_backend.runner.graphs.pieces import EagerPieces
from minisgl_backend.runner.graphs.whole import EagerGraphRunner
from minisgl_backend.runner.start import build, memory
from minisgl_backend.runner.start.build import build_runner
from minisgl_backend.runner.start.device import MachineFacts, is_out_of_memory
from minisgl_backend.runner.start.memory import choose_graph_max_bs, choose_num_pages, prompt_plan, worst_plans
from minisgl_backend.runner.start.parts import StartProgress
from minisgl_backend.runner.start.resolve import resolve
from minisgl_backend.runner.start.runtime_config import RuntimeConfig
from minisgl_backend.tensor_parallel import TensorParallel

CPU = torch.device("cpu")


def runtime_for(folder: Path, **options: object) -> tuple[RuntimeConfig, ModelConfig]:
    model = ModelConfig.load(folder)
    config = EngineConfig(**{"max_running_requests": 4, **options})  # type: ignore[arg-type]
    facts = MachineFacts(kind="cpu", name="CPU", capability=None, count=1, multiprocessors=0, bfloat16=lambda: False)
    environment = Environment(overlap=True, log_level="INFO", flashinfer_tensor_cores=None)
    return resolve(config, folder, model, facts, environment), model


def test_a_built_runner_runs(tiny_model_dir: Path) -> None:
    read: list[tuple[int, int]] = []
    phases: list[str] = []
    progress = StartProgress(weights=lambda *done: read.append(done), phase_ended=phases.append)
    runner = build_runner(*runtime_for(tiny_model_dir), progress=progress)
    assert phases == ["weights", "choice of kernels and graphs"]
    assert runner.num_pages == 2 * 4 * 256 // 16  # four sequences, and as much for prefixes
    assert read[-1][0] == read[-1][1] > 0
    driver = Driver(16)
    driver.admit(0, [1, 2, 3], SamplingParams(temperature=0.0))
    result = runner.execute(runner.prepare(driver.plan(prefill={0: 3}))).result()
    assert result.token_ids.shape == (1,)


def test_num_pages_is_obeyed(tiny_model_dir: Path) -> None:
    runtime, model = runtime_for(tiny_model_dir, num_pages=7, page_size=4, dummy_weights=True)
    assert build_runner(runtime, model).num_pages == 7


def test_an_impossible_pool_is_refused_with_a_remedy(tiny_model_dir: Path) -> None:
    runtime, model = runtime_for(tiny_model_dir, num_pages=2**26)
    with pytest.raises(ConfigError, match=r"out of memory.*num_pages \(67108864\).*max_prefill_length"):
        build_runner(runtime, model)


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "NCCL error: unhandled cuda error. Last error: Cuda failure 2 'out of memory'",
        "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes",
    ],
)
def test_who_has_no_memory_is_understood(said: str) -> None:
    assert is_out_of_memory(RuntimeError(said))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_pages_follow_from_memory(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine tenths of what was free, less the weights, less a step, less the padding page."""
    runtime, model = runtime_for(tiny_model_dir, max_running_requests=4096, memory_ratio=0.5)
    spec = attention_spec(
        model, AttentionSpec(page_size=16, max_seq_len=256, max_rows=5, dtype=torch.float32, device=CPU), tp_size=1
    )
    page = bytes_per_page(spec.places, 16)
    on_gpu = dataclasses.replace(spec, device=torch.device("cuda"))
    monkeypatch.setattr(memory, "free_bytes", lambda device: 900 * page)
    assert (
        choose_num_pages(runtime, on_gpu, on_gpu.places, free_at_start=1000 * page, step_bytes=50 * page)
        == 500 - 100 - 50 - 1
    )
    with pytest.raises(ConfigError, match="memory_ratio"):
        choose_num_pages(runtime, on_gpu, on_gpu.places, free_at_start=1000 * page, step_bytes=399 * page)
    assert choose_num_pages(runtime, spec, spec.places, free_at_start=0, step_bytes=0) == 450 - 1


@pytest.mark.parametrize(
    ("max_running", "free_now", "expected"),
    [(256, 139 << 30, 256), (1000, 139 << 30, 256), (100, 139 << 30, 100), (256, 5 << 30, 128), (256, 1 << 20, 0)],
)
def test_the_largest_graph_follows_from_memory(max_running: int, free_now: int, expected: int) -> None:
    """A step of 256 sequences that takes 1 GiB."""
    assert choose_graph_max_bs((max_running << 30) // 256, max_running, free_now) == expected


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """A device on which mixed steps take 100 bytes, decode steps 80 and pieces 10; the sizes of graphs as captured."""
    captured: list[tuple[int, ...]] = []
    peaks = iter((100, 80, 10))
    load = build.load_parts

    class Graphs(EagerGraphRunner):
        def __init__(self, sizes: tuple[int, ...], on_progress: object, draft_sizes: tuple[int, ...]) -> None:
            super().__init__(sizes, draft_sizes)
            captured.append(sizes)

    for name, value in (("synchronize", None), ("memory_allocated", 1000), ("reset_peak_memory_stats", None)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1000 + next(peaks))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(TorchBackend, "supports_graphs", True)
    monkeypatch.setattr(build, "load_parts", lambda start: load(dataclasses.replace(start, device=CPU)))
    monkeypatch.setattr(build, "repack_weights", lambda modules, room: None)
    monkeypatch.setattr(build, "CudaGraphRunner", Graphs)
    monkeypatch.setattr(build, "PiecewiseCudaGraph", EagerPieces)
    return captured


@pytest.mark.parametrize(
    ("largest", "tokens", "free", "sizes", "reserved"),
    [
        (None, 64, 10_000, [(1, 2, 4, 8)], 100 + 80 + 10),
        (None, 64, 500, [(1, 2, 4, 5)], 100 + 50 + 10),
        (None, 64, 50, [], 100 + 10),
        (2, 64, 50, [(1, 2)], 100 + 20 + 10),
        (0, 0, 10_000, [], 100),
    ],
)
def test_a_start_reserves_memory_for_the_graphs_that_it_captures(
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    fake_gpu: list[tuple[int, ...]],
    largest: int | None,
    tokens: int,
    free: int,
    sizes: list[tuple[int, ...]],
    reserved: int,
) -> None:
    """Eight sequences at most."""
    asked: list[int] = []

    def num_pages(runtime: object, spec: object, layouts: object, free_at_start: int, step_bytes: int) -> int:
        asked.append(step_bytes)
        return 9

    runtime, model = runtime_for(tiny_model_dir, max_running_requests=8, max_prefill_length=64)
    runtime = dataclasses.replace(runtime, cuda_graph_max_bs=largest, cuda_graph_max_tokens=tokens)
    monkeypatch.setattr(build, "free_bytes", lambda device: free)
    monkeypatch.setattr(build, "choose_num_pages", num_pages)
    build._build(runtime, model, torch.device("cuda"), TensorParallel.single(), StartProgress())
    assert fake_gpu == sizes
    assert asked == [reserved]


@pytest.mark.parametrize(
    ("max_running", "max_prefill", "max_seq_len"), [(4, 100, 256), (2, 4096, 256), (1, 8, 4), (8, 300, 100)]
)
def test_worst_plans_fill_the_step(tiny_model_dir: Path, max_running: int, max_prefill: int, max_seq_len: int) -> None:
    mixed, decode = worst_plans(max_running, max_prefill, max_seq_len)
    assert len(mixed.sampled_rows) == len(decode.decode_rows) == max_running
    tokens = sum(len(chunk.token_ids) for chunk in mixed.prefill)
    assert tokens == min(max_prefill, max_running * (max_seq_len - 1))
    assert all(chunk.end < max_seq_len for chunk in mixed.prefill)
    runtime, model = runtime_for(
        tiny_model_dir, num_pages=1, max_running_requests=max_running, max_seq_len_override=max_seq_len
    )
    runner = build_runner(runtime, model)
    for plan in (mixed, decode):
        assert len(runner.execute(runner.prepare(plan)).result().token_ids) == max_running


@pytest.mark.parametrize(
    ("tokens", "max_running", "beside", "lengths"),
    [
        (100, 8, 0, [100]),
        (300, 8, 0, [127, 127, 46]),
        (900, 2, 0, [127, 127]),
        (100, 8, 1, [100]),
        (300, 8, 2, [127, 127, 46]),
        (900, 3, 1, [127, 127]),
    ],
)
def test_a_prompt_plan_samples_nothing(tokens: int, max_running: int, beside: int, lengths: list[int]) -> None:
    """Of the prompts; whoever decodes beside them has one row of the others."""
    plan = prompt_plan(np.zeros(tokens, dtype=np.int32), max_running, max_seq_len=128, beside=beside)
    assert [len(chunk.token_ids) for chunk in plan.prefill] == lengths
    assert [len(admitted.token_ids) for admitted in plan.admitted] == [*lengths, *[1] * beside]
    decoding = list(range(len(lengths), len(lengths) + beside))
    assert list(plan.sampled_rows) == list(plan.decode_rows) == decoding
