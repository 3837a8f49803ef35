"""Replaces chains of kernels in transformers' modules by kernels of this project: RMSNorm, and experts in two weights.

Modules keep their parameters and names; only their `forward` is replaced. Unrecognised modules are left unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn
from transformers.activations import GELUActivation, GELUTanh
from transformers.integrations.moe import _default_apply_gate

from minisgl_backend.kernels.candidate import PLAIN
from minisgl_backend.kernels.moe.call import Experts, MixtureCall, Picked
from minisgl_backend.kernels.moe.mixtures import ExpertsKernels, MixtureKernels
from minisgl_backend.kernels.ops import Ops
from minisgl_backend.layers.config import Activation

log = logging.getLogger(__name__)

_TRIAL_ROWS = 4
_OFFSETS = (0.0, 1.0)  # added to stored weights; Gemma stores weight - 1
_TOLERANCE = {torch.float32: 1e-4}
_COARSE = 2e-2  # for 16-bit dtypes
_SMALLEST = 1e-3  # least magnitude of compared values


@torch.inference_mode()
def fuse(model: nn.Module, ops: Ops, kernels: MixtureKernels) -> list[nn.Module]:
    """Returns the modules of experts that are left unchanged. Called once all weights are loaded."""
    norms, experts, others = 0, 0, []
    for module in model.modules():
        norm = _fused_norm(module, ops)
        if norm is not None:
            module.forward = norm
            norms += 1
        elif hasattr(type(module), "_apply_gate"):
            fused = _fused_experts(module, kernels)
            if fused is None:
                others.append(module)
            else:
                module.forward = fused
                experts += 1
    log.info("kernels of this engine: %d norms and %d layers of experts; the rest is torch's", norms, experts)
    return others


def _fused_norm(module: nn.Module, ops: Ops) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The fused forward of a norm. None: a trial shows that it is no RMSNorm with a weight (class and field names do
    not tell)."""
    parameters = dict(module.named_parameters())
    weight, eps = parameters.get("weight"), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if set(parameters) != {"weight"} or weight is None or weight.dim() != 1 or not isinstance(eps, float):
        return None
    size = len(weight)
    generator = torch.Generator(device=weight.device).manual_seed(0)
    x = torch.randn(_TRIAL_ROWS, size, device=weight.device, generator=generator).to(weight.dtype) + 0.5
    try:
        expected = module(x)
    except Exception:  # it does not take one tensor: no norm
        return None
    for offset in _OFFSETS:
        with_offset = weight.detach() if offset == 0.0 else weight.detach().float() + offset
        found = ops.rms_norm(x, with_offset, eps)
        if found.shape != expected.shape:
            return None
        # By channel: a single large weight must not hide that the others differ.
        tolerance = _TOLERANCE.get(x.dtype, _COARSE) * (expected.abs().amax(0) + _SMALLEST)
        if bool(((found - expected).abs() <= tolerance).all()):
            return _Norm(ops, with_offset, eps)
    return None


class _Norm:
    def __init__(self, ops: Ops, weight: torch.Tensor, eps: float) -> None:
        self._ops, self._weight, self._eps = ops, weight, eps

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows = hidden_states.reshape(-1, len(self._weight))
        return self._ops.rms_norm(rows, self._weight, self._eps).view(hidden_states.shape)


def _fused_experts(module: nn.Module, kernels: MixtureKernels) -> Callable[..., torch.Tensor] | None:
    """The fused forward of experts. None: they do not compute down(activation(gate) * up), or have another layout."""
    activation = _activation(getattr(module, "act_fn", None))
    flags = {"is_concatenated": True, "is_transposed": False, "has_bias": False, "has_gate": True}
    plain = all(getattr(module, name, None) is value for name, value in flags.items())
    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if activation is None or not plain or getattr(type(module), "_apply_gate", None) is not _default_apply_gate:
        return None
    if getattr(module, "has_post_expert_norm", False) or {"gate_up_proj", "down_proj"} != {
        name for name, _ in module.named_parameters()
    }:
        return None
    if not isinstance(gate_up, torch.Tensor) or not isinstance(down, torch.Tensor):
        return None
    return _Experts(kernels, gate_up.detach(), down.detach(), activation)


class _Experts:
    def __init__(
        self, kernels: MixtureKernels, gate_up: torch.Tensor, down: torch.Tensor, activation: Activation
    ) -> None:
        num_experts, hidden_size, size = down.shape
        self._kernels: ExpertsKernels[torch.Tensor] = ExpertsKernels(PLAIN, kernels)
        self._experts = Experts(
            gate_up=gate_up, down=down, num_experts=num_experts, hidden_size=hidden_size, intermediate_size=size,
            activation=activation,
        )  # fmt: skip

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        picked = Picked(top_k_index.long(), top_k_weights)
        return self._kernels(hidden_states, self._experts, MixtureCall(picked))


def _activation(act_fn: object) -> Activation | None:
    if type(act_fn).__name__ in ("SiLUActivation", "SiLU"):
        return "silu"
    if isinstance(act_fn, GELUTanh):
        return "gelu_tanh"
    return "gelu" if isinstance(act_fn, GELUActivation) else None
