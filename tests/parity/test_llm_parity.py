"""Greedy tokens of the whole engine against transformers, float32, over 64 steps.

With and without chunked prefill, with a cached prefix, one at a time and in a batch, page sizes 1, 16 and 64: the
same tokens each time.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backend import LLM
from tests.parity.checkpoint_options import VOCAB_SIZE
from tests.parity.checkpoints import CHECKPOINTS, reference_model, save_checkpoint, save_tokenizer
from tests.parity.quantized import write_fp8

NUM_TOKENS = 64
# Logits of all families are compared in test_logits_parity; the whole engine adds nothing that depends on the family.
EVERY_RUN = ("llama-llama3-tied", "mistral-window", "qwen3_moe", "gemma3")
LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {"page_size": 16},
    "chunked": {"page_size": 16, "max_prefill_length": 24, "mixed_prefill_length": 8},
    "page-1": {"page_size": 1, "max_prefill_length": 50},
    "page-64-naive": {"page_size": 64, "cache_type": "naive"},
}


class Case:
    """One checkpoint with its prompts and transformers' answers."""

    def __init__(self, name: str, folder: Path) -> None:
        name, _, variant = name.partition("+")
        save_checkpoint(name, folder)
        save_tokenizer(folder)
        plain = self.folder = folder
        if variant:
            self.folder, plain = folder / "quantized", folder / "plain"
            write_fp8(folder, variant, self.folder, plain)
        generator = random.Random(name)
        shared = [generator.randrange(3, VOCAB_SIZE) for _ in range(48)]
        lengths = (5, 40, 1, 90)
        own = [[generator.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]
        self.prompts = [own[0], shared + own[1], own[2], shared + own[3], own[1]]
        model = reference_model(plain)
        self.expected = [_greedy(model, prompt) for prompt in self.prompts]

    def generate(self, llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
        outputs = llm.generate(prompts, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        return [output.token_ids for output in outputs]


@torch.inference_mode()
def _greedy(model: Any, prompt: list[int]) -> list[int]:
    """The most likely continuation, token by token; transformers' own cache keeps it quick."""
    tokens: list[int] = []
    inputs, cache = torch.tensor([prompt]), None
    for _ in range(NUM_TOKENS):
        out = model(inputs, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        tokens.append(int(out.logits[0, -1].argmax()))
        inputs = torch.tensor([tokens[-1:]])
    return tokens


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name in EVERY_RUN else [pytest.mark.full])
        for name in (*sorted(CHECKPOINTS), "qwen3_moe+ct-blocks-weights-only")
    ],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_greedy_tokens(case: Case, layout: str) -> None:
    options = {"num_pages": 4096 // LAYOUTS[layout]["page_size"], "max_running_requests": 8, **LAYOUTS[layout]}
    with LLM(str(case.folder), dtype="float32", max_seq_len_override=256, **options) as llm:
        assert case.generate(llm, case.prompts) == case.expected
        # Again, now with every prompt in the prefix cache, one at a time and in another order.
        for index in (3, 0, 1):
            (output,) = llm.generate([case.prompts[index]], temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
            assert output.token_ids == case.expected[index]
            cached = options.get("cache_type") != "naive" and len(case.prompts[index]) > options["page_size"]
            assert (output.num_cached_tokens > 0) == cached
