"""Proposers on the device by the names of their methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from minisgl_backend.attention.registry import create_attention
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.decoder import CausalLM
from minisgl_backend.models.eagle3 import Eagle3Config
from minisgl_backend.models.eagle3_head import build_eagle3_head
from minisgl_backend.models.mtp import MtpConfig
from minisgl_backend.models.mtp_head import build_mtp_head
from minisgl_backend.runner.model_runner import Model
from minisgl_backend.runner.proposers.draft_model import DraftModelProposer
from minisgl_backend.runner.proposers.head import HeadProposer
from minisgl_backend.runner.proposers.proposer import DeviceProposer
from minisgl_backend.runner.row_table import RowTable
from minisgl_backend.runner.start.draft import draft_spec
from minisgl_backend.runner.start.runtime_config import RuntimeConfig
from minisgl_backend.sampling.sampler import Sampler
from minisgl_backend.tensor_parallel import TensorParallel


@dataclass(frozen=True, kw_only=True)
class ProposerContext:
    """What proposers are made from."""

    runtime: RuntimeConfig
    device: torch.device
    table: RowTable
    sampler: Sampler
    tp: TensorParallel
    target: Model
    load_model: Callable[[ModelConfig, str, TensorParallel], CausalLM]  # from its config and its folder


def _draft_model(context: ProposerContext) -> DeviceProposer:
    runtime, draft = context.runtime, context.runtime.draft
    assert draft is not None, "the method has a model"
    tp = context.tp.without_shared_memory()  # which has the target's sizes
    spec = draft_spec(runtime, draft, context.device)
    model = context.load_model(draft.model, draft.model_dir, tp)
    attention = create_attention(draft.prefill_backend, draft.decode_backend, spec)
    return DraftModelProposer(model, attention, context.table, context.sampler, tp)


def _eagle3(context: ProposerContext) -> DeviceProposer:
    runtime, draft, target = context.runtime, context.runtime.draft, context.target
    assert draft is not None, "the method has a model"
    assert isinstance(draft.model, Eagle3Config), "as the method's models are read"
    assert isinstance(target, CausalLM), "other targets are refused before"
    tp = context.tp.without_shared_memory()  # which has the target's sizes
    spec = draft_spec(runtime, draft, context.device)
    head = build_eagle3_head(
        draft.model,
        draft.model_dir,
        embedding=target.model.embed_tokens,
        dtype=spec.dtype,
        device=context.device,
        max_seq_len=runtime.max_seq_len,
        tp=tp,
        dummy_weights=runtime.config.dummy_weights,
    )
    attention = create_attention(draft.prefill_backend, draft.decode_backend, spec)
    aux_layers = draft.model.states_of(target.config)
    return HeadProposer(head, aux_layers, attention, context.table, context.sampler, tp)


def _mtp(context: ProposerContext) -> DeviceProposer:
    runtime, draft, target = context.runtime, context.runtime.draft, context.target
    assert draft is not None, "the method has a model"
    assert isinstance(draft.model, MtpConfig), "as the method's models are read"
    assert isinstance(target, CausalLM), "other targets are refused before"
    tp = context.tp.without_shared_memory()  # whose buffers are those of the target's passes
    spec = draft_spec(runtime, draft, context.device)
    head = build_mtp_head(
        draft.model,
        draft.model_dir,
        model=target,
        dtype=spec.dtype,
        device=context.device,
        max_seq_len=runtime.max_seq_len,
        tp=tp,
        dummy_weights=runtime.config.dummy_weights,
    )
    attention = create_attention(draft.prefill_backend, draft.decode_backend, spec)
    return HeadProposer(head, (target.config.num_layers,), attention, context.table, context.sampler, tp)


BUILDERS: Mapping[str, Callable[[ProposerContext], DeviceProposer]] = {
    "draft_model": _draft_model,
    "eagle3": _eagle3,
    "mtp": _mtp,
}


def create_device_proposer(context: ProposerContext) -> DeviceProposer | None:
    """None where nothing is proposed on the device."""
    speculation = context.runtime.config.speculation
    build = None if speculation is None else BUILDERS.get(speculation.method)
    return None if build is None else build(context)
