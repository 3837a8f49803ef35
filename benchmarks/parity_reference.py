"""What parity is measured against: a random checkpoint in a model's real shape, and transformers' logits of it.

Weights with the usual standard deviation of 0.02 would give nearly uniform distributions (logits with a standard
deviation of 0.6, an entropy 0.2 nats below the vocabulary's 11.9), whose KL hardly notices an error. So each GEMM
keeps the size of what it is given, queries are scaled until attention prefers some tokens to others, no norm is all
ones, and the final one is scaled until the logits spread as those of a trained model do: about 6 nats of entropy.
"""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

LOGIT_SPREAD = 3.5  # standard deviation of a position's logits
QUERY_SCALE = 2.0


@dataclass(frozen=True)
class Sequences:
    """Known tokens: of each sequence the first `prompt_lengths[i]` are its prompt, the others come one at a time."""

    tokens: tuple[tuple[int, ...], ...]
    prompt_lengths: tuple[int, ...]

    @property
    def offsets(self) -> list[int]:
        """Where each sequence begins when all are laid end to end, and where the last one ends."""
        return [0, *np.cumsum([len(tokens) for tokens in self.tokens]).tolist()]

    def decoded(self) -> torch.Tensor:
        """True for the positions computed one at a time; bool [num_tokens], sequences end to end."""
        pairs = zip(self.tokens, self.prompt_lengths, strict=True)
        return torch.cat([torch.arange(len(tokens)) >= length for tokens, length in pairs])


def save_checkpoint(name: str, shape: dict[str, Any], parent: Path) -> Path:
    """The folder `parent/parity-NAME` with config.json and random bf16 weights, made if it is not there yet."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = parent / f"parity-{name}"
    if folder.is_dir():
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    # Made under another name, so that an interrupted run leaves nothing that looks complete.
    unfinished = Path(tempfile.mkdtemp(dir=parent, prefix=f".{folder.name}-"))
    (unfinished / "config.json").write_text(json.dumps(shape, indent=1))
    config = AutoConfig.from_pretrained(unfinished)
    torch.manual_seed(0)
    with device():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        _make_lively(model)
    model.save_pretrained(unfinished, max_shard_size="5GB")
    # Saving rewrites the config in the newer spelling; ours is the one that every reader knows.
    (unfinished / "config.json").write_text(json.dumps(shape, indent=1))
    unfinished.rename(folder)
    return folder


@torch.no_grad()
def _make_lively(model: Any) -> None:
    """See the module's docstring. Behind a norm with weights w, an output projection of standard deviation s spreads
    the logits by w * s * sqrt(hidden_size)."""
    embeddings = model.get_input_embeddings().weight
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.normal_(1.0, 0.1)
        elif parameter is not embeddings:
            parameter.normal_(0.0, 1 / math.sqrt(parameter.shape[1]))
    head = model.get_output_embeddings().weight
    model.model.norm.weight.mul_(LOGIT_SPREAD / (float(head.float().std()) * math.sqrt(head.shape[1])))
    for layer in model.model.layers:
        attention = layer.self_attn
        (attention.q_norm if hasattr(attention, "q_norm") else attention.q_proj).weight.mul_(QUERY_SCALE)


@torch.inference_mode()
def transformers_logits(folder: Path, sequences: Sequences, dtype: torch.dtype) -> torch.Tensor:
    """Each sequence in one forward pass; [num_tokens, vocab_size], sequences end to end, in `dtype`."""
    from transformers import AutoModelForCausalLM

    attention = "eager" if dtype == torch.float32 else "sdpa"
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    model = model.to(device()).eval()
    offsets = sequences.offsets
    logits = torch.empty(offsets[-1], model.config.vocab_size, dtype=dtype, device=device())
    for tokens, begin in zip(sequences.tokens, offsets, strict=False):
        inputs = torch.tensor([tokens], device=device())
        logits[begin : begin + len(tokens)] = model(inputs, use_cache=False).logits[0]
    return logits


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
