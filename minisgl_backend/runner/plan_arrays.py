"""Arrays of the parts of a plan that few steps have: prefill chunks, and admitted sequences."""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from minisgl_backend.arrays import NO_INT32, Int32Array
from minisgl_backend.attention.base import PrefillInputs
from minisgl_backend.kernels.recurrent.calls import ChunkBatch
from minisgl_backend.kernels.sampling.layout import NUM_PARAMS
from minisgl_backend.runner.row_table import RowTable
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


def admitted_arrays(plan: StepPlan, vocab_size: int) -> dict[str, Int32Array]:
    """What the rows that a plan admits begin with, by name."""
    admitted_rows = np.array([admitted.row for admitted in plan.admitted], dtype=np.int32)
    lengths = np.array([len(admitted.token_ids) for admitted in plan.admitted], dtype=np.int32)
    token_rows, positions = expand(admitted_rows, np.zeros_like(lengths), lengths)
    return {
        "admitted_rows": admitted_rows,
        "admitted_token_rows": token_rows,
        "admitted_positions": positions,
        "admitted_params": np.concatenate([params_of(one, vocab_size) for one in plan.admitted]).reshape(
            -1, NUM_PARAMS
        ),
        "admitted_tokens": np.concatenate([admitted.token_ids for admitted in plan.admitted]),
    }


def prefill_inputs(table: RowTable, prefill: PrefillHost, arrays: dict[str, torch.Tensor]) -> PrefillInputs:
    """What attention is given of the prefill part; arrays: uploaded, by name."""
    return PrefillInputs(
        cu_seqlens_q=arrays["cu_seqlens"],
        kv_lens=arrays["prefill_ends"],
        rows=arrays["prefill_rows"],
        page_table=table.page_table,
        cu_seqlens_q_host=prefill.cu_seqlens,
        kv_lens_host=prefill.ends,
        rows_host=prefill.rows,
        page_tables=table.page_tables,
        # Of a model with states; not for a proposer's own layers.
        chunks=ChunkBatch(arrays["chunk_blocks"], arrays["chunk_rows"]) if "chunk_rows" in arrays else None,
    )
