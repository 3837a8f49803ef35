"""The draft model of speculative decoding: whether it fits the target, and its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from minisgl_backend.attention.base import AttentionSpec
from minisgl_backend.attention.registry import choose_attention
from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import ConfigError
from minisgl_backend.models.build import attention_spec, scores_of
from minisgl_backend.models.choose import load_model_config
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.eagle3 import Eagle3Config
from minisgl_backend.models.folder import find_model_dir
from minisgl_backend.models.json_files import read_json_if_there
from minisgl_backend.models.mtp import MtpConfig
from minisgl_backend.runner.start.device import MachineFacts
from minisgl_backend.runner.start.runtime_config import DraftSettings, RuntimeConfig
from minisgl_backend.weights.files import Checkpoint


def resolve_draft(
    config: EngineConfig,
    target_dir: Path,
    target: ModelConfig,
    device: MachineFacts,
    *,
    page_size: int,
    dtype: str,
    kv_dtype: str,
    max_seq_len: int,
    why_missing: Callable[[str], str | None],
) -> DraftSettings | None:
    """Settings of the draft model; None where there is none. The other arguments are the target's: page_size in tokens,
    dtypes of activations and KV cache, max_seq_len in tokens. Raises ConfigError for a draft model that does not fit
    this target."""
    speculation = config.speculation
    read = None if speculation is None else _READERS.get(speculation.method)
    if speculation is None or read is None:
        return None
    said = "method" if speculation.model is None else "model"
    name = f"speculative_config's {said} {getattr(speculation, said)!r}"
    try:
        folder, model = read(config, speculation.model or "", target_dir, target)
        model.check_tensor_parallel(config.tp)
    except ConfigError as error:
        raise ConfigError(f"{name} cannot propose: {error}") from None
    is_head = speculation.method != "draft_model"
    if not is_head:
        _check_vocabulary(name, folder, model, target_dir, target)
    own_kv_dtype = dtype if model.latents is not None else kv_dtype
    attention = choose_attention(
        config.attention_backend if (model.latents is None) == (target.latents is None) else "auto",
        page_size,
        compute_capability=device.compute_capability,
        head_dims=model.head_dims,
        dtype=dtype,
        kv_dtype=own_kv_dtype,
        scores=scores_of(model),
        latents=model.latents,
        why_missing=why_missing,
    )
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
        # The positions in a head's config are only those of its training: it drafts beyond them.
        max_seq_len=max_seq_len if is_head else min(max_seq_len, model.max_seq_len()),
    )


def _read_model(config: EngineConfig, name: str, target_dir: Path, target: ModelConfig) -> tuple[Path, ModelConfig]:
    folder = find_model_dir(name, trust_remote_code=config.trust_remote_code)
    return folder, load_model_config(folder, "native")


def _read_eagle3(config: EngineConfig, name: str, target_dir: Path, target: ModelConfig) -> tuple[Path, ModelConfig]:
    folder = find_model_dir(name, trust_remote_code=config.trust_remote_code)
    head = Eagle3Config.load(folder)
    head.states_of(target)
    return folder, head


def _read_mtp(config: EngineConfig, name: str, target_dir: Path, target: ModelConfig) -> tuple[Path, ModelConfig]:
    head = MtpConfig.of(target, target.quantization.with_option(config.quantization))
    if not config.dummy_weights:
        head.check_stored(Checkpoint(target_dir, target.tensor_names).names())
    return target_dir, head


# By method: (options, their `model` ("": unset), the target's folder and config) -> folder and config of the draft
# model. Raises ConfigError for a model that does not fit the target.
_READERS: Mapping[str, Callable[[EngineConfig, str, Path, ModelConfig], tuple[Path, ModelConfig]]] = {
    "draft_model": _read_model,
    "eagle3": _read_eagle3,
    "mtp": _read_mtp,
}


def draft_spec(runtime: RuntimeConfig, draft: DraftSettings, device: torch.device) -> AttentionSpec:
    """Attention spec of the draft model on one rank; rows and pages are the target's."""
    kv_dtype = runtime.dtype if draft.model.latents is not None else runtime.kv_dtype
    return attention_spec(
        draft.model,
        tp_size=runtime.config.tp,
        page_size=runtime.page_size,
        max_seq_len=runtime.max_seq_len,
        max_rows=runtime.most_decode_entries + 1,
        dtype=getattr(torch, runtime.dtype),
        kv_dtype=getattr(torch, kv_dtype),
        device=device,
        flashinfer_tensor_cores=runtime.flashinfer_tensor_cores,
        most_cache_groups=runtime.most_cache_groups,
    )


def keeping_for(target: AttentionSpec, draft: AttentionSpec | None) -> AttentionSpec:
    """The target's spec with cache groups that serve both models: all tokens are kept if their windows differ."""
    if draft is None or draft.cache_windows == target.cache_windows:
        return target
    return replace(target, cache_windows=(None,))


def _check_vocabulary(name: str, folder: Path, model: ModelConfig, target_dir: Path, target: ModelConfig) -> None:
    """Raises ConfigError unless its tokens are the target's."""
    if model.vocab_size != target.vocab_size:
        raise ConfigError(
            f"{name} has a vocabulary of {model.vocab_size} tokens and the target one of {target.vocab_size}; allowed: "
            "a model with the same tokenizer and vocabulary"
        )
    if folder == target_dir:
        return
    own, others = _tokens(folder), _tokens(target_dir)
    if own is None or others is None or own == others:
        return
    token = min((token for token in own.keys() | others.keys() if own.get(token) != others.get(token)), key=str)
    raise ConfigError(
        f"{name} has another tokenizer than the target: {token!r} is token {own.get(token)} of it and "
        f"{others.get(token)} of the target; allowed: a model with the same tokenizer and vocabulary"
    )


def _tokens(folder: Path) -> dict[str, Any] | None:
    """Ids by token from tokenizer.json; None where it has no vocabulary."""
    tokenizer = read_json_if_there(folder / "tokenizer.json")
    vocabulary = (tokenizer.get("model") or {}).get("vocab")
    if not isinstance(vocabulary, dict):
        return None
    return {**vocabulary, **{one["content"]: one["id"] for one in tokenizer.get("added_tokens") or ()}}
