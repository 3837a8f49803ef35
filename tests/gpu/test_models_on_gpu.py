"""Whole models on a GPU: every family, and every type that runs through transformers' code, with captured steps and
without; logits in float32 against transformers; the mixture of experts under a CUDA graph.

    python -m pytest -q -n 12 --dist worksteal tests/gpu/test_models_on_gpu.py      small engines: several share a GPU
    MINISGL_EAGER_GRAPHS=1 python -m pytest -q tests/gpu/test_models_on_gpu.py -k engine      on the CPU, to try it
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from minisgl_backend import LLM
from minisgl_backend.environment import Environment
from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.moe.call import MixtureCall, Picked
from minisgl_backend.kernels.moe.reference import has_grouped_gemm
from minisgl_backend.step import Logprobs
from tests.mixtures import by_torch, experts_of
from tests.parity.captured import (
    CAPTURED,
    EAGER,
    FALLBACK,
    LIMITS,
    NATIVE,
    NUM_TOKENS,
    PROMPTS,
    check_greedy,
    greedy_tokens,
    reference,
    save,
)

ON_GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
engines = pytest.mark.skipif(not ON_GPU and not Environment.read().eager_graphs, reason="needs a CUDA device")
pytestmark = [pytest.mark.gpu]

SPREAD = 2**-6  # of the logits: what bfloat16 may differ by
# Rounding picks other experts now and then; a share of positions, where it may.
ROUTED = 0.1
NO_FLOAT32 = "allowed on a GPU for the experts"
TOGETHER = (
    "native gemma4", "native gpt_oss", "native deepseek_v2", "native qwen3_moe", "transformers gemma4_text",
    "transformers diffllama",
)  # fmt: skip


NAMES = ["llama-bias-mha", "llama-llama3-tied", "qwen2-yarn", "qwen3-yarn", "qwen3_moe"]
NAMES += ["cohere2", "gpt_oss", "nemotron", "glm4_moe-groups", "minimax_m2", "ernie4_5_moe"]


@needs_gpu
@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str, tmp_path: Path) -> None:
    from tests.parity.checkpoints import reference_model, save_checkpoint
    from tests.parity.paged import PagedModel

    save_checkpoint(name, tmp_path)
    paged = PagedModel(tmp_path, page_size=16, device="cuda")
    reference = reference_model(tmp_path)
    prompts = {2: [3 + 7 * i % 310 for i in range(130)], 5: [3 + 11 * i % 310 for i in range(9)]}
    got = {row: [logits] for row, logits in paged.step(prompts, {}).items()}
    for i in range(3):
        for row, logits in paged.step({}, {2: 20 + i, 5: 90 + i}).items():
            got[row].append(logits)
    for row, parts in got.items():
        with torch.inference_mode():
            expected = reference(torch.tensor([paged.tokens[row]])).logits[0]
        difference = (torch.cat(parts) - expected).abs().max() / expected.abs().max()
        assert difference <= 5e-4, f"{difference:.1e}"


@engines
@pytest.mark.parametrize("name", [*NATIVE, *FALLBACK])
def test_engine_in_float32(name: str, tmp_path: Path) -> None:
    """TF32 is off, as is torch's default: transformers' tokens, captured or not."""
    assert not torch.backends.cuda.matmul.allow_tf32
    impl = _save(name, tmp_path)
    with _started(tmp_path, model_impl=impl, dtype="float32", **EAGER) as llm:
        eager = greedy_tokens(llm)
    with _started(tmp_path, model_impl=impl, dtype="float32", **CAPTURED) as llm:
        assert greedy_tokens(llm) == eager
    model = reference(name, tmp_path)
    for prompt, tokens in zip(PROMPTS, eager, strict=True):
        check_greedy(model, prompt, tokens)


@engines
@pytest.mark.parametrize("name", [*NATIVE, *FALLBACK])
def test_engine_in_bfloat16(name: str, tmp_path: Path) -> None:
    """Log-probabilities of prompts and answers, captured and not, as long as they have the same tokens."""
    impl = _save(name, tmp_path)
    found = []
    for captures in (EAGER, CAPTURED):
        with _started(tmp_path, model_impl=impl, dtype="bfloat16", **captures) as llm:
            wishes: dict[str, Any] = {"max_tokens": NUM_TOKENS, "logprobs": 20, "prompt_logprobs": 20}
            found.append(llm.generate(PROMPTS, temperature=0.0, ignore_eos=True, **wishes))
    differences: list[float] = []
    values: list[float] = []
    for eager, captured in zip(*found, strict=True):
        pairs = list(zip(eager.prompt_logprobs or (), captured.prompt_logprobs or (), strict=True))
        for one, other in zip(eager.logprobs, captured.logprobs, strict=True):
            pairs.append((one, other))
            if one.token_id != other.token_id:
                break
        for one, other in pairs:
            if one is None or other is None:  # nothing predicts a prompt's first token
                continue
            a, b = _by_token(one), _by_token(other)
            values += a.values()
            differences.append(max(abs(a[token] - b[token]) for token in a.keys() & b.keys()))
    limit = SPREAD * (max(values) - min(values))
    beyond = sum(difference > limit for difference in differences) / len(differences)
    assert beyond <= (ROUTED if _is_routed(tmp_path) else 0.0), f"{max(differences):.3f}, allowed: {limit:.3f}"


@engines
def test_several_engines_in_one_process(tmp_path: Path) -> None:
    """All are there at once, and asked in turn, then at the same time: each answers as alone."""
    with contextlib.ExitStack() as stack:
        llms, alone = [], []
        for name in TOGETHER:
            impl = _save(name, tmp_path / name)
            options = {"model_impl": impl, "dtype": "float32"}  # other company, other sums: rounding would show
            with _started(tmp_path / name, **options) as llm:
                alone.append(greedy_tokens(llm))
            llms.append(stack.enter_context(_started(tmp_path / name, **options)))
        for _ in range(2):
            assert [greedy_tokens(llm) for llm in llms] == alone
        with ThreadPoolExecutor(len(llms)) as pool:
            for _ in range(3):
                assert list(pool.map(greedy_tokens, llms)) == alone


def _save(name: str, folder: Path) -> str:
    try:
        return save(name, folder)
    except (AttributeError, KeyError) as error:
        pytest.skip(f"transformers {transformers.__version__} does not have it: {error}")


@contextlib.contextmanager
def _started(folder: Path, **options: Any) -> Iterator[LLM]:
    try:
        llm = LLM(str(folder), **LIMITS, **options)
    except ConfigError as error:
        if NO_FLOAT32 not in str(error):
            raise
        pytest.skip(str(error))
    with llm:
        yield llm


def _by_token(position: Logprobs) -> dict[int, float]:
    return {position.token_id: position.logprob, **dict(zip(position.top_ids, position.top, strict=True))}


def _is_routed(folder: Path) -> bool:
    config = transformers.AutoConfig.from_pretrained(folder).get_text_config().to_dict()
    return any("expert" in key for key in config)


@needs_gpu
def test_lone_tokens_of_a_mixture_in_bfloat16(tmp_path: Path) -> None:
    """A lone token's router runs beside attention's product. Rounded numbers may pick another expert now and then."""
    from tests.parity.checkpoints import reference_model, save_checkpoint
    from tests.parity.paged import PagedModel

    save_checkpoint("qwen3_moe", tmp_path, hidden_size=256, moe_intermediate_size=128)
    paged = PagedModel(tmp_path, page_size=16, device="cuda", dtype=torch.bfloat16)
    assert paged.model.model.layers[0].mlp.takes_o_proj(1)
    reference = reference_model(tmp_path).bfloat16().float()
    got = [paged.step({2: [3 + 7 * i % 310 for i in range(40)]}, {})[2]]
    got += [paged.step({}, {2: 20 + 5 * i})[2] for i in range(24)]
    with torch.inference_mode():
        expected = reference(torch.tensor([paged.tokens[2]])).logits[0]
    difference = (torch.cat(got).float().cpu() - expected).abs().amax(1) / expected.abs().amax(1)
    assert difference[40:].median() <= 4e-2, difference  # plain torch has half of it


@needs_gpu
@pytest.mark.parametrize("num_tokens", [1, 9, 300])
def test_experts_in_bfloat16(num_tokens: int) -> None:
    arguments = _moe_arguments(num_tokens)
    expected = _moe([t if t.dtype == torch.int64 else t.float() for t in arguments])
    got = _moe([t.cuda() for t in arguments]).float().cpu()
    assert (got - expected).abs().max() <= 0.02 * expected.abs().max()


@needs_gpu
def test_experts_under_a_cuda_graph() -> None:
    arguments = [t.cuda() for t in _moe_arguments(16)]
    if not has_grouped_gemm(arguments[0]):
        pytest.skip("this torch or GPU has no grouped products")
    _moe(arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = _moe(arguments)
    x, ids, *_ = arguments
    x.copy_(torch.randn_like(x))
    ids.copy_(ids.flip(0))
    graph.replay()
    torch.testing.assert_close(out, _moe(arguments))


def _moe(arguments: list[torch.Tensor]) -> torch.Tensor:
    x, ids, weights, gate_up, down = arguments
    return by_torch(x, experts_of(gate_up, down), MixtureCall(Picked(ids, weights)))


def _moe_arguments(num_tokens: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    num_experts, hidden, size = 8, 128, 64
    ids = torch.stack([torch.randperm(num_experts - 1)[:2] for _ in range(num_tokens)])
    gate_up = torch.randn(num_experts, 2 * size, hidden) * 0.1
    down = torch.randn(num_experts, hidden, size) * 0.1
    x, weights = torch.randn(num_tokens, hidden), torch.rand(num_tokens, 2)
    return [x.bfloat16(), ids, weights, gate_up.bfloat16(), down.bfloat16()]
