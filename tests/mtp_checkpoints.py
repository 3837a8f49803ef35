"""Small random checkpoints with a layer that predicts further tokens (MTP), and what it drafts in plain torch.

transformers leaves such layers out. But its decoder layers are the same: a checkpoint here is one of transformers' with
a layer more, which is said to be the one that drafts.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from minisgl_backend.models.folder import find_model_dir
from tests.parity.checkpoints import save_checkpoint

NUM_LAYERS = 2
_TYPES = "mlp_layer_types"
# As Qwen3-Next's and Qwen3.5's files have the layer that drafts, which has attention; norms are stored less 1.
_PUBLISHED = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}
_AS_TRANSFORMERS_READS = "for-transformers"
_SHARED = (f"{NUM_LAYERS}.embed_tokens.weight", f"{NUM_LAYERS}.shared_head.head.weight")
HYBRIDS = ("qwen3_next", "qwen3_5")


def save_mtp_checkpoint(name: str, folder: Path, **changes: Any) -> Path:
    """Writes the named one of tests.parity.checkpoints to the folder, and returns it."""
    is_hybrid = name in HYBRIDS
    if is_hybrid:
        changes |= {"layer_types": ["linear_attention", *["full_attention"] * NUM_LAYERS]}
    save_checkpoint(name, folder, num_hidden_layers=NUM_LAYERS + 1, **changes)
    file = folder / "model.safetensors"
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(file)
    said = "num_mtp_modules" if config["model_type"] == "minimax_m2" else "num_nextn_predict_layers"
    config |= {"num_hidden_layers": NUM_LAYERS, said: 1}
    if is_hybrid:
        del config[said]
        config |= {"layer_types": config["layer_types"][:NUM_LAYERS], "mtp_num_hidden_layers": 1}
    if _TYPES in config:
        config[_TYPES] = config[_TYPES][:NUM_LAYERS]
    (folder / "config.json").write_text(json.dumps(config))
    generator, size = torch.Generator().manual_seed(1), config["hidden_size"]
    offset = 0 if is_hybrid else 1
    norms = {
        name: offset + 0.2 * torch.randn(size, generator=generator) for name in ("enorm", "hnorm", "shared_head.norm")
    }
    own = {
        **norms,
        "eh_proj": 0.2 * torch.randn(size, 2 * size, generator=generator),
        "embed_tokens": tensors["model.embed_tokens.weight"].clone(),
        "shared_head.head": tensors["lm_head.weight"].clone(),
    }
    tensors |= {f"model.layers.{NUM_LAYERS}.{name}.weight": tensor for name, tensor in own.items()}
    if is_hybrid:
        (folder / _AS_TRANSFORMERS_READS).mkdir()
        shutil.copy(folder / "config.json", folder / _AS_TRANSFORMERS_READS)
        save_file(tensors, folder / _AS_TRANSFORMERS_READS / file.name, {"format": "pt"})
        tensors = {_published(name): tensor for name, tensor in tensors.items() if not name.endswith(_SHARED)}
    save_file(tensors, file, {"format": "pt"})
    return folder


def _published(name: str) -> str:
    local = name.removeprefix(f"model.layers.{NUM_LAYERS}.")
    if local == name:
        return name
    module, _, kind = local.rpartition(".")
    return f"mtp.{_PUBLISHED[module]}.{kind}" if module in _PUBLISHED else f"mtp.layers.0.{local}"


def served_mtp_checkpoint(folder: Path, **changes: Any) -> str:
    """DeepSeek-V3 in small, with the vocabulary and the tokenizer of the demo model, for an engine; its folder."""
    save_mtp_checkpoint("deepseek_v3", folder, vocab_size=1024, **changes)
    for file in find_model_dir("demo").glob("tokenizer*"):
        shutil.copy(file, folder)
    return str(folder)


class Reference:
    """The model and its layer in float32, all positions anew each time."""

    def __init__(self, folder: Path) -> None:
        if (folder / _AS_TRANSFORMERS_READS).is_dir():
            folder = folder / _AS_TRANSFORMERS_READS
        config = transformers.AutoConfig.from_pretrained(folder)
        config.num_hidden_layers += 1
        self._offset = 0
        if config.model_type.removesuffix("_text") in HYBRIDS:
            config.layer_types, self._offset = [*config.layer_types, "full_attention"], 1
        if getattr(config, _TYPES, None) is not None:
            setattr(config, _TYPES, [*getattr(config, _TYPES), "sparse"])
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32
        ).eval()
        *own, self._layer = self._model.model.layers
        self._model.model.layers = torch.nn.ModuleList(own)
        config.num_hidden_layers -= 1
        prefix = f"model.layers.{NUM_LAYERS}."
        found = load_file(folder / "model.safetensors").items()
        self._weights = {name.removeprefix(prefix): one.float() for name, one in found if name.startswith(prefix)}

    @torch.inference_mode()
    def states(self, token_ids: list[int]) -> torch.Tensor:
        """The model's hidden states behind its final norm, [num_tokens, hidden_size]."""
        states: torch.Tensor = self._model.model(torch.tensor([token_ids])).last_hidden_state[0]
        return states

    @torch.inference_mode()
    def drafts(self, states: torch.Tensor, token_ids: list[int], count: int) -> tuple[list[int], torch.Tensor]:
        """What the layer drafts behind n + 1 tokens, of the first n of which the states are given, and the logits of
        each draft, [count, vocab_size]."""
        tokens, hidden, every = list(token_ids), states, []
        for _ in range(count):
            last = self._last_state(torch.tensor(tokens[1:]), hidden)
            every.append(F.linear(last, self._weights["shared_head.head.weight"]))
            tokens.append(int(every[-1].argmax()))
            hidden = torch.cat([hidden, last[None]])
        return tokens[len(token_ids) :], torch.stack(every)

    def _last_state(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        embedded = self._norm(F.embedding(token_ids, self._weights["embed_tokens.weight"]), "enorm")
        x = F.linear(torch.cat([embedded, self._norm(hidden, "hnorm")], dim=-1), self._weights["eh_proj.weight"])[None]
        positions = torch.arange(len(token_ids))[None]
        turns = self._model.model.rotary_emb(x, positions)
        out = self._layer(x, attention_mask=None, position_ids=positions, position_embeddings=turns)
        return self._norm(out[0, -1], "shared_head.norm")

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = self._model.config.rms_norm_eps
        weight = self._offset + self._weights[f"{name}.weight"]
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
