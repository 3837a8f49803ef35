"""How a model is loaded on one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from minisgl_backend.kernels.ops import Ops
from minisgl_backend.process.progress import Progress, no_progress
from minisgl_backend.tensor_parallel import TensorParallel
from minisgl_backend.weights.files import Readable
from minisgl_backend.weights.names import TensorNames


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """What does not depend on the model; the same for a target and what drafts for it."""

    dtype: torch.dtype
    device: torch.device
    max_seq_len: int  # bounds the positions that the model can be asked for
    tp: TensorParallel = field(default_factory=TensorParallel.single)
    ops: Ops | None = None  # None: those of the device
    quantization: str | None = None  # the option; None: the number formats that the checkpoint says
    dummy_weights: bool = False  # no files are read but config.json's
    trust_remote_code: bool = False  # of transformers' classes
    on_progress: Progress = no_progress
    # Of the model's checkpoint, its names, and whether its output projection has the embedding's weight: what is read
    # in its place, with an adapter merged into it. None: the checkpoint itself.
    merge: Callable[[Readable, TensorNames, bool], Readable] | None = None
    # `models.mtp_head` loads the first of the checkpoint's layers for drafts: it is not said that it is left out.
    uses_draft_layer: bool = False
