"""TensorRT-LLM's numbers of modules, in `lora_config`. Needs no torch."""

from __future__ import annotations

# What it calls h_to_4h has the activation, so it is the gate; its gate is the other projection.
TASK_MODULES: dict[int, tuple[str, ...]] = {
    0: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    1: ("self_attn.q_proj",),
    2: ("self_attn.k_proj",),
    3: ("self_attn.v_proj",),
    4: ("self_attn.o_proj",),
    5: ("mlp.gate_proj",),
    6: ("mlp.down_proj",),
    7: ("mlp.up_proj",),
}
