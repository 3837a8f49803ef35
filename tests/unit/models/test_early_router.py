"""A lone token's attention leaves its product to the mixture behind it, where the kernels serve that."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from minisgl_backend.kernels.candidate import PLAIN, Candidate
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.moe import choose, reference
from minisgl_backend.kernels.moe.call import Experts, MixtureCall
from minisgl_backend.kernels.moe.choose import ExpertsKey
from minisgl_backend.kernels.moe.mixtures import MixtureKernels
from tests.parity.checkpoints import save_checkpoint
from tests.parity.paged import PagedModel


def with_router(
    kernels: MixtureKernels, x: torch.Tensor, experts: Experts[torch.Tensor], call: MixtureCall
) -> torch.Tensor:
    """A mixture with an early router, in plain torch."""
    early, residual = call.early, call.residual
    assert early is not None
    assert residual is not None
    logits = torch.cat([x, residual], 1) @ early.weight.t()
    hidden = kernels.plain.linear(x, early.o_proj, GemmCall(residual=residual))
    scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + call.eps)
    picked = kernels.route(logits * scale, experts.experts_per_token, experts.renormalize)
    normed = kernels.ops.rms_norm(hidden, call.norm_weight, call.eps)
    return reference.mixture(kernels, normed, experts, MixtureCall(picked, residual=hidden))


@pytest.mark.parametrize(
    ("name", "more"), [("qwen3_moe", {}), ("qwen3_moe-sharded-mixed", {}), ("qwen3_moe", {"attention_bias": True})]
)
def test_a_lone_token_gets_the_same_logits(
    name: str, more: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And several tokens together go the other way, but in the last layer where one of them is wanted. A product with a
    bias is never left."""
    save_checkpoint(name, tmp_path, **more)

    def logits() -> list[torch.Tensor]:
        paged = PagedModel(tmp_path, page_size=16)
        steps = [
            paged.step({1: [3, 4, 5]}, {}, last_only=True),
            paged.step({}, {1: 7}),
            paged.step({}, {1: 9, 2: 4}),
            paged.step({}, {1: 8}),
        ]
        return [rows for step in steps for rows in step.values()]

    expected = logits()
    run = Mock(side_effect=with_router)
    early = Candidate[ExpertsKey](
        "early_router", "", lambda key, facts: key.o_proj_inputs > 0 and key.tokens == 1, run=f"{__name__}:run"
    )
    monkeypatch.setattr(sys.modules[__name__], "run", run, raising=False)
    monkeypatch.setattr(choose, "CANDIDATES", {PLAIN: (early, *choose.CANDIDATES[PLAIN])})
    for found, each in zip(logits(), expected, strict=True):
        torch.testing.assert_close(found, each, atol=1e-4, rtol=1e-4)
    mixtures = sum(type(module).__name__ == "MoeMLP" for module in PagedModel(tmp_path, page_size=16).model.modules())
    assert run.call_count == (0 if more else 2 * mixtures + 1)
