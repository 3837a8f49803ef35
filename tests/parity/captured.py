"""Every family and every type that runs through transformers' code, eager and captured: what the tests of both read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from minisgl_backend import LLM
from tests.parity.checkpoints import CHECKPOINTS, reference_model, save_checkpoint, save_tokenizer
from tests.parity.decoder_types import SERVED, save_type

NATIVE = tuple(f"native {name}" for name in sorted(CHECKPOINTS))
FALLBACK = tuple(f"transformers {name}" for name in sorted(SERVED))
# Five sequences for four rows: prompts in two chunks, one of which is beside others, and beside decoding rows; windows
# of 24 tokens and pages end within them.
PROMPTS = [
    [3 + 7 * i % 310 for i in range(60)],
    [9, 8, 7, 6, 5],
    list(range(3, 40)),
    [77],
    [3 + 11 * i % 310 for i in range(30)],
]
NUM_TOKENS = 8
LIMITS: dict[str, Any] = {
    "page_size": 16,
    "num_pages": 300,
    "max_seq_len_override": 128,
    "max_running_requests": 4,
    "max_prefill_length": 48,
    "mixed_prefill_length": 16,
}
EAGER: dict[str, Any] = {"cuda_graph_max_bs": 0, "cuda_graph_max_tokens": 0}
CAPTURED: dict[str, Any] = {}  # the default


def save(name: str, folder: Path) -> str:
    """Writes the checkpoint of one of NATIVE or FALLBACK with a tokenizer; returns its model_impl."""
    impl, _, model = name.partition(" ")
    if impl == "native":
        save_checkpoint(model, folder)
    else:
        save_type(model, folder)
    save_tokenizer(folder)
    return impl


def greedy_tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [output.token_ids for output in outputs]


def reference(name: str, folder: Path) -> Any:
    """The saved checkpoint in transformers, float32, on the CPU."""
    if name in NATIVE:
        return reference_model(folder)
    model_class: Any = transformers.AutoModelForCausalLM
    return model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def check_greedy(model: Any, prompt: list[int], tokens: list[int], tolerance: float = 1e-4) -> None:
    """Each of the tokens is the likeliest by transformers' model after those before it; or as likely as that, up to
    `tolerance` of the largest logit."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    taken = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    behind = (logits.amax(1) - taken) / logits.abs().amax(1)
    assert behind.max() <= tolerance, f"tokens {tokens} are behind by {behind.tolist()}"
