"""Runs a head over a paged KV cache without scheduler or runner."""

from __future__ import annotations

import numpy as np
import torch

from minisgl_backend.attention.base import AttentionSpec, DecodeInputs
from minisgl_backend.attention.pair import StepAttention
from minisgl_backend.attention.registry import create_attention
from minisgl_backend.layers.context import ForwardContext
from minisgl_backend.layers.model_input import ModelInput
from minisgl_backend.models.build import attention_spec
from minisgl_backend.models.draft_head import DraftHead
from tests.specs import make_pool

PAGE = 4


class PagedHead:
    """One row, whose pages are in a scattered order."""

    def __init__(self, head: DraftHead) -> None:
        self._head = head
        self._spec = attention_spec(
            head.config,
            AttentionSpec(page_size=PAGE, max_seq_len=64, max_rows=2, dtype=torch.float32, device=torch.device("cpu")),
            tp_size=1,
        )
        head.bind_attention(self._spec, make_pool(self._spec, 16))
        self._attention = create_attention("torch", "torch", self._spec)
        self._pages = torch.randperm(16, generator=torch.Generator().manual_seed(3)).to(torch.int32).view(1, -1) + 1

    def slots(self, positions: torch.Tensor) -> torch.Tensor:
        return self._pages[0, positions // PAGE] * PAGE + positions % PAGE

    def pass_of(self, position: int) -> ForwardContext:
        host = np.array([position + 1], dtype=np.int32)
        rows = np.zeros(1, dtype=np.int32)
        decode = DecodeInputs(
            kv_lens=torch.from_numpy(host),
            rows=torch.from_numpy(rows),
            page_table=self._pages,
            kv_lens_host=host,
            rows_host=rows,
        )
        slots = self.slots(torch.tensor([position]))
        return ForwardContext(slots=slots, attention=StepAttention(self._attention, self._attention.plan(None, decode)))

    @torch.inference_mode()
    def drafts(self, states: torch.Tensor, token_ids: list[int], count: int) -> tuple[list[int], torch.Tensor]:
        """What it drafts behind n + 1 tokens, of the first n of which the states are given, [n, states_size], and the
        logits of each draft, [count, tokens that it can draft]."""
        head, last = self._head, len(states) - 1
        hidden = head.combine(states)
        for positions in torch.arange(last).split(5):
            tokens = ModelInput(torch.tensor(token_ids)[positions + 1], positions)
            head.keep(tokens, hidden[positions], self.slots(positions))
        drafts, every = [token_ids[-1]], []
        hidden = hidden[-1:]
        for position in range(last, last + count):
            at, token = torch.tensor([position]), torch.tensor(drafts[-1:])
            logits, hidden = head(ModelInput(token, at), hidden, self.pass_of(position))
            every.append(logits[0])
            drafts.append(int(head.to_target_vocab(logits).argmax(-1)))
        return drafts[1:], torch.stack(every)
