"""What runs the gated delta rule on a device: a table for each of its kernels, read from the top. Needs no Triton."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from minisgl_backend.kernels.candidate import Candidate, Chooser, always, on_cpu, on_gpu
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.recurrent.calls import ChunkBatch, DeltaLayer, FoldBatch, WindowBatch
from minisgl_backend.kv.state import LayerState

_ROOM = "minisgl_backend.kernels.recurrent"


def _rows(file: str, name: str, why: str, compiled: str = "") -> Sequence[Candidate[None]]:
    """compiled: why a CPU has a kernel of its own, if it has one."""
    of_cpu = Candidate("cpu", compiled, always, run=f"minisgl_backend.kernels.cpu.recurrent:{name}", on=on_cpu)
    return (
        Candidate("triton", why, always, run=f"{_ROOM}.{file}:{name}", on=on_gpu),
        *([of_cpu] if compiled else ()),
        Candidate("torch", "everywhere else", always, run=f"{_ROOM}.reference:{name}"),
    )


KERNELS: Mapping[str, Sequence[Candidate[None]]] = MappingProxyType(
    {
        "delta_window": _rows(
            "window", "delta_window", "one launch a layer, each row's state is read once", "one call a layer"
        ),
        "delta_fold": _rows("fold", "delta_fold", "one launch a step, for all layers alike", "one call a step"),
        "conv_prefill": _rows("prefill", "conv_prefill", "one launch a layer, each input is read from memory once"),
        "delta_chunk": _rows("chunk", "delta_chunk", "two launches a layer, tensor cores, states in float32"),
        "gated_norm": _rows("prefill", "gated_norm", "one launch a layer"),
    }
)


class RecurrentKernels(NamedTuple):
    """The functions of `reference`, as a device has them."""

    delta_window: Callable[[torch.Tensor, DeltaLayer, WindowBatch, torch.Tensor | None], torch.Tensor]
    delta_fold: Callable[[LayerState, FoldBatch, int], None]
    conv_prefill: Callable[[torch.Tensor, DeltaLayer, ChunkBatch], torch.Tensor]
    delta_chunk: Callable[[torch.Tensor, torch.Tensor, DeltaLayer, ChunkBatch], torch.Tensor]
    gated_norm: Callable[[torch.Tensor, torch.Tensor, DeltaLayer, torch.Tensor | None], torch.Tensor]


def recurrent_kernels(facts: DeviceFacts) -> RecurrentKernels:
    """Those of a device."""
    return RecurrentKernels(**{name: Chooser(KERNELS, name, facts).run(None) for name in KERNELS})
