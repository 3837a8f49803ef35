"""Decode steps of a CPU that are recorded and replayed: answers are those of steps that Python computes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend import LLM
from minisgl_backend.kernels.cpu.library import cpu_library
from minisgl_backend.runner.graphs.recorded import RecordedGraphRunner
from tests.parity.checkpoint_options import VOCAB_SIZE
from tests.parity.checkpoints import FIRST_OF_FAMILY, save_checkpoint, save_tokenizer

pytestmark = pytest.mark.skipif(cpu_library() is None, reason="no compiled kernels here")
# Families whose heads' size follows from others.
BY_HEADS = (
    "cohere", "granite", "helium", "llama", "mixtral", "olmo2", "olmoe", "phi3", "stablelm", "starcoder2",
)  # fmt: skip
FAMILIES = [name for name in FIRST_OF_FAMILY if name not in ("qwen2_vl", "qwen2_5_vl")]  # whose heads are small
DEFAULT = ("llama", "gemma3", "qwen3_moe-window", "glm4")
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0.8, "top_k": 7, "repetition_penalty": 1.3, "seed": 6},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.0, "logit_bias": {7: 4.0}},
)


def answers(folder: Path, prompts: list[list[int]], **options: Any) -> list[Any]:
    with LLM(str(folder), dtype="bfloat16", max_seq_len_override=200, max_running_requests=12, **options) as llm:
        found: list[Any] = []
        for count in (1, 3, 12):  # the last in more rows than are recorded, until few are left
            params = [
                {**SAMPLING[i % len(SAMPLING)], "max_tokens": 10 + 3 * i, "ignore_eos": True} for i in range(count)
            ]
            found += [one.completions[0] for one in llm.generate(prompts[:count], params)]
        return [(one.token_ids, one.logprobs) for one in found]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.full) for name in FAMILIES],
)
def test_answers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[RecordedGraphRunner] = []
    make = RecordedGraphRunner.__init__

    def note(runner: RecordedGraphRunner, sizes: tuple[int, ...]) -> None:
        make(runner, sizes)
        made.append(runner)

    monkeypatch.setattr(RecordedGraphRunner, "__init__", note)
    monkeypatch.setattr(RecordedGraphRunner, "close", lambda _: None)
    save_checkpoint(name, tmp_path, head_dim=64, **({"hidden_size": 256} if name in BY_HEADS else {}))
    save_tokenizer(tmp_path)
    draw = random.Random(name)
    prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(5 + 11 * i)] for i in range(12)]
    found = answers(tmp_path, prompts)
    expected = answers(tmp_path, prompts, cuda_graph_max_bs=0)
    assert found == expected
    if name in DEFAULT:
        (runner,) = made
        assert set(runner._recorded) == set(range(1, 9))
