"""Real checkpoints, float32: each greedy token is transformers' best one, or within 1e-3 of its logit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from minisgl_backend import LLM
from minisgl_backend.errors import ConfigError
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "checkpoint", [smollm2, pytest.param(gemma3, marks=pytest.mark.full)], ids=["smollm2", "gemma3"]
)
def test_greedy_tokens(checkpoint: Callable[[], Path]) -> None:
    folder = checkpoint()
    refused = None
    try:
        llm = LLM(str(folder), dtype="float32", max_seq_len_override=512, num_pages=256)
    except ConfigError as error:
        refused = str(error)
    if refused is not None:  # an architecture that is not served is refused by its name
        assert transformers.AutoConfig.from_pretrained(folder).architectures[0] in refused
        return
    with llm:
        if llm.tokenizer.has_chat_template:
            prompts: list[Any] = [[{"role": "user", "content": question}] for question in QUESTIONS]
            outputs = llm.chat(prompts, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        else:
            outputs = llm.generate(list(QUESTIONS), temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    equal = 0
    for output in outputs:
        answer = torch.tensor(output.token_ids)
        assert len(answer) == NUM_TOKENS
        with torch.inference_mode():
            inputs = torch.tensor([output.prompt_token_ids + output.token_ids[:-1]])
            logits = model(inputs, logits_to_keep=NUM_TOKENS).logits[0]
        chosen = logits.gather(1, answer[:, None])[:, 0]
        assert (logits.max(-1).values - chosen).max() < 1e-3
        equal += bool((logits.argmax(-1) == answer).all())
    assert equal >= len(QUESTIONS) - 1
