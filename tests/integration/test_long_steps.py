"""Steps of more than 2,048 tokens through the engine, captured at a few sizes: padded, cut to a size, or neither."""

from __future__ import annotations

import random
from typing import Any

import pytest

from minisgl_backend import LLM
from minisgl_backend.environment import Environment
from minisgl_backend.scheduler.planner import Planner
from minisgl_backend.step import StepPlan

PROMPT_LENGTHS = (600, 900, 1500, 300, 1000, 800, 600)
OPTIONS: dict[str, Any] = {
    **{"num_pages": 700, "page_size": 16, "max_running_requests": 16, "max_prefill_length": 3000, "dtype": "float32"}
}


@pytest.mark.parametrize("mixed", [0, 2600])
def test_answers_are_those_of_steps_that_are_not_captured(mixed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    plan = Planner.plan

    def noted(planner: Planner, step: int) -> StepPlan | None:
        made = plan(planner, step)
        if made is not None and made.prefill:
            sizes.append(sum(len(chunk.token_ids) for chunk in made.prefill) + len(made.decode_rows))
        return made

    monkeypatch.setattr(Planner, "plan", noted)
    draw = random.Random(1)
    prompts = [[draw.randrange(16, 1024) for _ in range(length)] for length in PROMPT_LENGTHS]
    environment = Environment(overlap=True, log_level="WARNING", flashinfer_tensor_cores=None, eager_graphs=True)
    found = []
    for most_captured in (0, 3100):
        sizes.clear()
        options = {**OPTIONS, "mixed_prefill_length": mixed, "cuda_graph_max_tokens": most_captured}
        with LLM("demo", environment=environment, **options) as llm:
            answers = llm.generate(prompts, temperature=0, max_tokens=12, ignore_eos=True)
        found.append([answer.token_ids for answer in answers])
    assert found[0] == found[1]
    assert sizes[0] == 3000  # padded to 3,072
    assert not mixed or 2560 in sizes  # where rows decode: cut from 2,600
