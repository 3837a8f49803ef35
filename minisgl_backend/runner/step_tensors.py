"""A step staged on the host (`HostBatch`), and on the device (`StepTensors`). `BatchBuilder` makes both."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch

from minisgl_backend.arrays import NO_INT32, Int32Array
from minisgl_backend.attention.base import DecodeInputs, PrefillInputs
from minisgl_backend.runner.plan_arrays import PrefillHost
from minisgl_backend.runner.pooling import PooledChunk
from minisgl_backend.runner.row_images import NO_IMAGES, StepImages
from minisgl_backend.runner.staging import Staged
from minisgl_backend.sampling.metadata import SamplingInputs, SamplingMetadata
from minisgl_backend.step import StepDecisions, StepPlan


@dataclass(frozen=True)
class PenaltyReset:
    """A row whose penalties are recounted from the first `num_tokens` of its tokens."""

    row: int
    num_tokens: int
    prompt_len: int


class HostBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A plan in a staging buffer: made by `build_host`, taken by `upload`."""

    plan: StepPlan
    staged: Staged
    prefill: PrefillHost | None = None
    decode_rows: Int32Array = NO_INT32  # [batch], padded where a graph will run
    decode_lengths: Int32Array = NO_INT32  # [batch]
    num_sampled: int
    checked_rows: tuple[int, ...]
    decisions: StepDecisions
    pooled: tuple[PooledChunk, ...] = ()
    needs: SamplingMetadata  # NOTHING on ranks that do not sample
    penalised: tuple[PenaltyReset, ...]
    images: StepImages = NO_IMAGES


class StepTensors(msgspec.Struct, frozen=True, kw_only=True):
    """One step on the device. Valid until the next upload, in stream order."""

    plan: StepPlan
    decisions: StepDecisions
    num_sampled: int
    checked_rows: tuple[int, ...]  # rows of chunks that do not end their prompt: checked for NaN, as nothing is sampled
    prefill: PrefillInputs | None = None
    decode: DecodeInputs | None = None
    # Rows, positions, ids; int32 [num_drafts] each.
    drafts: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    token_rows: torch.Tensor | None = None  # int32 [num_tokens], prefill first; None: decode's are all
    token_positions: torch.Tensor | None = None  # int32 [num_tokens]
    # int32 [num_sampled + num_checked + pooled states]: indices of hidden states, first those that sample, then those
    # that are checked; None: all of them
    logits_indices: torch.Tensor | None = None
    pooled: tuple[PooledChunk, ...] = ()
    pooled_tokens: torch.Tensor | None = None  # int32  pooling.named_tokens; None: no chunk requests any
    cleared_pages: torch.Tensor | None = None  # int32 [num_cleared]
    images: StepImages = NO_IMAGES
    given_rows: torch.Tensor | None = None  # int32 [num_vectors]: tokens that get vectors
    rope_positions: torch.Tensor | None = (
        None  # int32 [num_tokens] or [3, num_tokens], where they are not the true ones
    )
    sampling: SamplingInputs
    waits_for_masks: bool  # its tokens are sampled once the grammar masks are there
    logprobs: tuple[tuple[int, int], ...]  # result index, and number of alternatives

    def tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and position of every token of the step, prefill first; int32 [num_tokens] each."""
        if self.token_rows is not None and self.token_positions is not None:
            return self.token_rows, self.token_positions
        assert self.decode is not None, "a step without prefill tokens decodes"
        return self.decode.rows, self.decode.kv_lens - 1
