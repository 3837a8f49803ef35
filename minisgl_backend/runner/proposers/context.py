"""What a proposer on the device is constructed from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl_backend.attention.pair import AttentionPair
from minisgl_backend.attention.registry import create_attention
from minisgl_backend.models.load_config import LoadConfig
from minisgl_backend.runner.model_pass import Model
from minisgl_backend.runner.row_state import RowState
from minisgl_backend.runner.start.draft import draft_spec
from minisgl_backend.runner.start.runtime_config import DraftSettings, RuntimeConfig


@dataclass(frozen=True, kw_only=True)
class ProposerContext:
    """What a start has loaded before its proposer."""

    runtime: RuntimeConfig
    rows: RowState  # the target's
    target: Model
    load: LoadConfig  # for its own model; the ranks lack the target's shared memory, which has the sizes of its passes

    @property
    def draft(self) -> DraftSettings:
        """Of the model that `read_draft_model` has read."""
        assert self.runtime.draft is not None, "the proposer has a model"
        return self.runtime.draft

    def sample(self, logits: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The tokens behind these entries, with each row's temperature and the noise of the position, as the target
        will sample: int32 [2, n], the same on all ranks. Arguments as of `Sampler.sample_plain`."""
        if self.load.tp.rank == 0:
            token_ids = self.rows.sampler.sample_plain(logits, rows, lengths)
        else:
            token_ids = torch.zeros(2, len(rows), dtype=torch.int32, device=self.load.device)
        return self.load.tp.share_tokens(token_ids)

    def draft_attention(self) -> AttentionPair:
        """Of the draft model's layers."""
        draft = self.draft
        spec = draft_spec(self.runtime, draft, self.load.device)
        return create_attention(draft.prefill_backend, draft.decode_backend, spec)
