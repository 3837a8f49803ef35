"""A lone token's attention leaves its product to the mixture behind it, where the kernels serve that."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.kernels import GemmDevice, PlainKernels
from minisgl_backend.kernels.moe.reference import TorchMixtureKernels
from minisgl_backend.kernels.select import DeviceKernels
from minisgl_backend.kernels.torch_ops import TorchOps
from minisgl_backend.models import build
from tests.parity.checkpoints import save_checkpoint
from tests.parity.paged import PagedModel


class EarlyKernels(TorchMixtureKernels):
    """In plain torch, with a note of each call."""

    def __init__(self) -> None:
        super().__init__(PlainKernels(GemmDevice(TorchOps())))
        self.calls = 0

    def early_router(
        self, router: torch.Tensor, norm_weight: torch.Tensor, product: torch.Tensor
    ) -> torch.Tensor | None:
        normed = router * norm_weight
        return torch.cat([normed @ product, normed], 1)

    def o_proj_and_mixture(
        self,
        x: torch.Tensor,
        product: torch.Tensor,
        residual: torch.Tensor,
        early: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        experts_per_token: int,
        renormalize: bool,
        *,
        norm_weight: torch.Tensor,
        eps: float,
        activation: str = "silu",
    ) -> torch.Tensor:
        self.calls += 1
        logits = torch.cat([x, residual], 1) @ early.t()
        hidden = self.plain.linear(x, product, GemmCall(residual=residual))
        scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps)
        ids, weights = self.route(logits * scale, experts_per_token, renormalize)
        return self.moe(self.ops.rms_norm(hidden, norm_weight, eps), ids, weights, gate_up, down, hidden)


@pytest.mark.parametrize(
    ("name", "more"), [("qwen3_moe", {}), ("qwen3_moe-sharded-mixed", {}), ("qwen3_moe", {"attention_bias": True})]
)
def test_a_lone_token_gets_the_same_logits(
    name: str, more: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And several tokens together go the other way, but in the last layer where one of them is wanted. A product with a
    bias is never left."""
    save_checkpoint(name, tmp_path, **more)

    def logits(mixtures: TorchMixtureKernels) -> list[torch.Tensor]:
        kernels = DeviceKernels(mixtures.plain.device)
        kernels.mixtures = mixtures
        monkeypatch.setattr(build, "select_kernels", lambda *args: kernels)
        paged = PagedModel(tmp_path, page_size=16)
        steps = [
            paged.step({1: [3, 4, 5]}, {}, last_only=True),
            paged.step({}, {1: 7}),
            paged.step({}, {1: 9, 2: 4}),
            paged.step({}, {1: 8}),
        ]
        return [rows for step in steps for rows in step.values()]

    early = EarlyKernels()
    for found, expected in zip(
        logits(early), logits(TorchMixtureKernels(PlainKernels(GemmDevice(TorchOps())))), strict=True
    ):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    mixtures = sum(type(module).__name__ == "MoeMLP" for module in PagedModel(tmp_path, page_size=16).model.modules())
    assert early.calls == (0 if more else 2 * mixtures + 1)
