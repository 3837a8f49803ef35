"""Arrays of the parts of a plan that few steps have: prefill chunks, and admitted sequences."""

from __future__ import annotations

import msgspec
import numpy as np

from minisgl_backend.arrays import NO_INT32, Int32Array
from minisgl_backend.kernels.sampling.layout import NUM_PARAMS
from minisgl_backend.sampling.params import encode_params
from minisgl_backend.step import AdmittedRow, RowError, StepPlan


class PrefillHost(msgspec.Struct, frozen=True):
    """The prefill part of a plan as arrays, one entry per chunk."""

    rows: Int32Array
    starts: Int32Array
    lengths: Int32Array
    ends: Int32Array
    cu_seqlens: Int32Array  # [num_chunks + 1]

    @property
    def num_tokens(self) -> int:
        return int(self.cu_seqlens[-1])


def prefill_arrays(plan: StepPlan) -> PrefillHost:
    lengths = np.array([len(chunk.token_ids) for chunk in plan.prefill], dtype=np.int32)
    starts = np.array([chunk.start for chunk in plan.prefill], dtype=np.int32)
    cu_seqlens = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    return PrefillHost(
        rows=np.array([chunk.row for chunk in plan.prefill], dtype=np.int32),
        starts=starts,
        lengths=lengths,
        ends=starts + lengths,
        cu_seqlens=cu_seqlens,
    )


def sampled_of_prompt(plan: StepPlan) -> tuple[Int32Array, Int32Array]:
    """Row and position of the token that the only chunk of a plan samples, if it does: int32 [0 or 1] each."""
    (chunk,) = plan.prefill
    if not chunk.samples:
        return NO_INT32, NO_INT32
    return np.array([chunk.row], dtype=np.int32), np.array([chunk.end], dtype=np.int32)


def expand(rows: Int32Array, starts: Int32Array, lengths: Int32Array) -> tuple[Int32Array, Int32Array]:
    """Row and position of every token of ragged sequences: `lengths[i]` tokens of `rows[i]` from `starts[i]` on.

    All int32 [num_seqs] -> two int32 [num_tokens]. On the device this would be some 25 launches, which would delay the
    first kernels of a short prompt.
    """
    shift = np.repeat(starts - (np.cumsum(lengths, dtype=np.int32) - lengths), lengths)
    return np.repeat(rows, lengths), np.arange(len(shift), dtype=np.int32) + shift


def sampled_beside_prefill(plan: StepPlan, prefill: PrefillHost) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Row, position and index into the hidden states of every token to be sampled, in result order."""
    samples = np.array([chunk.samples for chunk in plan.prefill], dtype=bool)
    first_decode = prefill.num_tokens
    decode_indices = np.arange(first_decode, first_decode + len(plan.decode_rows), dtype=np.int32)
    return (
        np.concatenate([prefill.rows[samples], plan.decode_rows]),
        np.concatenate([prefill.ends[samples], plan.decode_lengths]),
        np.concatenate([prefill.cu_seqlens[1:][samples] - 1, decode_indices]),
    )


def params_of(admitted: AdmittedRow, vocab_size: int) -> Int32Array:
    try:
        return encode_params(admitted.params, vocab_size)
    except Exception as error:
        raise RowError(admitted.row, error) from error


def update_arrays(plan: StepPlan, vocab_size: int, max_rows: int) -> dict[str, Int32Array]:
    """What a plan changes of rows and pages, by name; names without entries are left out."""
    arrays: dict[str, Int32Array] = {}
    if len(plan.cleared_pages):
        arrays["cleared_pages"] = plan.cleared_pages
    if len(plan.draft_tokens):
        drafts = plan.draft_tokens >= 0
        arrays |= {
            "draft_rows": plan.decode_rows[drafts],
            "draft_positions": plan.decode_lengths[drafts] - 1,
            "draft_tokens": plan.draft_tokens[drafts],
        }
    if len(plan.page_ids):
        rows = plan.page_groups * max_rows + plan.page_rows if len(plan.page_groups) else plan.page_rows
        arrays |= {"page_rows": rows, "page_columns": plan.page_columns, "page_ids": plan.page_ids}
    if plan.admitted:
        admitted_rows = np.array([admitted.row for admitted in plan.admitted], dtype=np.int32)
        lengths = np.array([len(admitted.token_ids) for admitted in plan.admitted], dtype=np.int32)
        token_rows, positions = expand(admitted_rows, np.zeros_like(lengths), lengths)
        arrays |= {
            "admitted_rows": admitted_rows,
            "admitted_token_rows": token_rows,
            "admitted_positions": positions,
            "admitted_params": np.concatenate([params_of(one, vocab_size) for one in plan.admitted]).reshape(
                -1, NUM_PARAMS
            ),
            "admitted_tokens": np.concatenate([admitted.token_ids for admitted in plan.admitted]),
        }
    return arrays
