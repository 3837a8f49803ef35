"""`quantization=fp8` in float32 against transformers with linear layers and experts that quantize alike.

Half of the logits within 2e-3 of the largest one, and all within 5e-2; and what the activations' FP8 costs, as the KL
divergence from the same weights with activations as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from minisgl_backend.models.folder import find_model_dir
from minisgl_backend.tensor_parallel import TensorParallel
from minisgl_backend.weights.experts.scaled import Fp8ConvertedExpertsMethod
from minisgl_backend.weights.fp8 import Fp8LinearMethod
from tests.parity.checkpoint_options import VOCAB_SIZE
from tests.parity.checkpoints import reference_model, save_checkpoint
from tests.parity.paged import PagedModel
from tests.unit.layers.ranks import on_ranks

TOLERANCE = 2e-3
MOST_OF_ONE = 0.1  # a number halfway between two of FP8 goes to either, as float32 sums it up: 64 of them are a state
MOST_KL = 0.01  # nats a token, on average
MOST_KL_OF_RANKS = 0.03  # of random weights, whose states are 64 numbers
ROWS = ("llama-bias-mha", "qwen3-tied-sharded", "gemma3", "qwen3_moe", "mixtral")


def fp8(x: torch.Tensor) -> torch.Tensor:
    """Each row rounded to e4m3, times its scale."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 448
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def quantize_reference(model: Any, *, activations: bool) -> None:
    """Linear layers and experts of the decoder layers in place. activations: these, too."""
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = fp8(module.weight.data)
        elif type(module).__name__.endswith("Experts"):
            for weight in (module.gate_up_proj, module.down_proj):
                weight.data = fp8(weight.data)
    if activations:
        quantize_activations(model, fp8)


def quantize_activations(model: Any, of_input: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The inputs of linear layers and experts of the decoder layers become what `of_input` makes of them."""

    def experts_forward(self: Any, hidden: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for token in range(len(hidden)):
            for expert, share in zip(ids[token].tolist(), shares[token], strict=True):
                gate, up = F.linear(of_input(hidden[token]), self.gate_up_proj[expert]).chunk(2)
                out[token] += share * F.linear(of_input(self.act_fn(gate) * up), self.down_proj[expert])
        return out

    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, inputs: tuple(map(of_input, inputs)))
        elif type(module).__name__.endswith("Experts"):
            module.forward = experts_forward.__get__(module)


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", ROWS)
def test_logits_are_those_of_a_reference_that_quantizes_alike(name: str, tmp_path: Path) -> None:
    """Of a chunked prompt, behind a shared prefix, and of a decoded token."""
    save_checkpoint(name, tmp_path)
    reference = reference_model(tmp_path)
    quantize_reference(reference, activations=True)

    differences = []

    def check(logits: torch.Tensor, ids: list[int]) -> None:
        with torch.inference_mode():
            expected = reference(torch.tensor([ids])).logits[0].float()[-len(logits) :]
        differences.append((logits - expected).abs() / expected.abs().max())

    paged = PagedModel(tmp_path, page_size=16, quantization="fp8")
    assert any(isinstance(one, (Fp8LinearMethod, Fp8ConvertedExpertsMethod)) for one in paged.model.modules())
    prompt = tokens(60, 1)
    for begin, end in ((0, 33), (33, 34), (34, 60)):
        check(paged.step({1: prompt[begin:end]}, {})[1], prompt[:end])
    paged.share_prefix(1, 2, num_pages=2)
    other = prompt[:32] + tokens(5, 2)
    found = paged.step({2: other[32:]}, {1: 7})
    check(found[2], other)
    check(found[1], [*prompt, 7])
    assert torch.cat(differences).median() <= TOLERANCE
    assert torch.cat(differences).max() <= MOST_OF_ONE


@pytest.mark.parametrize("name", ["qwen3-tied-sharded", "qwen3_moe"])
def test_ranks_have_the_same_numbers_and_scales(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path)
    prompt = tokens(40, 3)

    def work(tp: TensorParallel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        paged = PagedModel(tmp_path, page_size=16, tp=tp, quantization="fp8")
        return paged.step({0: prompt}, {})[0], {
            f"{name}.{kind}": value.detach().float()
            for name, module in paged.model.named_modules()
            if isinstance(module, (Fp8LinearMethod, Fp8ConvertedExpertsMethod))
            for kind, value in module.named_parameters(recurse=False)
        }

    whole, expected = work(TensorParallel.single())
    ranks = on_ranks(2, work)
    for kind, value in expected.items():
        if any(part in kind for part in ("o_proj", "down")):
            parts = [weights[kind] for _, weights in ranks]
            found = parts[0] if kind.endswith("scale") else torch.cat(parts, -1)
            assert torch.equal(found, value), kind
    if "moe" not in name:  # activations have a scale on each rank; by that a random router takes other experts
        for logits, _ in ranks:
            assert kl(whole, logits) < MOST_KL_OF_RANKS


def kl(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Mean over tokens, in nats: logits [num_tokens, vocab_size] each."""
    p, q = expected.log_softmax(-1), found.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


def test_what_the_activations_cost() -> None:
    """Of the demo model, whose weights are trained: against the same FP8 weights with activations in float32."""
    folder = find_model_dir("demo")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    turns = [("What is 17 + 25?", "42"), ("Count from 1 to 20.", ", ".join(map(str, range(1, 21))))]
    messages = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    prompt = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    reference = reference_model(folder)
    quantize_reference(reference, activations=False)
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0].float()
    found = PagedModel(folder, page_size=16, quantization="fp8").step({0: prompt}, {})[0]
    assert kl(expected, found) < MOST_KL
