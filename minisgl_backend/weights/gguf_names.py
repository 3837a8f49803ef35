"""The architectures of GGUF files that are read: which checkpoint's tensor each of theirs is, and what llama.cpp's
converter did to its numbers. Needs neither torch nor gguf."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{kind}_exps": f"mlp.experts.{{expert}}.{kind}_proj" for kind in ("gate", "up", "down")},
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{kind}_shexp": f"mlp.shared_expert.{kind}_proj" for kind in ("gate", "up", "down")},
}
_BOTH_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LFM2 = {
    **_ATTENTION,
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    **{f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")},
}
_LFM2_MLP = {"mlp.": "feed_forward.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_LFM2_NORM = dict.fromkeys(("token_embd_norm", "output_norm"), "model.embedding_norm")
_DELTA = {
    **_ATTENTION,
    **_HEAD_NORMS,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_DELTA_TENSORS = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
_EXPERT_BIAS = {"exp_probs_b.bias": "feed_forward.expert_bias"}
_LONG_ROPE = ("rope_factors_long.weight", "rope_factors_short.weight")
_MERGED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}


def _renamed(names: Mapping[str, str], words: Mapping[str, str]) -> dict[str, str]:
    """With other words in the names of checkpoints."""
    renamed = {}
    for stored, name in names.items():
        for one, other in words.items():
            name = name.replace(one, other)
        renamed[stored] = name
    return renamed


@dataclass(frozen=True, kw_only=True)
class GGUFArchitecture:
    """One value of general.architecture. `layers`: names within a layer, there and in checkpoints, without `.weight`
    and `.bias`."""

    architecture: str  # as in config.json's `architectures`
    model_type: str
    layers: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)  # whole names within a layer, likewise
    outside: Mapping[str, str] = field(default_factory=dict)  # names outside of layers, where others are usual
    axis_of_channels: tuple[str, ...] = ()  # convolutions [channels, width], in checkpoints [channels, 1, width]
    norm_offset: float = 0.0  # was added to the weights of norms
    pairs_adjacent: bool = False  # queries' and keys' rows: a pair that is rotated together is adjacent
    rope_tensors: tuple[str, ...] = ()  # which models.gguf_config reads
    # Value heads of the gated delta rule take turns over key heads, where those of a key head follow one another in
    # checkpoints.
    tiled: bool = False

    def is_without_numbers(self, stored: str) -> bool:
        """Whether a tensor is no part of the checkpoint, but what config.json says, or what llama.cpp skips, too."""
        return stored in self.rope_tensors or ".attn_rot_embd" in stored

    def name(self, stored: str) -> str | None:
        """The checkpoint's name of a tensor, with {expert} in it where all experts are in one. None: it has none."""
        match = _LAYER.fullmatch(stored)
        if match is not None:
            module, _, kind = match[2].rpartition(".")
            local = self.layers.get(module) if kind in ("weight", "bias") else None
            whole = self.tensors.get(match[2]) or (local and f"{local}.{kind}")
            return f"model.layers.{match[1]}.{whole}" if whole else None
        name, _, suffix = stored.rpartition(".")
        outside = self.outside.get(name) or _OUTSIDE.get(name)
        return None if outside is None else f"{outside}.{suffix}"

    def shape(self, stored: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the checkpoint's tensor, from that in the file."""
        if len(shape) == 1 and stored.endswith(".ffn_gate_inp_shexp.weight"):
            return (1, *shape)
        is_convolution = any(stored.endswith(f".{name}.weight") for name in self.axis_of_channels)
        return (shape[0], 1, shape[1]) if is_convolution and len(shape) == 2 else shape


def _delta(architecture: str, model_type: str, mlp: Mapping[str, str], *, tiled: bool = True) -> GGUFArchitecture:
    """A family with the gated delta rule."""
    return GGUFArchitecture(
        architecture=architecture,
        model_type=model_type,
        layers={**_DELTA, **mlp},
        tensors=_DELTA_TENSORS,
        axis_of_channels=("ssm_conv1d",),
        norm_offset=1.0,
        tiled=tiled,
    )


ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "gemma2": GGUFArchitecture(
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        layers={**_ATTENTION, **_MLP, **_BOTH_NORMS},
        norm_offset=1.0,
    ),
    "gemma3": GGUFArchitecture(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        layers={**_ATTENTION, **_HEAD_NORMS, **_MLP, **_BOTH_NORMS},
        norm_offset=1.0,
    ),
    "lfm2": GGUFArchitecture(
        architecture="Lfm2ForCausalLM",
        model_type="lfm2",
        layers={**_LFM2, **_renamed(_MLP, _LFM2_MLP)},
        outside=_LFM2_NORM,
        axis_of_channels=("shortconv.conv",),
    ),
    "lfm2moe": GGUFArchitecture(
        architecture="Lfm2MoeForCausalLM",
        model_type="lfm2_moe",
        layers={**_LFM2, **_renamed(_MLP, _LFM2_MLP), **_renamed(_EXPERTS, _LFM2_MLP)},
        tensors=_EXPERT_BIAS,
        outside=_LFM2_NORM,
        axis_of_channels=("shortconv.conv",),
    ),
    "llama": GGUFArchitecture(
        architecture="LlamaForCausalLM",
        model_type="llama",
        layers={**_ATTENTION, **_MLP},
        pairs_adjacent=True,
        rope_tensors=("rope_freqs.weight", *_LONG_ROPE),
    ),
    "phi3": GGUFArchitecture(
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        layers={**_ATTENTION, **_MLP, **_MERGED},
        rope_tensors=_LONG_ROPE,
    ),
    "qwen2": GGUFArchitecture(architecture="Qwen2ForCausalLM", model_type="qwen2", layers={**_ATTENTION, **_MLP}),
    "qwen2moe": GGUFArchitecture(
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        layers={**_ATTENTION, **_EXPERTS, **_SHARED_EXPERT},
    ),
    "qwen3": GGUFArchitecture(
        architecture="Qwen3ForCausalLM", model_type="qwen3", layers={**_ATTENTION, **_HEAD_NORMS, **_MLP}
    ),
    "qwen3moe": GGUFArchitecture(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        layers={**_ATTENTION, **_HEAD_NORMS, **_EXPERTS},
    ),
    "qwen3next": _delta("Qwen3NextForCausalLM", "qwen3_next", {**_EXPERTS, **_SHARED_EXPERT}, tiled=False),
    "qwen35": _delta("Qwen3_5ForCausalLM", "qwen3_5_text", _MLP),
    "qwen35moe": _delta("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", {**_EXPERTS, **_SHARED_EXPERT}),
}
