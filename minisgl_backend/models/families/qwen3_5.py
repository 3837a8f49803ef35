"""Qwen3.5 and 3.6: Qwen3-Next with a dense MLP, or with experts in every layer; Qwen3-VL's encoder of images without
planes."""

from dataclasses import replace
from functools import partial

from minisgl_backend.models.families.base import (
    MERGED_EXPERTS,
    DecoderConfig,
    Family,
    Keys,
    Stored,
    TensorNames,
    refuse,
)
from minisgl_backend.models.families.common import mlp
from minisgl_backend.models.families.delta import CONVOLUTION, gated_queries, shared_experts
from minisgl_backend.models.families.eyes import qwen_vision
from minisgl_backend.models.families.qwen2_vl import TEXT_NAMES
from minisgl_backend.models.families.qwen3_next import DRAFT_NAMES, FUSED, hybrid


def read(keys: Keys) -> DecoderConfig:
    return hybrid(keys, [mlp(keys)] * _layers(keys), mrope="interleaved")


def _read_moe(keys: Keys) -> DecoderConfig:
    keys.choice("norm_topk_prob", (True,), True)
    mixture = shared_experts(keys)
    mixture = replace(mixture, router=replace(mixture.router, renormalize=True))
    return hybrid(keys, [mixture] * _layers(keys), mrope="interleaved")


def _layers(keys: Keys) -> int:
    if dense := keys.sequence("mlp_only_layers"):  # all MLPs are alike here
        refuse("mlp_only_layers", list(dense), "[]")
    return keys.integer("num_hidden_layers")


def _grouped(decoder: DecoderConfig) -> tuple[Stored, ...]:
    return (gated_queries(decoder),)


_NAMES = TensorNames(stored=(CONVOLUTION, FUSED), prefixes=TEXT_NAMES.prefixes, left_out=(*TEXT_NAMES.left_out, "mtp."))

FAMILY = Family(model_type="qwen3_5_text", read=read, tensor_names=_NAMES, grouped=_grouped, draft_names=DRAFT_NAMES)
MOE_FAMILY = replace(
    FAMILY,
    model_type="qwen3_5_moe_text",
    read=_read_moe,
    tensor_names=replace(_NAMES, stored=(*_NAMES.stored, *MERGED_EXPERTS)),
)

_ENCODER = partial(qwen_vision, generation="3", deepstack=())
MULTIMODAL_FAMILY = replace(FAMILY, model_type="qwen3_5", text_config="text_config", encoder=_ENCODER)
MULTIMODAL_MOE_FAMILY = replace(MOE_FAMILY, model_type="qwen3_5_moe", text_config="text_config", encoder=_ENCODER)
