"""GEMMs of one device: what the rows of choose.py name is run, for each weight format."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch

from minisgl_backend.kernels.candidate import PLAIN, Run, on_gpu
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.linear.call import BARE, GemmCall, LinearKey, WeightKind
from minisgl_backend.kernels.linear.choose import LinearChooser
from minisgl_backend.kernels.linear.plain.tiling import MAX_ROWS
from minisgl_backend.kernels.linear.plain.tuned import TunedLinear, prompt_rows
from minisgl_backend.kernels.linear.tuning.measured import KernelTuner
from minisgl_backend.kernels.linear.workspace import LinearWorkspace
from minisgl_backend.kernels.ops import Ops

SCRATCH_BYTES = 128 << 20  # for a dequantized part of a weight: smaller parts would be too small for cuBLAS
CPU = torch.device("cpu")


class QuantizedWeight(Protocol):
    @property
    def kind(self) -> WeightKind: ...


Weight = TypeVar("Weight", bound=torch.Tensor | QuantizedWeight)


class GemmDevice:
    """What all GEMMs of one device share, which must not overlap."""

    workspace: LinearWorkspace  # these two where this project's kernels run on a GPU
    tuned: TunedLinear
    tuner: KernelTuner | None = None  # None: kernels are not measured

    def __init__(
        self,
        ops: Ops,
        device: torch.device = CPU,
        facts: DeviceFacts | None = None,
        chooser: Callable[[str, DeviceFacts], LinearChooser] = LinearChooser,
    ) -> None:
        """ops: of the same device. facts: of another device, to choose kernels for; chooser: by weight format."""
        self.ops, self.device, self.chooser = ops, device, chooser
        self.facts = facts or ops.facts or replace(DeviceFacts.of(device), own_kernels=False)
        if on_gpu(self.facts):
            choices = _cache_folder() / "minisgl" / "gemms.json"
            self.workspace, self.tuned = LinearWorkspace(device), TunedLinear(device, choices)
            self.tuner = KernelTuner(self.tuned.stream, self.facts, choices)

    def pdl(self, x: torch.Tensor) -> bool:
        """As `TritonOps.pdl`."""
        return self.facts.dependent_launch and x.shape[0] <= MAX_ROWS

    @cached_property
    def scratch(self) -> torch.Tensor:
        """uint8 [SCRATCH_BYTES]; to be asked for before anything is captured."""
        return torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=self.device)


class LinearKernels(Generic[Weight]):
    """GEMMs with weights of one format. All weights of a model in it hold it.

    Statistics and activations are computed in float32 whatever the format of the tensors is.
    """

    def __init__(self, weight_format: str, device: GemmDevice, facts: DeviceFacts | None = None) -> None:
        """facts: of the device, where a trial found others than it has."""
        self.device, self.ops = device, device.ops
        self.chooser = device.chooser(weight_format, facts or device.facts)
        self._only = only = self.chooser.only
        # `linear` for calls without `out`: of the one row that serves this device at all, without a detour.
        self.direct: Run = self.linear if only is None else partial(only, device)

    def linear(self, x: torch.Tensor, weight: Weight, call: GemmCall = BARE) -> torch.Tensor:
        """See `GemmCall`. Does not synchronise with the device."""
        run = self._only
        if run is None:
            touches, block, repacked = x.stride(1) == 1, None, None
            if isinstance(weight, torch.Tensor):
                size_out = len(weight)
            else:
                size_out, _, _, block, repacked, _ = weight.kind
                if not touches:
                    x, touches = x.contiguous(), True
            norm_weight, _, bias, residual, activation, out, _ = call
            rows, size_in = x.shape
            if rows == 0:
                return x.new_empty((0, size_out // 2 if activation else size_out)) if residual is None else residual
            key = LinearKey(
                rows, size_out, size_in, x.dtype, norm_weight is not None, bias is not None, residual is not None,
                activation, touches, out is not None, block, repacked,
            )  # fmt: skip
            run = self.chooser.run(key)
        found: torch.Tensor = run(self.device, x, weight, call)
        return found if call.out is None or found is call.out else call.out.copy_(found)

    def multiply(self, kernel: str, x: torch.Tensor, weight: Weight, call: GemmCall) -> torch.Tensor:
        """`linear` by the kernel of that name. One that cannot, for whatever reason, raises."""
        out: torch.Tensor = self.chooser.by_name(kernel)(self.device, x, weight, call)
        return out

    def prepare(self, weights: Sequence[Weight], rows: Sequence[int], longest: int = 0) -> None:
        """Chooses (and may measure) the kernels of `linear` for these weights, all of one shape: for these decode row
        counts, and for prefill up to `longest` rows.

        Called once before anything is captured, or not at all: `linear` needs it for speed only.
        """
        if self.device.tuner is not None:
            self.device.tuner.tune(self, weights, rows, longest)


class PlainKernels(LinearKernels[torch.Tensor]):
    """GEMMs with weights [size_out, size_in] in the model's own number format."""

    def __init__(self, device: GemmDevice) -> None:
        super().__init__(PLAIN, device)

    @property
    def workspace(self) -> LinearWorkspace:
        return self.device.workspace

    def prepare(self, weights: Sequence[torch.Tensor], rows: Sequence[int], longest: int = 0) -> None:
        if self.device.tuner is not None:
            self.device.tuned.tune(weights, [*rows, *prompt_rows(longest)])


def _cache_folder() -> Path:
    """Folder of Triton's compiled kernels: one variable moves all caches, one deletion empties them."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or os.path.expanduser("~/.triton/cache"))
