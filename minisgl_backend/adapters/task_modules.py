"""TensorRT-LLM's numbers of modules, in `lora_config`. Needs no torch."""

from __future__ import annotations

from minisgl_backend.models.description import DecoderConfig

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
_MOST_BYTES = 1 << 30
_MODULES_PER_LAYER = 7  # 0 stands for three


def most_task_bytes(model: DecoderConfig, rank: int) -> int:
    """At least those of `lora_weights` with all modules at that rank, rows padded to the widest; 1 GiB at most."""
    size = model.hidden_size
    widths = (
        max(layer.mixer.num_weights(size) // size, layer.mlp.rows_per_token() // 2, size) for layer in model.layers
    )
    return min(_MOST_BYTES, 2 * _MODULES_PER_LAYER * model.num_layers * rank * (size + max(widths)))
