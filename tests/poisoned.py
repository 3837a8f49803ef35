"""A model in which some tokens are no numbers, and requests of its victims: for tests that nobody else is harmed.

Real checkpoints have such tokens: rows of an embedding that training never touched may hold anything. In float16 a
number may also grow too large on its way through the layers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from minisgl_backend import LLM
from minisgl_backend.models.folder import find_model_dir
from minisgl_backend.request import FinishReason, SamplingParams
from tests.random_requests import RandomAnswer, RandomRequest, ask_core

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 1024, 256, 3, 4, 2, 64, 128
EXPERTS = 4
NOT_A_NUMBER, INFINITE, OVERFLOWS = 700, 701, 702  # the last one in float16 alone
PADDING = 0  # padding tokens of captured steps have this id: it is no number either
HEALTHY = np.array([i for i in range(16, VOCAB) if i not in (NOT_A_NUMBER, INFINITE, OVERFLOWS)])
SHARED = HEALTHY[100:196].tolist()  # a prefix that victims and others have


def save_poisoned(folder: Path, dtype: torch.dtype = torch.float32, *, experts: bool = False) -> Path:
    """A Llama, or a Qwen3-MoE with `experts`, whose next token is clear whatever the rounding. Returns the folder."""
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int, scale: float = 0.06) -> torch.Tensor:
        return torch.randn(shape, generator=draw) * scale

    grown = 7  # a dimension of the hidden states that no healthy token has
    embedding = random(VOCAB, HIDDEN, scale=1.0)
    embedding[:, grown] = 0
    head = torch.zeros(VOCAB, HIDDEN)
    head[torch.from_numpy(np.roll(HEALTHY, 5))] = embedding[torch.from_numpy(HEALTHY)] * 0.15
    embedding[NOT_A_NUMBER] = embedding[PADDING] = torch.nan
    embedding[INFINITE] = torch.inf
    embedding[OVERFLOWS] = 0
    embedding[OVERFLOWS, grown] = 60_000
    weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        weights[f"{name}.input_layernorm.weight"] = weights[f"{name}.post_attention_layernorm.weight"] = torch.ones(
            HIDDEN
        )
        for part, shape in (
            ("q", (HEADS * HEAD_DIM, HIDDEN)),
            ("k", (KV_HEADS * HEAD_DIM, HIDDEN)),
            ("v", (KV_HEADS * HEAD_DIM, HIDDEN)),
            ("o", (HIDDEN, HEADS * HEAD_DIM)),
        ):
            weights[f"{name}.self_attn.{part}_proj.weight"] = random(*shape)
        weights[f"{name}.self_attn.o_proj.weight"][grown] = 0
        if experts:
            weights |= {f"{name}.self_attn.{part}_norm.weight": torch.ones(HEAD_DIM) for part in ("q", "k")}
            weights[f"{name}.mlp.gate.weight"] = random(EXPERTS, HIDDEN)
        mlps = [f"{name}.mlp.experts.{i}" for i in range(EXPERTS)] if experts else [f"{name}.mlp"]
        for mlp in mlps:
            gate, up, down = random(MLP, HIDDEN), random(MLP, HIDDEN), random(HIDDEN, MLP)
            gate[0], up[0], down[:, 0], down[grown] = 0, 0, 0, 0
            gate[0, grown] = up[0, grown] = 8
            down[grown, 0] = 1  # 60,000 and what this adds are more than float16 has
            weights |= {f"{mlp}.gate_proj.weight": gate, f"{mlp}.up_proj.weight": up, f"{mlp}.down_proj.weight": down}
    # Norm weights are one tensor above: files do not share memory.
    save_file(
        {key: value.to(dtype).clone().contiguous() for key, value in weights.items()}, folder / "model.safetensors"
    )
    config = {
        "architectures": ["Qwen3MoeForCausalLM" if experts else "LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "eos_token_id": 2,
    }
    if experts:
        config |= {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": MLP}
        config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(find_model_dir("demo") / name, folder)
    return folder


def healthy_requests(count: int, seed: int = 0) -> list[RandomRequest]:
    """Prompts of all lengths, some with the shared prefix; half of them ask for the values of their prompt."""
    draw = np.random.default_rng(seed)
    requests = []
    for number in range(count):
        own = draw.choice(HEALTHY, int(draw.integers(1, 90))).tolist()
        wants = {"prompt_logprobs": 0, "logprobs": 0} if number % 2 else {}
        params = SamplingParams(temperature=0.0, max_tokens=int(draw.integers(1, 12)), ignore_eos=True, **wants)
        requests.append(RandomRequest((*(SHARED if number % 3 else ()), *own), params))
    return requests


def victims(dtype: torch.dtype) -> list[RandomRequest]:
    """Requests that must fail: bad from the start, at the end, in the middle of a long prompt, by what is said."""
    bad = [NOT_A_NUMBER, INFINITE, *([OVERFLOWS] if dtype == torch.float16 else [])]
    plain = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    requests = []
    for token in bad:
        said = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logit_bias={token: 100.0})
        requests += [
            RandomRequest((token,) * 60, plain),
            RandomRequest((*SHARED, token), plain),
            RandomRequest((*SHARED, *[30] * 20, token, *[31] * 150), plain),
            RandomRequest((40, 41, token, 42), SamplingParams(temperature=0.0, max_tokens=9, n=3, ignore_eos=True)),
            RandomRequest((50, 51, 52), said),
            RandomRequest(tuple(SHARED[:70]), said),
        ]
    return requests


def leaving_victims() -> list[RandomRequest]:
    """Requests that end before anybody knows that what they left is no number."""
    stops = {"logit_bias": {NOT_A_NUMBER: 100.0}, "stop_token_ids": (NOT_A_NUMBER,)}
    return [
        RandomRequest((60, 61, 62, number), SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, **stops))
        for number in range(20, 24)
    ]


def assert_isolated(llm: LLM, dtype: torch.dtype, *, count: int, tolerance: float, outliers: float = 0.0) -> None:
    """Healthy requests are answered as before: beside the victims and after them.

    `tolerance`: of log-probabilities. `outliers`: the share of them that may differ by more; sums in another order
    send a token on the border of two experts to the other one.
    """
    differences: list[float] = []
    asked, beside = healthy_requests(count), healthy_requests(12, seed=1)
    before, alone = _ask(llm, asked), _ask(llm, beside)
    for answers in (*before, *alone):
        assert all(answer.reason is FinishReason.LENGTH for answer in answers), answers
    for turn in range(3):
        bad, leaving = victims(dtype), leaving_victims()
        mixed = [one for pair in zip(bad, beside, strict=False) for one in pair] + leaving
        answers = _ask(llm, mixed, cancelled=(*SHARED, *[33 + turn] * 30, NOT_A_NUMBER, *[34] * 200))
        for number in range(min(len(bad), len(beside))):
            failed, found = answers[2 * number], answers[2 * number + 1]
            assert all(one.reason is FinishReason.ERROR and "NaN" in one.error for one in failed), failed
            differences += _assert_same(beside[number], alone[number], found)
        assert all(one[0].reason is FinishReason.STOP for one in answers[-len(leaving) :])
        for request, expected, found in zip(asked, before, _ask(llm, asked), strict=True):
            differences += _assert_same(request, expected, found)
    different = sum(difference > tolerance for difference in differences)
    assert different <= outliers * len(differences), f"{different} of {len(differences)}, up to {max(differences)}"
    scheduler = llm.engine.core._scheduler
    scheduler.check()  # type: ignore[attr-defined]
    assert llm.stats.pages_leased == 0


def _ask(
    llm: LLM, requests: Sequence[RandomRequest], cancelled: tuple[int, ...] | None = None
) -> list[list[RandomAnswer]]:
    """`cancelled`: the prompt of a request that is cancelled as soon as its first part has been launched."""
    core = llm.engine.core
    if cancelled is None:
        return ask_core(core, requests)
    plain = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    number = sum(one.params.n for one in requests)

    def leave(turn: int) -> None:
        if turn in (1, 2, 3, 5):  # one that has ended is ignored
            core.abort([number], FinishReason.CANCELLED)

    return ask_core(core, [*requests, RandomRequest(cancelled, plain)], leave)[:-1]


def _assert_same(request: RandomRequest, expected: list[RandomAnswer], found: list[RandomAnswer]) -> list[float]:
    """How far the log-probabilities are from each other; the tokens are the same."""
    differences: list[float] = []
    for one, other in zip(expected, found, strict=True):
        what = f"{request}\n{one}\n{other}"
        assert (other.reason, other.token_ids) == (one.reason, one.token_ids), what
        for ours, theirs in ((one.prompt_logprobs, other.prompt_logprobs), (one.logprobs, other.logprobs)):
            assert [value.token_id for value in ours] == [value.token_id for value in theirs], what
            differences += [abs(a.logprob - b.logprob) for a, b in zip(ours, theirs, strict=True)]
    assert not any(np.isnan(differences)), str(request)
    return differences
