"""Random weights in the shapes of benchmarks.cpu as llama.cpp writes them: in 16 and 32 bits by its package gguf, in
blocks by its own quantizer.

`PYTHON -m benchmarks.cpu_files FOLDER SHAPE TYPE` prints the path of that file, which is written once.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.model_shapes import SHAPES

SHAPE, EXPERTS = "qwen3-0.6b", "qwen3-0.6b-8-experts"
PLAIN = ("bf16", "f16", "f32")
QUANTIZED: Mapping[str, int] = MappingProxyType({"q4_0": 2, "q8_0": 7, "q4_k_m": 15})  # ftypes of llama.h
WIDE = "-wide"  # behind one of QUANTIZED: embeddings and LM head in bf16, as checkpoints in AWQ and GPTQ have them
_BF16 = 30  # as ggml counts types


class MissingPackage(Exception):
    """What cannot be measured here; the text says what to install."""


def gguf_file(folder: Path, shape: str, type: str) -> Path:
    """`shape`: a key of SHAPES, Qwen3 with or without experts; `type`: of PLAIN, or of QUANTIZED, also with WIDE."""
    path = folder / f"{shape}-{type}.gguf"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        if type in PLAIN:
            _write(partial, SHAPES[shape], type)
        else:
            _quantize(gguf_file(folder, shape, "bf16"), partial, type)
        partial.rename(path)
    return path


def _quantize(source: Path, target: Path, type: str) -> None:
    try:
        import llama_cpp
    except ImportError as error:
        raise MissingPackage(f"pip install llama-cpp-python ({error})") from None
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = QUANTIZED[type.removesuffix(WIDE)]
    if type.endswith(WIDE):
        params.token_embedding_type = params.output_tensor_type = _BF16
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params) != 0:
        raise RuntimeError(f"llama.cpp does not quantize {source}")


def _write(path: Path, shape: Mapping[str, Any], type: str) -> None:
    """Norms and routers are float32, as in converted models."""
    try:
        import gguf
    except ImportError as error:
        raise MissingPackage(f"pip install gguf ({error})") from None
    import numpy as np

    experts = shape.get("num_experts", 0)
    writer = gguf.GGUFWriter(str(path), "qwen3moe" if experts else "qwen3")
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_rope_freq_base(shape["rope_theta"])
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(shape["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(shape["moe_intermediate_size"])
    _add_tokenizer(writer, shape)
    random_numbers = np.random.default_rng(0)
    for name, size in _tensors(shape).items():
        values = random_numbers.standard_normal(size, dtype=np.float32) * 0.02
        if len(size) == 1:
            writer.add_tensor(name, np.ones(size, dtype=np.float32))
        elif type == "bf16" and "gate_inp" not in name:
            upper = (values.view(np.uint32) >> 16).astype(np.uint16)
            writer.add_tensor(name, upper.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(
                name, values.astype(np.float16 if type == "f16" and "gate_inp" not in name else np.float32)
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, shape: Mapping[str, Any]) -> None:
    """Made-up words of a full vocabulary's number: what is measured are tokens."""
    ends = {shape["bos_token_id"], shape["eos_token_id"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"w{number}" for number in range(shape["vocab_size"])])
    writer.add_token_types([3 if number in ends else 1 for number in range(shape["vocab_size"])])  # 3: control
    writer.add_token_merges(["w 1"])
    writer.add_bos_token_id(shape["bos_token_id"])
    writer.add_eos_token_id(shape["eos_token_id"])


def _tensors(shape: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    q_size, kv_size = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "attn_q": (q_size, hidden),
        "attn_k": (kv_size, hidden),
        "attn_v": (kv_size, hidden),
        "attn_q_norm": (head,),
        "attn_k_norm": (head,),
        "attn_output": (hidden, q_size),
        "ffn_norm": (hidden,),
    }
    if experts := shape.get("num_experts", 0):
        inner = shape["moe_intermediate_size"]
        layer |= {
            "ffn_gate_inp": (experts, hidden),
            "ffn_gate_exps": (experts, inner, hidden),
            "ffn_up_exps": (experts, inner, hidden),
            "ffn_down_exps": (experts, hidden, inner),
        }
    else:
        layer |= {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (shape["vocab_size"], hidden),
        "output_norm.weight": (hidden,),
    }
    for number in range(shape["num_hidden_layers"]):
        found |= {f"blk.{number}.{name}.weight": size for name, size in layer.items()}
    return found


if __name__ == "__main__":
    try:
        print(gguf_file(Path(sys.argv[1]), *sys.argv[2:]))
    except MissingPackage as missing:
        sys.exit(str(missing))
