"""Small random EAGLE-3 heads with the layout of published ones, and what they draft in plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

DEMO_LAYERS = (1, 3, 5)
SIZES: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "draft_vocab_size": 120,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def save_head(folder: Path, *, own_embedding: bool = False, seed: int = 0, **changes: Any) -> Path:
    """Writes one to the folder, which is made, and returns it."""
    config = {**SIZES, **changes}
    hidden, target = config["hidden_size"], config.get("target_hidden_size", config["hidden_size"])
    heads, kv_heads, size = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    inner, drafts, vocab = (config[key] for key in ("intermediate_size", "draft_vocab_size", "vocab_size"))
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "fc": (hidden, 3 * target),
        "midlayer.self_attn.q_proj": (heads * size, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv_heads * size, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_heads * size, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads * size),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "lm_head": (drafts, hidden),
        **({"embed_tokens": (vocab, hidden)} if own_embedding else {}),
    }
    tensors = {f"{name}.weight": 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = 1 + 0.2 * torch.randn(hidden, generator=generator)
    tensors["norm.weight"] = 1 + 0.2 * torch.randn(hidden, generator=generator)
    if drafts < vocab:
        ids = torch.randperm(vocab, generator=generator)[:drafts].sort().values
        tensors["d2t"] = ids - torch.arange(drafts)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def eagle3_head(folder: Path, most: int, **changes: Any) -> dict[str, Any]:
    """Options by which a random head proposes for the demo model, from the inputs of DEMO_LAYERS."""
    sizes = {"hidden_size": 256, "head_dim": 64, "vocab_size": 1024, "draft_vocab_size": 300}
    save_head(folder, **{**sizes, "eagle_aux_hidden_state_layer_ids": list(DEMO_LAYERS), **changes})
    return {"speculative_config": {"method": "eagle3", "model": str(folder), "num_speculative_tokens": most}}


def demo_head(most: int) -> dict[str, Any]:
    """Options by which the head that comes with the demo model proposes."""
    return {"speculative_config": {"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": most}}


def reference_drafts(
    folder: Path, states: torch.Tensor, token_ids: list[int], embedding: torch.Tensor, count: int
) -> tuple[list[int], torch.Tensor]:
    """What a head drafts behind n + 1 tokens, of the first n of which the target has told its states, and the logits
    of each draft, [count, draft_vocab_size].

    states float32 [n, 3 * target_hidden_size]; embedding: the target's [vocab_size, hidden_size].
    """
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    w = load_file(folder / "model.safetensors")
    embedding = w.get("embed_tokens.weight", embedding)
    tokens, hidden = list(token_ids), F.linear(states, w["fc.weight"])
    drafts: list[int] = []
    every = []
    for _ in range(count):
        out, logits = _layer(config, w, embedding[torch.tensor(tokens[1:])], hidden)
        every.append(logits[-1])
        best = int(logits[-1].argmax())
        drafts.append(best + int(w["d2t"][best]) if "d2t" in w else best)
        tokens.append(drafts[-1])
        hidden = torch.cat([hidden, out[-1:]])
    return drafts, torch.stack(every)


def _layer(
    config: dict[str, Any], w: dict[str, torch.Tensor], embedded: torch.Tensor, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """All positions anew: hidden states behind the layer, and logits."""
    size, eps = config["head_dim"], config["rms_norm_eps"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w[f"{name}.weight"]

    def heads(name: str) -> torch.Tensor:
        return F.linear(x, w[f"midlayer.self_attn.{name}_proj.weight"]).unflatten(-1, (-1, size)).transpose(0, 1)

    def rotated(y: torch.Tensor) -> torch.Tensor:
        angle = torch.arange(y.shape[1])[:, None] * config["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        low, high = y.chunk(2, dim=-1)
        return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], dim=-1)

    normed = norm(hidden, "midlayer.hidden_norm")
    x = torch.cat([norm(embedded, "midlayer.input_layernorm"), normed], dim=-1)
    attended = F.scaled_dot_product_attention(
        rotated(heads("q")), rotated(heads("k")), heads("v"), is_causal=True, enable_gqa=True
    )
    added_to = normed if config.get("norm_before_residual") else hidden
    y = added_to + F.linear(attended.transpose(0, 1).flatten(1), w["midlayer.self_attn.o_proj.weight"])
    z = norm(y, "midlayer.post_attention_layernorm")
    gated = F.silu(F.linear(z, w["midlayer.mlp.gate_proj.weight"])) * F.linear(z, w["midlayer.mlp.up_proj.weight"])
    y = y + F.linear(gated, w["midlayer.mlp.down_proj.weight"])
    return y, F.linear(norm(y, "norm"), w["lm_head.weight"])
