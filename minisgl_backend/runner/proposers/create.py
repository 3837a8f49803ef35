"""Proposers on the device by the names of their methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from minisgl_backend.attention.registry import create_attention
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.decoder import CausalLM
from minisgl_backend.runner.proposers.draft_model import DraftModelProposer
from minisgl_backend.runner.proposers.proposer import DeviceProposer
from minisgl_backend.runner.row_table import RowTable
from minisgl_backend.runner.start.draft import draft_spec
from minisgl_backend.runner.start.runtime_config import RuntimeConfig
from minisgl_backend.sampling.sampler import Sampler
from minisgl_backend.tensor_parallel import TensorParallel


@dataclass(frozen=True, kw_only=True)
class ProposerContext:
    """What a proposer is made of."""

    runtime: RuntimeConfig
    device: torch.device
    table: RowTable
    sampler: Sampler
    tp: TensorParallel
    load_model: Callable[[ModelConfig, str, TensorParallel], CausalLM]  # from its description and its folder


def _draft_model(context: ProposerContext) -> DeviceProposer:
    runtime, draft = context.runtime, context.runtime.draft
    assert draft is not None, "the method has a model"
    tp = context.tp.without_shared_memory()  # which has the target's sizes
    spec = draft_spec(runtime, draft, context.device)
    model = context.load_model(draft.model, draft.model_dir, tp)
    attention = create_attention(draft.prefill_backend, draft.decode_backend, spec)
    return DraftModelProposer(model, attention, context.table, context.sampler, tp)


BUILDERS: Mapping[str, Callable[[ProposerContext], DeviceProposer]] = {"draft_model": _draft_model}


def create_device_proposer(context: ProposerContext) -> DeviceProposer | None:
    """None where nothing is proposed on the device."""
    speculation = context.runtime.config.speculation
    build = None if speculation is None else BUILDERS.get(speculation.method)
    return None if build is None else build(context)
