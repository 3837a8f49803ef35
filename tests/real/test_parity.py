"""Real checkpoints, float32: each greedy token is transformers' best one, or within 1e-3 of its logit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from minisgl_backend import LLM
from tests.real.models import gemma3, smollm2

NUM_TOKENS = 12
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Translate 'good morning' into Spanish.",
    "List three colours.",
    "What is 17 + 25?",
    "def fibonacci(n):",
    "Why is the sky blue?",
    "¿Qué hora es?",
    "请用一句话介绍北京。",
    "Once upon a time there was a robot who",
    "Explain what a hash table is, in simple words, to somebody who has never programmed. " * 2,
    "🙂",
)


LONG_ANSWER = 200  # tokens
LONG_PROMPT = 3000


@pytest.mark.slow
@pytest.mark.parametrize(
    "checkpoint", [smollm2, pytest.param(gemma3, marks=pytest.mark.full)], ids=["smollm2", "gemma3"]
)
def test_greedy_tokens(checkpoint: Callable[[], Path]) -> None:
    folder = checkpoint()
    with LLM(str(folder), dtype="float32", max_seq_len_override=512, num_pages=256) as llm:
        outputs = _answers(llm, list(QUESTIONS), NUM_TOKENS)
    assert _count_equal(folder, outputs, NUM_TOKENS) >= len(QUESTIONS) - 1


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("checkpoint", [smollm2, gemma3])
def test_long_greedy_answers(checkpoint: Callable[[], Path]) -> None:
    """One of them behind a prompt that is longer than Gemma's windows and than a chunk."""
    folder = checkpoint()
    story = " ".join(f"On day {day} the crew counted {day * 37 % 101} birds and wrote it down." for day in range(190))
    with LLM(str(folder), dtype="float32", max_seq_len_override=4096, num_pages=512) as llm:
        outputs = _answers(llm, [*QUESTIONS[:-1], f"{story} What did they count?"], LONG_ANSWER)
    assert len(outputs[-1].prompt_token_ids) >= LONG_PROMPT
    assert _count_equal(folder, outputs, LONG_ANSWER) >= len(QUESTIONS) // 2  # after a tie, answers go their own ways


def _answers(llm: LLM, questions: list[str], num_tokens: int) -> list[Any]:
    if llm.tokenizer.has_chat_template:
        prompts: list[Any] = [[{"role": "user", "content": question}] for question in questions]
        return llm.chat(prompts, temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return llm.generate(questions, temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def _count_equal(folder: Path, outputs: list[Any], num_tokens: int) -> int:
    """How many answers have transformers' best token everywhere; those that do not are within 1e-3 of its logit."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    equal = 0
    for output in outputs:
        answer = torch.tensor(output.token_ids)
        assert len(answer) == num_tokens
        with torch.inference_mode():
            inputs = torch.tensor([output.prompt_token_ids + output.token_ids[:-1]])
            logits = model(inputs, logits_to_keep=num_tokens).logits[0]
        chosen = logits.gather(1, answer[:, None])[:, 0]
        assert (logits.max(-1).values - chosen).max() < 1e-3
        equal += bool((logits.argmax(-1) == answer).all())
    return equal
