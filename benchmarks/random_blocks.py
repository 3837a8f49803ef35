"""Random weights in GGUF's blocks: a file of a few hundred MB, of which all tensors of a model are parts.

What a step costs does not depend on the numbers, so that tensors of one type may share them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from minisgl_backend.weights.gguf_header import TYPES_BY_NAME
from minisgl_backend.weights.gguf_index import GGUFIndex, IndexedTensor

_DEVIATION = 0.02  # of the numbers, about
_FILE = "blocks.gguf"


def add_blocks(folder: Path, config: Mapping[str, Any]) -> None:
    """Gives a folder in Qwen3's shape weights: matrices in Q4_K, norms of ones in F32."""
    shapes = qwen3_tensors(config)
    largest = max(np.prod(shape) for shape in shapes.values() if len(shape) > 1)
    blocks = random_q4_k(int(largest), np.random.default_rng(0))
    norms = np.ones(max(shape[0] for shape in shapes.values() if len(shape) == 1), np.float32)
    with (folder / _FILE).open("wb") as file:
        file.write(norms.tobytes())
        file.write(blocks.tobytes())
    tensors = tuple(
        IndexedTensor(name=name, file=0, type="Q4_K" if len(shape) > 1 else "F32", shape=shape,
                      offset=norms.nbytes if len(shape) > 1 else 0)
        for name, shape in shapes.items()
    )  # fmt: skip
    GGUFIndex((folder / _FILE,), ((folder / _FILE).stat().st_size,), tensors).save(folder)


def file_bytes(folder: Path) -> int:
    """Those of a real file with the same tensors."""
    tensors = GGUFIndex.load(folder / "gguf_index.json").tensors
    return sum(TYPES_BY_NAME[one.type].bytes_of(one.shape) for one in tensors)


def qwen3_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes by the names of checkpoints."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,), "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (hidden,)}
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (config["vocab_size"], hidden))
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def random_q4_k(numbers: int, random: np.random.Generator) -> np.ndarray:
    """uint8 [blocks, 144]: random numbers, scales and minima, whose factors make the mean zero."""
    blocks = np.frombuffer(random.bytes(numbers // 256 * 144), np.uint8).reshape(-1, 144).copy()
    factors = np.array([_DEVIATION / (31.5 * 7), 7.5 * _DEVIATION / (31.5 * 7)], np.float16)
    blocks[:, :4] = factors.view(np.uint8)
    return blocks
