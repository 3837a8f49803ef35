"""The modules of an MTP layer (multi-token prediction; DeepSeek-AI, 2024: DeepSeek-V3 Technical Report, section 2.2).

The normed embedding of the token and the normed hidden state of the model are projected to one vector, which passes a
decoder layer, a norm (`shared_head.norm`) and the model's output projection. The input hidden states are after a norm:
the model's final one, and for further drafts the layer's own `shared_head.norm`, as in vLLM and SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import torch

from minisgl_backend.attention.base import AttentionSpec
from minisgl_backend.kv.pool import KVPool
from minisgl_backend.layers.context import ForwardContext
from minisgl_backend.layers.model_input import ModelInput
from minisgl_backend.layers.norm import make_norm
from minisgl_backend.layers.residual import Residual
from minisgl_backend.layers.weights import LayerContext
from minisgl_backend.models.build import is_redundant, layer_context_of
from minisgl_backend.models.decoder import CausalLM, decoder_layer
from minisgl_backend.models.draft_head import DraftHead
from minisgl_backend.models.load_config import LoadConfig
from minisgl_backend.models.mtp import MtpConfig
from minisgl_backend.weights.files import Checkpoint
from minisgl_backend.weights.method import LinearMethod, LinearOutput, LinearSpec


class MtpHead(DraftHead):
    """With tensor parallelism its layer is split like the model's; the projection (`eh_proj`) is replicated."""

    def __init__(self, config: MtpConfig, layer_context: LayerContext, max_seq_len: int, model: CausalLM) -> None:
        """layer_context: of the whole model, whose embedding and output projection it uses."""
        super().__init__()
        self.config, self.states_size = config, config.hidden_size
        self._tp = layer_context.tp
        own, size = layer_context.within(max_seq_len).at(config.prefix[:-1]), config.hidden_size
        self.enorm, self.hnorm = (make_norm(size, config.norm, name, own) for name in ("enorm", "hnorm"))
        output = LinearOutput(name=own.name("eh_proj"), size=size, start=0, local=size)
        # Not quantized in any checkpoint.
        self.eh_proj: LinearMethod = own.methods.plain_linear(
            LinearSpec(outputs=(output,), input_size=2 * size, local_inputs=2 * size)
        )
        self.layer = decoder_layer(config.draft_layer, size, own)
        self.norm = make_norm(size, config.norm, "norm", own.at("shared_head"))
        # Functions and not modules, which would become its submodules.
        self._embed, self._logits = model.model.embed_tokens.forward, model.logits

    def keep(self, tokens: ModelInput, hidden: torch.Tensor, slots: torch.Tensor) -> None:
        self.layer.store(self._projected(tokens.token_ids, hidden), tokens, slots)

    def forward(
        self, tokens: ModelInput, hidden: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = Residual(self._projected(tokens.token_ids, hidden), self._tp)
        (residual,) = self.layer((residual,), tokens, ctx)  # too few tokens for micro-batches
        _, states = residual.settled(self.norm)
        return self._logits(states), states

    def bind_attention(self, spec: AttentionSpec, pool: KVPool) -> None:
        self.layer.mixer.bind(spec, pool, count())

    def prepare(self, batch_sizes: Sequence[int], longest: int) -> None:
        of_prompts = (self.eh_proj, self.layer.mixer.qkv_proj.method)
        for module in self.modules():
            if isinstance(module, LinearMethod):
                module.prepare([module], batch_sizes, longest if module in of_prompts else 0)

    def derive_weights(self) -> None:
        super().derive_weights()
        self.layer.derive_weights()

    def _projected(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Arguments as in `forward` -> the input of the layer, [num_tokens, hidden_size]."""
        both = torch.cat([self.enorm(self._embed(token_ids)), self.hnorm(hidden)], dim=-1)
        return self.eh_proj.apply_weights(both)


def build_mtp_head(config: MtpConfig, model_dir: str | Path, load: LoadConfig, *, model: CausalLM) -> MtpHead:
    """The head of one rank, ready to run, from the folder of `model`, which is ready.

    Raises ConfigError naming tensors that are missing, unexpected or of another shape than config.json says.
    """
    formats, names = config.quantization, config.tensor_names
    head = MtpHead(config, layer_context_of(config, formats, load), load.max_seq_len, model).eval()
    head.load(
        None if load.dummy_weights else Checkpoint(Path(model_dir), names),
        replace(names, left_out=()),
        lambda name: name.startswith(names.left_out) or is_redundant(name, config, formats),
    )
    return head
