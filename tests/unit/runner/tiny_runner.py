"""Runners of the tiny checkpoint, and what they are asked for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hand_made_plans import Driver

from minisgl_backend.attention.base import Plan, PrefillInputs, PromptInputs
from minisgl_backend.attention.layer import AttentionLayer
from minisgl_backend.attention.reference import TorchBackend
from minisgl_backend.request import SamplingParams
from minisgl_backend.runner.model_runner import ModelRunner
from minisgl_backend.step import StepPlan, StepResult

CPU = torch.device("cpu")
VOCAB = 160
MAX_SEQ_LEN = 128

MakeRunner = Callable[..., ModelRunner]

PROMPTS = [[5, 9, 77, 3], [11] * 17, list(range(40, 73)), [150]]
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = [
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.8, seed=2**64 - 1, top_k=12, top_p=0.9),
    SamplingParams(temperature=1.3, seed=3, min_p=0.02, frequency_penalty=0.5, repetition_penalty=1.2),
    SamplingParams(temperature=0.9, seed=4, top_p=0.7, logit_bias={7: 2.0}, min_tokens=5),
]


class PromptGraphs(TorchBackend):
    """Attends to lone prompts by what is in the buffers then, as a captured pass does."""

    num_attended = 0  # by all layers

    @property
    def captures_prompts(self) -> bool:
        return True

    def plan_prompt(self, inputs: PromptInputs) -> Plan:
        return inputs

    def prefill_into(self, layer: AttentionLayer, q: torch.Tensor, plan: Plan, out: torch.Tensor) -> None:
        if not isinstance(plan, PromptInputs):
            super().prefill_into(layer, q, plan, out)
            return
        self.num_attended += 1
        row = torch.zeros(1, dtype=torch.int32)
        prefill = PrefillInputs(
            cu_seqlens_q=plan.cu_seqlens_q,
            kv_lens=plan.kv_lens,
            rows=row,
            page_table=plan.page_table,
            cu_seqlens_q_host=plan.cu_seqlens_q.numpy(),
            kv_lens_host=plan.kv_lens.numpy(),
            rows_host=row.numpy(),
        )
        num_tokens = int(plan.cu_seqlens_q[1])
        out[:num_tokens] = self.prefill(layer, q[:num_tokens], self.plan_prefill(prefill))


def run(runner: ModelRunner, driver: Driver, plan: StepPlan) -> StepResult:
    """The plan's results, committed."""
    result = runner.execute(runner.prepare(plan)).result()
    driver.commit(plan, result.token_ids)
    return result


def generate(
    runner: ModelRunner, prompts: list[list[int]], params: list[SamplingParams], steps: int = 10, page_size: int = 4
) -> list[list[int]]:
    """All prompts in one prefill step, then decode steps of all rows."""
    driver = Driver(page_size)
    for row, (prompt, wish) in enumerate(zip(prompts, params, strict=True)):
        driver.admit(row, prompt, wish)
    run(runner, driver, driver.plan(prefill={row: len(prompt) for row, prompt in enumerate(prompts)}))
    for _ in range(steps - 1):
        run(runner, driver, driver.plan(decode=tuple(range(len(prompts)))))
    return [driver.tokens[row][len(prompt) :] for row, prompt in enumerate(prompts)]
