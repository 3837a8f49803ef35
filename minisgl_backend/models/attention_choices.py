"""Which attention kernels a model uses on a device, which need not exist here: the resolved backends, and the split of
the `triton` backend's decode kernel (kernels/attention/choose.py)."""

from __future__ import annotations

import math

import torch

from minisgl_backend.attention.base import AttentionSpec, LayerGroup
from minisgl_backend.attention.decode_by_batch import DecodeByBatch
from minisgl_backend.kernels.attention.choose import DecodeKey, rotation_pays, split_kv
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.models.build import attention_spec
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.kernel_choices import META, MOST_LOGITS, ROWS, Choice, Weight


def attention_choices(
    config: ModelConfig,
    facts: DeviceFacts,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    prefill: str,
    decode: str,
    *,
    tp_size: int = 1,
    decode_by_batch: DecodeByBatch | None = None,
) -> dict[Weight, dict[int, Choice]]:
    """As `kernel_choices`, with an entry for each group of layers; up to MOST_LOGITS rows are a decode step, more are a
    prompt. prefill, decode: attention backends; decode_by_batch: another one of decode steps with few rows."""
    spec = attention_spec(
        config,
        AttentionSpec(page_size=1, max_seq_len=config.max_position, max_rows=1, dtype=dtype, device=META),
        tp_size=tp_size,
        kv_dtype=kv_dtype,
    )
    found = {}
    for group in spec.groups:
        window = f", {group.window} tokens" if group.window is not None else ""
        window += f", chunks of {group.chunk} tokens" if group.chunk is not None else ""
        shape = f"{group.num_q_heads} heads of {group.head_dim}, {group.num_kv_heads} kept{window}"
        weight = Weight("attention", shape, str(kv_dtype).removeprefix("torch."), "")
        found[weight] = {count: _choice(group, facts, prefill, decode, decode_by_batch, count) for count in ROWS}
    return found


def _choice(
    group: LayerGroup, facts: DeviceFacts, prefill: str, decode: str, decode_by_batch: DecodeByBatch | None, rows: int
) -> Choice:
    if rows > MOST_LOGITS:
        return Choice(prefill, "the backend of prompts")
    if decode_by_batch is not None and (limit := decode_by_batch.max_context_len(rows)):
        length = "" if math.isinf(limit) else f" with up to {limit:,.0f} tokens each; above, {decode}"
        return Choice(decode_by_batch.backend, f"the backend of decode steps of few rows{length}")
    if decode != "triton" or group.latent is not None or not facts.multiprocessors:
        return Choice(decode, "the backend of decode steps")
    can_share = group.sees_all and not group.kv.is_fp8
    heads = group.num_kv_heads
    cut = split_kv(DecodeKey(rows, heads, group.num_q_heads // heads, facts.multiprocessors, can_share))
    inside = "; head norms, rotation and the store inside" if rotation_pays(rows, heads, facts.multiprocessors) else ""
    return Choice(decode, f"{cut.why}{inside}")
