"""The model runner on a real GPU: captured graphs, page counts and results that come back late."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from minisgl_backend.attention.base import DecodeInputs
from minisgl_backend.attention.registry import import_failure
from minisgl_backend.config import EngineConfig
from minisgl_backend.environment import Environment
from minisgl_backend.kernels.sampling.layout import SAMPLING_GRAPHS
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.folder import find_model_dir
from minisgl_backend.request import SamplingParams
from minisgl_backend.runner.batch import BatchBuilder
from minisgl_backend.runner.graphs.whole import LARGEST_SAMPLING_GRAPH, GraphRunner
from minisgl_backend.runner.model_runner import ModelRunner
from minisgl_backend.runner.start.build import build_runner
from minisgl_backend.runner.start.device import MachineFacts
from minisgl_backend.runner.start.resolve import resolve
from tests.unit.runner.hand_made_plans import EVERY_WISH, Driver, say

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PAGE_SIZE = 16
GARBAGE_BYTES = (*[1 << 20] * 64, *[1 << 26] * 4)  # for the allocator's small and large pools
PROMPTS = [list(range(5, 5 + length)) for length in (1, 7, 33, 100, 12)]
WISHES = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, repetition_penalty=1.5),
    SamplingParams(temperature=0.0, logit_bias={50: 3.0}),
    SamplingParams(temperature=0.6, seed=1),
    SamplingParams(temperature=0.6, top_p=0.9, top_k=20, seed=2),
]


def make_runner(model_name: str = "demo", **options: object) -> ModelRunner:
    defaults = {"max_running_requests": 8, "page_size": PAGE_SIZE, "attention_backend": "triton"}
    config = EngineConfig(**{**defaults, **options})
    folder = find_model_dir(model_name)
    model = ModelConfig.load(folder)
    environment = Environment(overlap=True, log_level="INFO", flashinfer_tensor_cores=None)
    return build_runner(resolve(config, folder, model, MachineFacts.detect(), environment), model)


def generate(runner: ModelRunner, wishes: list[SamplingParams], steps: int = 24) -> list[list[int]]:
    """Launches each step before the one before is read, as the engine does."""
    driver = Driver(PAGE_SIZE)
    for row, (prompt, wish) in enumerate(zip(PROMPTS, wishes, strict=True)):
        driver.admit(row, prompt, wish)
    plan = driver.plan(prefill={row: len(prompt) for row, prompt in enumerate(PROMPTS)})
    pending = [runner.execute(runner.prepare(plan))]
    found: list[list[int]] = []
    for _ in range(steps):
        plan = driver.plan(decode=tuple(range(len(PROMPTS))))
        pending.append(runner.execute(runner.prepare(plan)))
        found.append(pending.pop(0).result().token_ids.tolist())
    return [list(tokens) for tokens in zip(*found, strict=True)]


def generate_mixed(runner: ModelRunner, chunk: int = 20, steps: int = 24) -> list[list[int]]:
    """One prompt after the other, in chunks beside the rows that already decode; then all decode."""
    driver, pending = Driver(PAGE_SIZE), []
    for row, prompt in enumerate(PROMPTS):
        driver.admit(row, prompt, WISHES[0])
        for start in range(0, len(prompt), chunk):
            plan = driver.plan(prefill={row: min(chunk, len(prompt) - start)}, decode=tuple(range(row)))
            pending.append((plan, runner.execute(runner.prepare(plan))))
    for _ in range(steps):
        plan = driver.plan(decode=tuple(range(len(PROMPTS))))
        pending.append((plan, runner.execute(runner.prepare(plan))))
    for plan, step in pending:
        driver.commit(plan, step.result().token_ids)
    return [driver.tokens[row][len(prompt) :] for row, prompt in enumerate(PROMPTS)]


def prompt_logprobs(runner: ModelRunner) -> list[float]:
    """Of the longest prompt, beside one that decodes."""
    driver = Driver(PAGE_SIZE)
    driver.admit(0, PROMPTS[2], WISHES[0])
    driver.admit(1, PROMPTS[3], SamplingParams(temperature=0.0, prompt_logprobs=1))
    plans = [driver.plan(prefill={0: len(PROMPTS[2]), 1: 20})]
    plans += [driver.plan(prefill={1: count}, decode=(0,)) for count in (50, len(PROMPTS[3]) - 70)]
    results = [runner.execute(runner.prepare(plan)).result() for plan in plans]
    return [entry.logprob for result in results for entry in result.prompt_logprobs[1]]


def test_graphs_change_nothing() -> None:
    """Padding may change the rounding of products, so one sequence in five may take another way at a near tie."""
    eager = generate(make_runner(num_pages=200, cuda_graph_max_bs=0), WISHES)
    graphs = generate(make_runner(num_pages=200, cuda_graph_max_bs=8), WISHES)
    assert sum(a == b for a, b in zip(eager, graphs, strict=True)) >= len(PROMPTS) - 1
    assert [answer[0] for answer in eager] == [answer[0] for answer in graphs]


@pytest.mark.parametrize("largest", [153, 256])
def test_pieces_change_nothing(largest: int) -> None:
    """153 tokens of prompts, without and with padding. See above for the tolerance."""
    eager = generate(make_runner(num_pages=200, cuda_graph_max_tokens=0), WISHES)
    pieces = generate(make_runner(num_pages=200, cuda_graph_max_tokens=largest), WISHES)
    assert sum(a == b for a, b in zip(eager, pieces, strict=True)) >= len(PROMPTS) - 1
    assert [answer[0] for answer in eager] == [answer[0] for answer in pieces]


def test_mixed_steps_in_pieces_change_nothing() -> None:
    eager = generate_mixed(make_runner(num_pages=200, cuda_graph_max_tokens=0))
    pieces = generate_mixed(make_runner(num_pages=200, cuda_graph_max_tokens=128))
    assert sum(a == b for a, b in zip(eager, pieces, strict=True)) >= len(PROMPTS) - 1


@pytest.mark.parametrize("window", [None, 50])
def test_captured_passes_of_lone_prompts_change_nothing(window: int | None, tmp_path: Path) -> None:
    """`fa` serves passes of one prompt as one graph each, here after longer ones and with a cached part."""
    if import_failure("sgl_kernel.flash_attn") is not None:
        pytest.skip("needs sgl-kernel")
    name = "demo"
    if window is not None:
        shutil.copytree(find_model_dir("demo"), tmp_path / "windows")
        file = tmp_path / "windows" / "config.json"
        windows = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0, "layer_types": None}
        file.write_text(json.dumps({**json.loads(file.read_text()), **windows}))
        name = str(file.parent)
    found = []
    for largest in (0, 256):
        runner = make_runner(name, num_pages=200, attention_backend="fa,triton", cuda_graph_max_tokens=largest)
        assert runner.attention.supports_prompt_graphs
        found.append([answer for row in (3, 2, 1, 3) for answer in lone_prompt(runner, PROMPTS[row])])
        assert len(runner._pieces.prompt_sizes if runner._pieces else ()) == (8 if largest else 0)
    for captured, eager in zip(*found, strict=True):
        for (token, logprob), (expected, expected_logprob) in zip(captured, eager, strict=True):
            assert logprob == pytest.approx(expected_logprob, abs=0.1)
            if token != expected:  # as likely as the other one; what follows has another context
                break


def test_captured_sampling_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """To the bit: the same decode graphs, with the sampler's kernels captured and launched one by one.

    Of random weights with a vocabulary in which borders are searched for.
    """
    shutil.copytree(find_model_dir("demo"), tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "vocab_size": 32_000}))
    runner = make_runner(str(file.parent), num_pages=400, max_running_requests=24, dummy_weights=True)
    graphs, replayed = runner._graphs, set()
    assert graphs is not None
    replay = graphs.replay_sampling

    def noted(size: int, sampling_graph: int) -> None:
        replayed.add((size, sampling_graph))
        replay(size, sampling_graph)

    monkeypatch.setattr(graphs, "replay_sampling", noted)
    prompts = [list(range(5 + index, 20 + 3 * index)) for index in range(len(EVERY_WISH))]
    for size in (1, 2, 3, 7, LARGEST_SAMPLING_GRAPH, len(EVERY_WISH)):
        # Backwards, since masks are last: what they leave must mask nobody.
        for first in range(len(EVERY_WISH) - size, -1, -1):
            part = slice(first, first + size)
            found = []
            for sampling_sizes in (graphs.sampling_sizes, ()):
                with monkeypatch.context() as patch:
                    patch.setattr(GraphRunner, "sampling_sizes", sampling_sizes)
                    said = say(runner, EVERY_WISH[part], prompts[part], PAGE_SIZE)
                found.append((said, runner._sampler._penalties.counts.clone()))
            assert found[0][0] == found[1][0], (size, first)
            assert torch.equal(found[0][1], found[1][1]), (size, first)
    assert {size for size, _ in replayed} == set(graphs.sampling_sizes) == {1, 2, 4, 8, 16}
    assert {graph for _, graph in replayed} == set(SAMPLING_GRAPHS)


def lone_prompt(runner: ModelRunner, prompt: list[int]) -> list[list[tuple[int, float]]]:
    """Tokens said after a prompt with their log-probabilities, and after it again with its full pages cached."""
    driver = Driver(PAGE_SIZE)
    answers: list[list[tuple[int, float]]] = [[], []]
    cached = len(prompt) // PAGE_SIZE
    for row in (0, 1):
        driver.admit(row, prompt, SamplingParams(temperature=0.0, logprobs=1))
        shared = np.arange(1, 1 + cached if row else 1, dtype=np.int32)
        driver.computed[row], driver.pages[row] = len(shared) * PAGE_SIZE, len(shared)
        plan = driver.plan(prefill={row: len(prompt) - driver.computed[row]})
        plan = msgspec.structs.replace(
            plan,
            page_rows=np.full(len(shared) + len(plan.page_ids), row, dtype=np.int32),
            page_columns=np.arange(len(shared) + len(plan.page_ids), dtype=np.int32),
            page_ids=np.concatenate([shared, plan.page_ids]),
        )
        for turn in range(5):
            plan = plan if turn == 0 else driver.plan(decode=(row,))
            result = runner.execute(runner.prepare(plan)).result()
            driver.commit(plan, result.token_ids)
            answers[row] += [(int(result.token_ids[0]), one.logprob) for one in result.logprobs.values()]
    assert [len(answer) for answer in answers] == [5, 5]
    return answers


@pytest.mark.parametrize("name", ["demo", "qwen3_moe"])
def test_pieces_compute_what_eager_steps_compute(name: str, tmp_path: Path) -> None:
    """Log-probabilities of a prompt in three chunks, the last two beside a decoding row and padded."""
    if name != "demo":
        from tests.parity.checkpoints import save_checkpoint

        save_checkpoint(name, tmp_path)
        name = str(tmp_path)
    eager, pieces = (prompt_logprobs(make_runner(name, num_pages=200, cuda_graph_max_tokens=n)) for n in (0, 64))
    assert len(eager) == len(PROMPTS[3]) - 1
    assert pieces == pytest.approx(eager, abs=0.1)


def test_the_same_runner_twice_gives_the_same() -> None:
    runner = make_runner(num_pages=200)
    assert generate(runner, WISHES) == generate(runner, WISHES)


def test_graphs_are_captured_on_inputs_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is full of garbage and the inputs are late, as where an engine follows another one in its process."""
    fill = BatchBuilder.padding_inputs

    def fill_late(self: BatchBuilder, size: int) -> DecodeInputs:
        torch.cuda._sleep(20_000_000)
        return fill(self, size)

    monkeypatch.setattr(BatchBuilder, "padding_inputs", fill_late)
    garbage = [torch.full((bytes_ // 4,), 0x7F7F7F7F, dtype=torch.int32, device="cuda") for bytes_ in GARBAGE_BYTES]
    torch.cuda.synchronize()
    del garbage
    first = make_runner(num_pages=200)
    found = generate(first, WISHES)
    first.close()
    assert found == generate(make_runner(num_pages=200), WISHES)


def test_pages_fill_the_share_that_was_asked_for() -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    runner = make_runner(memory_ratio=0.02, max_seq_len_override=1024, max_prefill_length=1024)
    used = free - torch.cuda.mem_get_info()[0]
    assert runner.num_pages > 0
    assert used < 0.05 * free
