"""From settings to a ready runner on the CPU, and how many pages it gets."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hand_made_plans import Driver

from minisgl_backend.attention.kv_pool import KVPool
from minisgl_backend.config import EngineConfig, Environment, RuntimeConfig
from minisgl_backend.errors import ConfigError
from minisgl_backend.models.build import attention_spec
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.request import SamplingParams
from minisgl_backend.runner import memory
from minisgl_backend.runner.build import StartProgress, build_runner
from minisgl_backend.runner.device import DeviceFacts
from minisgl_backend.runner.memory import choose_num_pages, prompt_plan, worst_plans
from minisgl_backend.runner.resolve import resolve

CPU = torch.device("cpu")


def runtime_for(folder: Path, **options: object) -> tuple[RuntimeConfig, ModelConfig]:
    model = ModelConfig.load(folder)
    config = EngineConfig(**{"max_running_requests": 4, **options})  # type: ignore[arg-type]
    facts = DeviceFacts(
        kind="cpu", name="CPU", capability=None, count=1, bfloat16=False, total_bytes=1 << 33, free_bytes=1 << 32
    )
    environment = Environment(overlap=True, log_level="INFO", flashinfer_tensor_cores=None)
    return resolve(config, folder, model, facts, environment), model


def test_a_built_runner_runs(tiny_model_dir: Path) -> None:
    read: list[tuple[int, int]] = []
    runner = build_runner(*runtime_for(tiny_model_dir), progress=StartProgress(weights=lambda *done: read.append(done)))
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
    runtime, model = runtime_for(tiny_model_dir, num_pages=2**40)
    with pytest.raises(ConfigError, match=r"out of memory.*num_pages \(1099511627776\).*max_prefill_length"):
        build_runner(runtime, model)


def test_pages_follow_from_memory(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine tenths of what was free, less the weights, less a step, less the padding page."""
    runtime, model = runtime_for(tiny_model_dir, max_running_requests=4096, memory_ratio=0.5)
    spec = attention_spec(model, tp_size=1, page_size=16, max_seq_len=256, max_rows=5, dtype=torch.float32, device=CPU)
    page = KVPool.bytes_per_page(spec)
    on_gpu = dataclasses.replace(spec, device=torch.device("cuda"))
    monkeypatch.setattr(memory, "free_bytes", lambda device: 900 * page)
    assert choose_num_pages(runtime, on_gpu, free_at_start=1000 * page, step_bytes=50 * page) == 500 - 100 - 50 - 1
    with pytest.raises(ConfigError, match="memory_ratio"):
        choose_num_pages(runtime, on_gpu, free_at_start=1000 * page, step_bytes=399 * page)
    assert choose_num_pages(runtime, spec, free_at_start=0, step_bytes=0) == 450 - 1


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
    ("tokens", "max_running", "lengths"), [(100, 8, [100]), (300, 8, [127, 127, 46]), (900, 2, [127, 127])]
)
def test_a_prompt_plan_samples_nothing(tokens: int, max_running: int, lengths: list[int]) -> None:
    plan = prompt_plan(tokens, max_running, max_seq_len=128)
    assert [len(chunk.token_ids) for chunk in plan.prefill] == lengths
    assert [len(admitted.token_ids) for admitted in plan.admitted] == lengths
    assert len(plan.sampled_rows) == len(plan.decode_rows) == 0
