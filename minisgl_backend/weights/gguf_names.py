"""The architectures of GGUF files that are read: which checkpoint's tensor each of theirs is, and what llama.cpp's
converter did to its numbers. Needs neither torch nor gguf."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
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
_LONG_ROPE = ("rope_factors_long.weight", "rope_factors_short.weight")
_MERGED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}


@dataclass(frozen=True, kw_only=True)
class GGUFArchitecture:
    """One value of general.architecture. `layers`: names within a layer, there and in checkpoints."""

    architecture: str  # as in config.json's `architectures`
    model_type: str
    layers: Mapping[str, str] = field(default_factory=dict)
    norm_offset: float = 0.0  # was added to the weights of norms
    pairs_adjacent: bool = False  # queries' and keys' rows: a pair that is rotated together is adjacent
    rope_tensors: tuple[str, ...] = ()  # which models.gguf_config reads

    def is_without_numbers(self, stored: str) -> bool:
        """Whether a tensor is no part of the checkpoint, but what config.json says, or what llama.cpp skips, too."""
        return stored in self.rope_tensors or ".attn_rot_embd" in stored

    def name(self, stored: str) -> str | None:
        """The checkpoint's name of a tensor, with {expert} in it where all experts are in one. None: it has none."""
        match = _LAYER.fullmatch(stored)
        if match is not None:
            local = self.layers.get(match[2])
            return None if local is None else f"model.layers.{match[1]}.{local}.{match[3]}"
        name, _, suffix = stored.rpartition(".")
        return f"{_OUTSIDE[name]}.{suffix}" if name in _OUTSIDE else None


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
}
