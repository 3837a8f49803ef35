"""The draft model of speculative decoding, and its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from minisgl_backend.attention.base import AttentionSpec
from minisgl_backend.attention.needs import AttentionNeeds
from minisgl_backend.attention.registry import choose_attention
from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import ConfigError
from minisgl_backend.kv.groups import CacheGroup
from minisgl_backend.lazy_import import load_attribute
from minisgl_backend.models.build import attention_needs, attention_spec
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.folder import find_model_dir
from minisgl_backend.runner.proposers.proposer import DeviceProposer
from minisgl_backend.runner.start.runtime_config import DraftSettings, RuntimeConfig
from minisgl_backend.speculative_config import SpeculativeConfig


def proposer_class(speculation: SpeculativeConfig | None) -> type[DeviceProposer] | None:
    """None where nothing is proposed on the device."""
    if speculation is None or not speculation.row.on_device:
        return None
    return load_attribute(speculation.row.proposer)


def resolve_draft(
    config: EngineConfig,
    target_dir: Path,
    target: ModelConfig,
    needs: AttentionNeeds,
    *,
    page_size: int,
    max_seq_len: int,
    why_missing: Callable[[str], str | None],
) -> DraftSettings | None:
    """Settings of the draft model; None where there is none. needs, page_size and max_seq_len, both in tokens, are the
    target's. Raises ConfigError for a draft model that does not fit
    this target."""
    speculation = config.speculation
    proposer = proposer_class(speculation)
    if speculation is None or proposer is None:
        return None
    said = "method" if speculation.model is None else "model"
    name = f"speculative_config's {said} {getattr(speculation, said)!r}"
    folder = target_dir
    try:
        if speculation.model is not None:
            folder = find_model_dir(speculation.model, trust_remote_code=config.trust_remote_code)
        model = proposer.read_draft_model(config, folder, target, target_dir)
        if model is None:
            return None
        model.check_tensor_parallel(config.tp)
    except ConfigError as error:
        raise ConfigError(f"{name} cannot propose: {error}") from None
    own = attention_needs(
        model,
        tp_size=config.tp,
        compute_capability=needs.compute_capability,
        dtype=needs.dtype,
        kv_dtype=needs.dtype if model.latents is not None else needs.cache_dtype,
    )
    requested = config.attention_backend if own.kind == needs.kind else "auto"
    attention = choose_attention(requested, page_size, own, why_missing)
    if attention.page_size != page_size:
        raise ConfigError(
            f"{name} needs pages of {attention.page_size} tokens (attention backend {attention.decode}) and the target "
            f"has {page_size}; allowed: page_size {attention.page_size}, which serves both"
        )
    return DraftSettings(
        model_dir=str(folder),
        model=model,
        prefill_backend=attention.prefill,
        decode_backend=attention.decode,
        max_seq_len=min(max_seq_len, model.max_seq_len()),
    )


def target_spec(runtime: RuntimeConfig, model: ModelConfig, device: torch.device) -> AttentionSpec:
    """Attention spec of the model on one rank, with cache groups that serve its draft model, too."""
    target = _rank_spec(runtime, model, runtime.kv_dtype, device)
    return target if runtime.draft is None else keeping_for(target, draft_spec(runtime, runtime.draft, device))


def draft_spec(runtime: RuntimeConfig, draft: DraftSettings, device: torch.device) -> AttentionSpec:
    """Attention spec of the draft model on one rank; rows and pages are the target's."""
    kv_dtype = runtime.dtype if draft.model.latents is not None else runtime.kv_dtype
    return _rank_spec(runtime, draft.model, kv_dtype, device)


def _rank_spec(runtime: RuntimeConfig, model: ModelConfig, kv_dtype: str, device: torch.device) -> AttentionSpec:
    return attention_spec(
        model,
        AttentionSpec(
            page_size=runtime.page_size,
            max_seq_len=runtime.max_seq_len,
            max_rows=runtime.most_decode_entries + 1,
            dtype=getattr(torch, runtime.dtype),
            device=device,
            flashinfer_tensor_cores=runtime.flashinfer_tensor_cores,
            max_drafts=0 if runtime.config.speculation is None else runtime.config.speculation.most_drafts,
        ),
        tp_size=runtime.config.tp,
        kv_dtype=getattr(torch, kv_dtype),
        most_cache_groups=runtime.most_cache_groups,
    )


def keeping_for(target: AttentionSpec, draft: AttentionSpec) -> AttentionSpec:
    """The target's spec with cache groups that serve both models: all tokens are kept if their windows differ."""
    return target if draft.cache_groups == target.cache_groups else replace(target, cache_groups=(CacheGroup(),))
