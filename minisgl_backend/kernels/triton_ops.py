"""`Ops` and `PlainKernels` on a GPU: the Triton language where it beats a chain of library calls, cuBLAS elsewhere.

linear/choose.py says which kernel a GEMM takes, moe/choose.py which a mixture takes. cuBLAS algorithms are measured at
start, for the row counts of decode steps and for some of prompts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from minisgl_backend.kernels import elementwise as fused
from minisgl_backend.kernels.attention.latent_store import latent_store
from minisgl_backend.kernels.candidate import PLAIN
from minisgl_backend.kernels.carveout import LARGEST_HIDDEN, prefer_shared_memory
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.linear import small_rows
from minisgl_backend.kernels.linear.choose import LinearKey, linear_chooser
from minisgl_backend.kernels.linear.measured import KernelTuner
from minisgl_backend.kernels.linear.tiling import MAX_ROWS, long_shape
from minisgl_backend.kernels.linear.tuned import TunedLinear, prompt_rows
from minisgl_backend.kernels.moe import early_router, few_tokens, grouped, grouped_tma, one_token, score_router
from minisgl_backend.kernels.moe.choose import ExpertsKey, experts_chooser
from minisgl_backend.kernels.ops import QKNormRope
from minisgl_backend.kernels.plain import ExpertChoice
from minisgl_backend.kernels.torch_ops import TorchOps, TorchPlainKernels
from minisgl_backend.kv.layout import LayerKV


class TritonOps(TorchOps):
    """See `Ops`."""

    def __init__(self, device: torch.device, hidden_size: int | None = None, facts: DeviceFacts | None = None) -> None:
        """`hidden_size`: of the dense model, where it is known: small models get another carveout, see carveout.py.
        facts: of another device than this one, to choose kernels for."""
        self.facts = facts or DeviceFacts.of(device)
        if self.has_pdl and hidden_size is not None and hidden_size <= LARGEST_HIDDEN:
            prefer_shared_memory()

    @property
    def has_pdl(self) -> bool:
        """Programmatic dependent launch, see linear/small_rows.py."""
        return self.facts.dependent_launch

    def pdl(self, x: torch.Tensor) -> bool:
        """Whether to launch with PDL: not at large batch, where it takes room from the kernel that is still running."""
        return self.has_pdl and x.shape[0] <= MAX_ROWS

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return fused.rms_norm(x, weight, eps, self.pdl(x), out)

    def add_norm(
        self, hidden: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, multiplier: float = 1.0
    ) -> torch.Tensor:
        return fused.add_norm(hidden, x, weight, eps, multiplier, self.pdl(x))

    def rope_store(
        self,
        qkv: torch.Tensor,
        rotation: QKNormRope,
        positions: torch.Tensor,
        slots: torch.Tensor,
        kv: LayerKV,
        num_q_heads: int,
    ) -> torch.Tensor:
        return fused.rope_store(qkv, rotation, positions, slots, kv, num_q_heads, self.pdl(qkv))

    def latent_store(
        self,
        q: torch.Tensor,
        latents: torch.Tensor,
        norm: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        cache: torch.Tensor,
        eps: float,
        scale: float = 1.0,
    ) -> torch.Tensor:
        return latent_store(q, latents, norm, cos_sin, positions, slots, cache, eps, scale, self.pdl(q))


class TritonPlainKernels(TorchPlainKernels):
    """See `PlainKernels`. One object per device: it owns the workspace of split-K GEMMs."""

    ops: TritonOps
    kernel_tuner: KernelTuner

    def __init__(self, ops: TritonOps, device: torch.device) -> None:
        super().__init__(ops)
        self._linear_kernel = linear_chooser(PLAIN, ops.facts).kernel
        self._experts_kernel = experts_chooser(PLAIN, ops.facts).kernel
        self.workspace = small_rows.LinearWorkspace(device)
        choices = _cache_folder() / "minisgl" / "gemms.json"
        self._tuned = TunedLinear(device, choices)
        self.kernel_tuner = KernelTuner(self._tuned.stream, ops.facts, choices)

    def prepare_linear(self, weights: Sequence[torch.Tensor], rows: Sequence[int], longest: int = 0) -> None:
        self._tuned.tune(weights, [*rows, *prompt_rows(longest)])

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        *,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        activation: str | None = None,
    ) -> torch.Tensor:
        size_out, size_in = weight.shape
        kernel = self._linear_kernel(
            LinearKey.of(x, size_out, norm_weight=norm_weight, bias=bias, residual=residual, activation=activation)
        )
        if kernel == "small_rows":
            return small_rows.linear(
                x, weight, self.workspace, norm_weight=norm_weight, eps=eps, bias=bias, residual=residual,
                activation=activation, pdl=self.ops.pdl(x),
            )  # fmt: skip
        if kernel == "long_rows":
            shape = long_shape(size_out, size_in, self.ops.facts.multiprocessors)
            return small_rows.linear(x, weight, self.workspace, shape=shape, pdl=self.ops.pdl(x))
        if norm_weight is not None:
            x = self.ops.rms_norm(x, norm_weight, eps)
        if kernel == "cublaslt" and (out := self._tuned.linear(x, weight, residual)) is not None:
            return out if activation is None else fused.activate_mul(out, activation, self.ops.pdl(x))
        if residual is not None:
            # In place: otherwise torch would copy the residual first, with one more kernel.
            out = residual.addmm_(x, weight.t())
            return out if bias is None else out.add_(bias)
        out = F.linear(x, weight, bias)
        return out if activation is None else fused.activate_mul(out, activation, self.ops.pdl(x))

    def linear_into(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        (rows, size_in), size_out = x.shape, weight.shape[0]
        kernel = self._linear_kernel(
            LinearKey(rows, size_out, size_in, x.dtype, unit_stride=x.stride(1) == 1, into=True)
        )
        if kernel == "small_rows":
            if rows == 1:
                small_rows.linear(x, weight, self.workspace, pdl=self.ops.pdl(x), out=out)
            else:
                out.copy_(self.linear(x, weight))  # these kernels write contiguous rows
        elif kernel != "cublaslt" or not self._tuned.linear_into(x, weight, out):
            torch.mm(x, weight.t(), out=out)

    def moe_pdl(self, x: torch.Tensor) -> bool:
        """`pdl` for mixtures, also at large batch: their tiny sorting kernels leave room for one that starts early."""
        return self.ops.has_pdl and x.shape[0] <= grouped.MAX_PDL_TOKENS

    def route(
        self, logits: torch.Tensor, experts_per_token: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return grouped.route(logits, experts_per_token, renormalize, self.moe_pdl(logits))

    def choose_experts(
        self, logits: torch.Tensor, choice: ExpertChoice, correction_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if logits.shape[1] > score_router.MAX_EXPERTS:
            return super().choose_experts(logits, choice, correction_bias)
        return score_router.choose_experts(logits, choice, correction_bias, self.moe_pdl(logits))

    def moe(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        residual: torch.Tensor | None = None,
        activation: str = "silu",
        biases: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    ) -> torch.Tensor:
        (tokens, k), (num_experts, hidden, size) = expert_ids.shape, down.shape
        aligned = gate_up.data_ptr() % 16 == 0 and down.data_ptr() % 16 == 0
        kernel = self._experts_kernel(
            ExpertsKey(
                tokens, num_experts, k, hidden, size, x.dtype, bias=biases is not None, activation=activation,
                unit_stride=x.stride(1) == 1, aligned=aligned,
            )
        )  # fmt: skip
        arguments = (x, expert_ids, expert_weights, gate_up, down, residual, activation)
        if kernel == "grouped_tma":
            return grouped_tma.moe(*arguments, biases=biases)
        return grouped.moe(*arguments, pdl=self.moe_pdl(x), biases=biases)

    def mixture(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        experts_per_token: int,
        renormalize: bool,
        *,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        residual: torch.Tensor | None = None,
        activation: str = "silu",
        router_bias: torch.Tensor | None = None,
        biases: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    ) -> torch.Tensor:
        (tokens, hidden), (num_experts, _, size) = x.shape, down.shape
        kernel = self._experts_kernel(
            ExpertsKey(
                tokens, num_experts, experts_per_token, hidden, size, x.dtype, routed=True, bias=biases is not None,
                activation=activation, unit_stride=x.stride(1) == 1,
            )
        )  # fmt: skip
        if kernel == "one_token":
            return one_token.mixture(
                x, router, gate_up, down, experts_per_token, renormalize, norm_weight=norm_weight, eps=eps,
                residual=residual, activation=activation, router_bias=router_bias, biases=biases, pdl=self.ops.pdl(x),
            )  # fmt: skip
        if kernel == "few_tokens":
            return few_tokens.mixture(
                x, router, gate_up, down, experts_per_token, renormalize, self.workspace, norm_weight=norm_weight,
                eps=eps, residual=residual, activation=activation, router_bias=router_bias, biases=biases,
                pdl=self.ops.pdl(x),
            )  # fmt: skip
        return super().mixture(
            x, router, gate_up, down, experts_per_token, renormalize, norm_weight=norm_weight, eps=eps,
            residual=residual, activation=activation, router_bias=router_bias, biases=biases,
        )  # fmt: skip

    def early_router(
        self, router: torch.Tensor, norm_weight: torch.Tensor, o_proj: torch.Tensor
    ) -> torch.Tensor | None:
        (num_experts, hidden), size_in = router.shape, o_proj.shape[1]
        key = ExpertsKey(1, num_experts, 1, hidden, 1, router.dtype, routed=True, o_proj_inputs=size_in)
        if self._experts_kernel(key) != "early_router":
            return None
        return early_router.early_router(router, norm_weight, o_proj)

    def o_proj_and_mixture(
        self,
        x: torch.Tensor,
        o_proj: torch.Tensor,
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
        pdl = self.ops.pdl(x)
        hidden, logits = early_router.output_and_logits(x, o_proj, residual, early, experts_per_token, pdl=pdl)
        return one_token.experts(
            hidden, logits, gate_up, down, renormalize, divided=False, norm_weight=norm_weight, eps=eps,
            residual=hidden, activation=activation, pdl=pdl,
        )  # fmt: skip


def _cache_folder() -> Path:
    """Folder of Triton's compiled kernels: one variable moves all caches, one deletion empties them."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or os.path.expanduser("~/.triton/cache"))
