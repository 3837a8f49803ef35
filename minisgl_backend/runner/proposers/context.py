"""What a proposer on the device is constructed from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from minisgl_backend.attention.pair import AttentionPair
from minisgl_backend.attention.registry import create_attention
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.decoder import CausalLM
from minisgl_backend.runner.model_runner import Model
from minisgl_backend.runner.row_table import RowTable
from minisgl_backend.runner.start.draft import draft_spec
from minisgl_backend.runner.start.runtime_config import DraftSettings, RuntimeConfig
from minisgl_backend.sampling.sampler import Sampler
from minisgl_backend.tensor_parallel import TensorParallel


@dataclass(frozen=True, kw_only=True)
class ProposerContext:
    """What a start has loaded before its proposer."""

    runtime: RuntimeConfig
    device: torch.device
    table: RowTable  # the target's, as is `sampler`
    sampler: Sampler
    tp: TensorParallel  # without the target's shared memory, which has the sizes of its passes
    target: Model
    load_model: Callable[[ModelConfig, str], CausalLM]  # from its config and its folder

    @property
    def draft(self) -> DraftSettings:
        """Of the model that `read_draft_model` has read."""
        assert self.runtime.draft is not None, "the proposer has a model"
        return self.runtime.draft

    def sample(self, logits: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The tokens behind these entries, with each row's temperature and the noise of the position, as the target
        will sample: int32 [2, n], the same on all ranks. Arguments as of `Sampler.sample_plain`."""
        if self.tp.rank == 0:
            token_ids = self.sampler.sample_plain(logits, rows, lengths)
        else:
            token_ids = torch.zeros(2, len(rows), dtype=torch.int32, device=self.device)
        return self.tp.share_tokens(token_ids)

    def head_options(self) -> dict[str, Any]:
        """What the heads of `models` are built with, all alike."""
        return {
            "model_dir": self.draft.model_dir,
            "dtype": getattr(torch, self.runtime.dtype),
            "device": self.device,
            "max_seq_len": self.runtime.max_seq_len,
            "tp": self.tp,
            "dummy_weights": self.runtime.config.dummy_weights,
        }

    def draft_attention(self) -> AttentionPair:
        """Of the draft model's layers."""
        draft = self.draft
        spec = draft_spec(self.runtime, draft, self.device)
        return create_attention(draft.prefill_backend, draft.decode_backend, spec)
