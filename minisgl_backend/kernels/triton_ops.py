"""`Ops` and `PlainKernels` on a GPU: the Triton language where it beats a chain of library calls, cuBLAS elsewhere.

Which GEMM takes which kernel was measured on an H200 with benchmarks/kernels; with which algorithm cuBLAS does it is
measured at start, for the row counts of decode steps and for some of prompts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from minisgl_backend.kernels import elementwise as fused
from minisgl_backend.kernels.carveout import LARGEST_HIDDEN, prefer_shared_memory
from minisgl_backend.kernels.linear import small_rows as small_linear
from minisgl_backend.kernels.linear.tuned import TunedLinear, prompt_rows
from minisgl_backend.kernels.moe import early_router
from minisgl_backend.kernels.moe import few_tokens as moe_few
from minisgl_backend.kernels.moe import grouped as moe
from minisgl_backend.kernels.moe import one_token as moe_one
from minisgl_backend.kernels.shared_memory import LARGEST, shared_memory
from minisgl_backend.kernels.torch_ops import TorchOps, TorchPlainKernels
from minisgl_backend.kv.layout import ONE, KVScales

# Numbers of a gated weight from which on our kernel, with the activation but without the norm, is faster than two.
LARGE_GATED = 120 << 20
LARGE_LONG = 24 << 20  # likewise of a weight with at least as many inputs as outputs
LARGEST_OUT = 65536  # of weights of GEMMs with a few rows; a vocabulary has more
LEAST_VOCABULARY_IN = 2048  # inputs of a GEMM with a vocabulary, one row, that were measured to be enough for ours


class TritonOps(TorchOps):
    """The contracts are those of `Ops`."""

    def __init__(self, device: torch.device, hidden_size: int | None = None) -> None:
        """`hidden_size`: of a dense model that is to be computed, where it is known: small ones are launched otherwise,
        see carveout.py."""
        self.has_pdl = torch.cuda.get_device_properties(device).major >= 9
        if self.has_pdl and hidden_size is not None and hidden_size <= LARGEST_HIDDEN:
            prefer_shared_memory()

    def pdl(self, x: torch.Tensor) -> bool:
        """At large batch a kernel that starts early takes room from the one that still runs."""
        return self.has_pdl and x.shape[0] <= small_linear.MAX_ROWS

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
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        num_q_heads: int,
        eps: float,
        scales: KVScales = ONE,
    ) -> torch.Tensor:
        return fused.rope_store(
            qkv, q_norm, k_norm, cos_sin, positions, slots, k_cache, v_cache, num_q_heads, eps, self.pdl(qkv), scales
        )


class TritonPlainKernels(TorchPlainKernels):
    """The contracts are those of `PlainKernels`. One object a device: it owns the workspace of split GEMMs."""

    ops: TritonOps

    def __init__(self, ops: TritonOps, device: torch.device) -> None:
        super().__init__(ops)
        self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._has_room = shared_memory(device) >= LARGEST
        self.workspace = small_linear.LinearWorkspace(device)
        self._tuned = TunedLinear(device, _cache_folder() / "minisgl" / "products.json")

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
        gated = activation is not None
        if not (gated and bias is not None) and self._is_small(x, weight, residual, gated, norm_weight is not None):
            return small_linear.linear(
                x, weight, self.workspace, norm_weight=norm_weight, eps=eps, bias=bias, residual=residual,
                activation=activation, pdl=self.ops.pdl(x),
            )  # fmt: skip
        if norm_weight is None and bias is None and residual is None and not gated and self._is_long(x, weight):
            shape = small_linear.long_shape(weight.shape[0], weight.shape[1], self._num_sms)
            return small_linear.linear(x, weight, self.workspace, shape=shape, pdl=self.ops.pdl(x))
        if norm_weight is not None:
            x = self.ops.rms_norm(x, norm_weight, eps)
        if bias is None and (out := self._tuned.linear(x, weight, residual)) is not None:
            return out if activation is None else fused.activate_mul(out, activation, self.ops.pdl(x))
        if residual is not None:
            # In place: torch would copy the residual first, a kernel more.
            out = residual.addmm_(x, weight.t())
            return out if bias is None else out.add_(bias)
        out = F.linear(x, weight, bias)
        return out if activation is None else fused.activate_mul(out, activation, self.ops.pdl(x))

    def linear_into(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        # Of a vocabulary ours was not tried there: its programs write two numbers each, and `out` may be far away.
        if len(weight) <= LARGEST_OUT and self._is_small(x, weight, None, False, False):
            if x.shape[0] == 1:
                small_linear.linear(x, weight, self.workspace, pdl=self.ops.pdl(x), out=out)
            else:
                out.copy_(self.linear(x, weight))  # these kernels write rows that touch
        elif not self._tuned.linear_into(x, weight, out):
            torch.mm(x, weight.t(), out=out)

    def moe_pdl(self, x: torch.Tensor) -> bool:
        """Sorting pairs is a chain of tiny kernels, which leave room for one that starts early."""
        return self.ops.has_pdl and x.shape[0] <= moe.MAX_PDL_TOKENS

    def _is_small(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, gated: bool, normed: bool
    ) -> bool:
        """Measured on an H200, norm and activation kernels counted in: see benchmarks/kernels."""
        rows, size_out, size_in = x.shape[0], *weight.shape
        if rows > small_linear.MAX_ROWS or x.stride(1) != 1 or x.element_size() != 2:
            return False  # the tiles were chosen for numbers of two bytes
        if size_out > LARGEST_OUT:
            return rows == 1 and size_in >= LEAST_VOCABULARY_IN and not (gated or normed) and residual is None
        if rows <= small_linear.MAX_VECTOR_ROWS:
            return True
        if residual is not None:
            return size_out <= 2048 or rows <= 16
        if gated:
            large = not normed and size_out * size_in >= LARGE_GATED
            if rows > 32:  # tiles of 128 outputs, one to a multiprocessor
                large &= 3 * self._num_sms // 4 <= size_out // 256 <= self._num_sms
            return large or small_linear.is_sliced(rows, size_in)
        sliced = rows <= small_linear.MAX_SLICED_ROWS and size_in <= 2048
        return rows <= 16 and size_out * size_in <= (12 if sliced else 8) << 20

    def _is_long(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Of GEMMs with nothing fused: those behind a sum over ranks, or behind a gated one. Measured on an H200
        in a chain of Qwen3-32B's kernels over two ranks; alone, cuBLAS is as fast. Behind attention, which has fewer
        inputs than outputs, cuBLAS was faster by 12 us."""
        rows, size_out, size_in = x.shape[0], *weight.shape
        serves = self.ops.has_pdl and self._has_room and x.stride(1) == 1 and x.element_size() == 2
        return serves and rows <= 16 and size_out <= size_in and size_out * size_in >= LARGE_LONG

    def route(
        self, logits: torch.Tensor, experts_per_token: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return moe.route(logits, experts_per_token, renormalize, self.moe_pdl(logits))

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
        return moe.moe(
            x, expert_ids, expert_weights, gate_up, down, residual, activation, tma=self.ops.has_pdl,
            pdl=self.moe_pdl(x), biases=biases,
        )  # fmt: skip

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
        if moe_one.serves(x, router):
            return moe_one.mixture(
                x, router, gate_up, down, experts_per_token, renormalize, norm_weight=norm_weight, eps=eps,
                residual=residual, activation=activation, router_bias=router_bias, biases=biases, pdl=self.ops.pdl(x),
            )  # fmt: skip
        if moe_few.serves(x, router):
            return moe_few.mixture(
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
        return early_router.early_router(router, norm_weight, o_proj) if early_router.serves(router, o_proj) else None

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
        return moe_one.experts(
            hidden, logits, gate_up, down, renormalize, divided=False, norm_weight=norm_weight, eps=eps,
            residual=hidden, activation=activation, pdl=pdl,
        )  # fmt: skip


def _cache_folder() -> Path:
    """Where the Triton language keeps compiled kernels: one variable moves all caches, one deletion empties them."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or os.path.expanduser("~/.triton/cache"))
