"""A CausalLM of transformers with the runner's interface: one ragged batch in, hidden states and logits out."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from minisgl_backend.attention.base import AttentionSpec
from minisgl_backend.kv.pool import KVPool
from minisgl_backend.kv.state import StatePool
from minisgl_backend.layers.context import ForwardContext
from minisgl_backend.layers.model_input import ModelInput
from minisgl_backend.models.fallback.attention import AttentionCalls


class _Output(MoeModelOutputWithPast):
    """Decoder output in which every other attribute is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Hidden(nn.Module):
    """Replaces the decoder to run only the output projection: returns its input."""

    @property
    def decoder(self) -> _Hidden:
        """In OPT the decoder is inside its model."""
        return self

    def forward(self, *_: Any, inputs_embeds: torch.Tensor | None = None, **__: Any) -> _Output:
        return _Output(last_hidden_state=inputs_embeds)


def base_name(model: PreTrainedModel) -> str | None:
    """The name of the decoder in `model`, which computes hidden states; None: it has none."""
    for name in (model.base_model_prefix, "model", "transformer"):
        if isinstance(getattr(model, name, None) if name else None, nn.Module):
            return name
    return None


def logits_head(model: PreTrainedModel, base: str) -> PreTrainedModel:
    """The same model, with the same parameters, without its decoder: from `inputs_embeds`, which are hidden states, to
    logits, including what its class does to them."""
    head = copy.copy(model)
    head.__dict__["_modules"] = {**model._modules, base: _Hidden()}
    return head


class TransformersCausalLM(nn.Module):
    """All tokens of a step are one row of transformers' batch, with positions; only attention separates sequences."""

    def __init__(self, model: PreTrainedModel, base: str, sinks: Sequence[str | None]) -> None:
        """`base`: name of the decoder in `model`; sinks: by attention call, name of the parameter, None: no sinks."""
        super().__init__()
        self.model = model
        self._base: nn.Module = getattr(model, base)
        self._head = (logits_head(model, base),)  # in a tuple: its parameters are the model's
        self._calls = AttentionCalls(model)
        self._sinks = tuple(sinks)

    def forward(self, tokens: ModelInput, ctx: ForwardContext) -> torch.Tensor:
        """Hidden states after the final norm, at `ctx.logits_indices`."""
        self._calls.begin(ctx)
        positions = tokens.positions if tokens.rotation is None else tokens.rotation.positions
        outputs = self._base(
            **self._inputs(tokens), position_ids=positions[None].long(), use_cache=False, return_dict=True
        )
        hidden: torch.Tensor = outputs[0][0]
        return hidden if ctx.logits_indices is None else hidden[ctx.logits_indices]

    def _inputs(self, tokens: ModelInput) -> dict[str, torch.Tensor]:
        """Token ids, or embeddings with the given vectors in their places. Its class knows nothing else of an input."""
        given, ids = tokens.given, tokens.token_ids[None].long()
        if tokens.by_row is not None or (tokens.rotation and tokens.rotation.tables) or (given and given.planes):
            raise NotImplementedError("transformers' classes take token ids or vectors, and positions")
        if given is None:
            return {"input_ids": ids}
        embedding: nn.Module = self.model.get_input_embeddings()
        return {"inputs_embeds": given.placed(embedding(ids)[0])[None]}

    def bind_states(self, states: StatePool) -> None:
        raise NotImplementedError("no model with states runs through transformers' code")

    def bind_attention(self, spec: AttentionSpec, pool: KVPool) -> None:
        """Binds attention to this pool."""
        layers = []
        for index, name in enumerate(self._sinks):
            sinks = None if name is None else self.model.get_parameter(name).detach().float().flatten()
            layers.append(spec.layer(index, pool.layer(index), sinks))
        self._calls.bind(layers)

    def logits(self, hidden: torch.Tensor, slots: None = None) -> torch.Tensor:
        """hidden [num_sampled, hidden_size] -> [num_sampled, vocab_size]."""
        logits: torch.Tensor = self._head[0](inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Causal language models of transformers have no classification head."""
        raise RuntimeError("a request for scores is refused where there is no head")

    def decode_logits(self, hidden: torch.Tensor, slots: None = None) -> torch.Tensor:
        """As `logits`."""
        return self.logits(hidden)

    def prepare(self, batch_sizes: Sequence[int], longest: int) -> None:
        """GEMMs use torch: there are no kernels to choose."""
