"""Whole models on a GPU, float32, against transformers; and the mixture of experts under a CUDA graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl_backend.kernels.torch_ops import TorchOps, TorchPlainKernels, has_grouped_gemm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


NAMES = ["llama-bias-mha", "llama-llama3-tied", "qwen2-yarn", "qwen3-yarn", "qwen3_moe"]
NAMES += ["cohere2", "gpt_oss", "nemotron", "glm4_moe-groups", "minimax_m2", "ernie4_5_moe"]


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


@pytest.mark.parametrize("num_tokens", [1, 9, 300])
def test_experts_in_bfloat16(num_tokens: int) -> None:
    arguments = _moe_arguments(num_tokens)
    expected = TorchPlainKernels(TorchOps()).moe(*(t if t.dtype == torch.int64 else t.float() for t in arguments))
    got = TorchPlainKernels(TorchOps()).moe(*(t.cuda() for t in arguments)).float().cpu()
    assert (got - expected).abs().max() <= 0.02 * expected.abs().max()


def test_experts_under_a_cuda_graph() -> None:
    arguments = [t.cuda() for t in _moe_arguments(16)]
    if not has_grouped_gemm(arguments[0]):
        pytest.skip("this torch or GPU has no grouped products")
    TorchPlainKernels(TorchOps()).moe(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = TorchPlainKernels(TorchOps()).moe(*arguments)
    x, ids, *_ = arguments
    x.copy_(torch.randn_like(x))
    ids.copy_(ids.flip(0))
    graph.replay()
    torch.testing.assert_close(out, TorchPlainKernels(TorchOps()).moe(*arguments))


def _moe_arguments(num_tokens: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    num_experts, hidden, size = 8, 128, 64
    ids = torch.stack([torch.randperm(num_experts - 1)[:2] for _ in range(num_tokens)])
    gate_up = torch.randn(num_experts, 2 * size, hidden) * 0.1
    down = torch.randn(num_experts, hidden, size) * 0.1
    x, weights = torch.randn(num_tokens, hidden), torch.rand(num_tokens, 2)
    return [x.bfloat16(), ids, weights, gate_up.bfloat16(), down.bfloat16()]
