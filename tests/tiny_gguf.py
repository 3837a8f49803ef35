"""Tiny GGUF files of every architecture that is served, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, EXPERTS, VOCAB = 64, 4, 40
ATTENTION = {"attn_q.weight": "q hidden", "attn_k.weight": "kv hidden", "attn_v.weight": "kv hidden"}
DENSE = {
    **ATTENTION,
    "ffn_gate.weight": "inner hidden",
    "ffn_up.weight": "inner hidden",
    "ffn_down.weight": "hidden inner",
}
HEAD_NORMS = {"attn_q_norm.weight": "head", "attn_k_norm.weight": "head"}
BIASES = {"attn_q.bias": "q", "attn_k.bias": "kv", "attn_v.bias": "kv"}
BOTH_NORMS = {"post_attention_norm.weight": "hidden", "post_ffw_norm.weight": "hidden"}
MIXTURE = {
    **ATTENTION, "ffn_gate_inp.weight": "experts hidden", "ffn_gate_exps.weight": "experts expert hidden",
    "ffn_up_exps.weight": "experts expert hidden", "ffn_down_exps.weight": "experts hidden expert",
}  # fmt: skip
SHARED = {
    "ffn_gate_inp_shexp.weight": "hidden", "ffn_gate_shexp.weight": "shared hidden",
    "ffn_up_shexp.weight": "shared hidden", "ffn_down_shexp.weight": "hidden shared",
}  # fmt: skip
MERGED = {"attn_qkv.weight": "qkv hidden", "ffn_up.weight": "two hidden", "ffn_down.weight": "hidden inner"}
LAYERS: Mapping[str, Mapping[str, str]] = {
    "gemma2": {**DENSE, **BOTH_NORMS},
    "gemma3": {**DENSE, **HEAD_NORMS, **BOTH_NORMS},
    "llama": DENSE,
    "phi3": MERGED,
    "qwen2": {**DENSE, **BIASES},
    "qwen2moe": {**MIXTURE, **SHARED, **BIASES},
    "qwen3": {**DENSE, **HEAD_NORMS},
    "qwen3moe": {**MIXTURE, **HEAD_NORMS},
}
# Sizes that transformers does not read: those of its classes' defaults.
HEAD = {"qwen3": 128}
EXPERT = {"qwen2moe": 1408, "qwen3moe": 768}
SHARED_EXPERT = 5632


# Where blocks have their scales, half numbers, and their mins.
_SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "Q3_K": (108,),
}  # fmt: skip


def random_blocks(kind: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """A matrix whose numbers are about as large as those of a model: uint8 [..., bytes], or numbers of F16 and F32."""
    if kind in ("F16", "F32"):
        return (0.1 * random.standard_normal(shape)).astype(np.float16 if kind == "F16" else np.float32)
    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (int(np.prod(shape)) // numbers, size), np.uint8)
    most = {"Q8_0": 128, "Q4_K": 15 * 63, "Q5_K": 31 * 63, "Q6_K": 32 * 128, "Q3_K": 4 * 32}.get(kind, 16)
    for number, at in enumerate(_SCALES[kind]):
        low = number == 1 and not kind.endswith("K")  # a min that is added
        scales = random.uniform(-1.2 if low else 0.3, -0.8 if low else 1.0, len(blocks))
        scales *= 0.1 if low else 0.2 * (7 if number else 1) / most
        blocks[:, at : at + 2] = scales.astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def sizes(arch: str, *, wide: bool = False) -> dict[str, int]:
    head = HEAD.get(arch, 32)
    hidden = 256 if wide else HIDDEN
    heads = hidden // head if arch in ("phi3", "qwen2", "qwen2moe") else 4
    q, kv = heads * head, heads // 2 * head
    return {
        "hidden": hidden, "head": head, "heads": heads, "kv_heads": heads // 2, "q": q, "kv": kv, "qkv": q + 2 * kv,
        "inner": 768 if wide else 96, "two": 1536 if wide else 192,
        "experts": EXPERTS, "expert": EXPERT.get(arch, 0), "shared": SHARED_EXPERT,
        "vocab": VOCAB,
    }  # fmt: skip


def write(
    path: Path,
    arch: str,
    *,
    change: Callable[[gguf.GGUFWriter], None] | None = None,
    split: bool = False,
    plain: bool = False,
    kinds: Callable[[str], str] | None = None,
    wide: bool = False,
    **more: Any,
) -> Path:
    """A model of two layers, in Q8_0 where rows allow it; `plain`: in F32, with small numbers. kinds: the type of each
    matrix, by its name, with random blocks. wide: rows hold blocks of 256. `more`: values behind the architecture's
    name, with __ for a dot; None: absent."""
    size = sizes(arch, wide=wide)
    values = {
        "context_length": 128, "block_count": 2, "embedding_length": size["hidden"],
        "feed_forward_length": size["inner"],
        "attention.head_count": size["heads"], "attention.head_count_kv": size["kv_heads"],
        "attention.key_length": size["head"], "attention.value_length": size["head"],
        "attention.sliding_window": 64, "rope.dimension_count": size["head"],
    }  # fmt: skip
    if arch in EXPERT:
        values |= {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": EXPERT[arch]}
        values["expert_shared_feed_forward_length"] = SHARED_EXPERT
    values |= {key.replace("__", "."): value for key, value in more.items()}
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=10 if split else 0)
    for key, value in values.items():
        if value is not None:
            add(writer, f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    if "rope.freq_base" not in values:
        writer.add_float32(f"{arch}.rope.freq_base", 50000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_merges(["t 1"])
    writer.add_token_list([f"t{number}" for number in range(VOCAB - 1)] + ["<|im_end|>"])
    writer.add_token_types([1] * (VOCAB - 1) + [3])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(3)
    writer.add_pad_token_id(0)
    random = np.random.default_rng(0)
    if change is not None:
        change(writer)
    for name, shape in shapes(arch, wide=wide).items():
        numbers = random.standard_normal(shape, np.float32)
        if len(shape) > 1 and kinds is not None:
            kind = gguf.GGMLQuantizationType[kinds(name)]
            blocks = random_blocks(kind.name, shape, random)
            if kind.name in ("F16", "F32"):
                writer.add_tensor(name, blocks)
            else:
                writer.add_tensor(name, blocks, raw_dtype=kind)
        elif len(shape) > 1 and "gate_inp" not in name and not plain:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(numbers, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, numbers * np.float32(0.2) if plain and len(shape) > 1 else numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_int32, float: writer.add_float32, str: writer.add_string}
    if type(value) is int and value >= 0:
        writer.add_uint32(key, value)
    else:
        kinds.get(type(value), writer.add_array)(key, value)


def shapes(arch: str, *, wide: bool = False) -> dict[str, tuple[int, ...]]:
    size = sizes(arch, wide=wide)
    layer = {
        "attn_norm.weight": "hidden", "ffn_norm.weight": "hidden", "attn_output.weight": "hidden q", **LAYERS[arch],
    }  # fmt: skip
    names = {"token_embd.weight": "vocab hidden", "output_norm.weight": "hidden"}
    names |= {f"blk.{number}.{name}": shape for number in range(2) for name, shape in layer.items()}
    names |= {} if arch.startswith("gemma") else {"output.weight": "vocab hidden"}
    return {name: tuple(size[one] for one in shape.split()) for name, shape in names.items()}
