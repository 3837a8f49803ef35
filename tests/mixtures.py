"""Mixtures of experts by the kernels of one device, for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from minisgl_backend.kernels.candidate import PLAIN
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.linear.kernels import GemmDevice, PlainKernels
from minisgl_backend.kernels.moe.call import Experts, MixtureCall
from minisgl_backend.kernels.moe.mixtures import ExpertsKernels, MixtureKernels
from minisgl_backend.kernels.torch_ops import TorchOps

TORCH = MixtureKernels(PlainKernels(GemmDevice(TorchOps())))


def experts_of(gate_up: Any, down: Any, experts_per_token: int = 0, renormalize: bool = True, **more: Any) -> Experts:
    """Of weights of any format, whose sizes are theirs. more: of `Experts`."""
    outputs, numbers = (getattr(one, "numbers", getattr(one, "words", one)) for one in (gate_up, down))
    return Experts(
        gate_up=gate_up, down=down, num_experts=len(numbers), hidden_size=numbers.shape[1],
        intermediate_size=outputs.shape[1] // 2, experts_per_token=experts_per_token, renormalize=renormalize, **more,
    )  # fmt: skip


def by_torch(x: torch.Tensor, experts: Experts, call: MixtureCall, weight_format: str = PLAIN) -> torch.Tensor:
    return ExpertsKernels(weight_format, TORCH)(x, experts, call)


def interpreted(max_out: int = 128, max_split: int = 8) -> Any:
    """Those of a GPU, on the CPU in Triton's interpreter."""
    from minisgl_backend.kernels.linear.workspace import LinearWorkspace

    device = torch.device("cpu")
    kernels = _of(device, replace(DeviceFacts.named("h200"), dependent_launch=False))
    kernels.plain.device.workspace = LinearWorkspace(device, max_out, max_split)
    return kernels


def on_gpu(dependent_launch: bool = True) -> Any:
    """dependent_launch: where the device has it."""
    device = torch.device("cuda")
    facts = DeviceFacts.of(device)
    return _of(device, replace(facts, dependent_launch=dependent_launch and facts.dependent_launch))


def by_gpu(x: torch.Tensor, experts: Experts, call: MixtureCall, weight_format: str = PLAIN) -> torch.Tensor:
    return ExpertsKernels(weight_format, on_gpu())(x, experts, call)


def _of(device: torch.device, facts: DeviceFacts) -> Any:
    from minisgl_backend.kernels.moe.gpu import TritonMixtureKernels
    from minisgl_backend.kernels.triton_ops import TritonOps

    return TritonMixtureKernels(PlainKernels(GemmDevice(TritonOps(device, facts=facts), device)))
