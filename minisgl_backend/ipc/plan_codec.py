"""Encodes step plans and rank 0's decisions about them, for the ranks that execute them, too."""

from __future__ import annotations

import msgspec
import numpy as np

from minisgl_backend.arrays import Int32Array
from minisgl_backend.request import PoolingParams, SamplingParams
from minisgl_backend.step import AdmittedRow, PrefillChunk, PromptLogprobsRequest, StepDecisions, StepPlan


class _Admitted(msgspec.Struct, frozen=True, array_like=True):
    row: int
    uid: int
    params: SamplingParams
    prompt_len: int
    token_ids: bytes
    cached_len: int
    pooling: PoolingParams | None


class _Chunk(msgspec.Struct, frozen=True, array_like=True):
    row: int
    start: int
    token_ids: bytes
    wants: int


class _Step(msgspec.Struct, frozen=True, array_like=True):
    step: int
    admitted: list[_Admitted]
    page_rows: bytes
    page_columns: bytes
    page_ids: bytes
    prefill: list[_Chunk]
    decode_rows: bytes
    decode_lengths: bytes
    decode_uids: bytes
    cleared_pages: bytes
    page_groups: bytes
    is_retry: bool
    draft_tokens: bytes
    num_proposed: int
    num_proposing: int
    graph_size: int
    resamples: bool
    sampling_graph: int
    prompt_logprobs: tuple[tuple[int, int, int, int, int], ...]
    prompt_size: int


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Step)


def pack_step(plan: StepPlan, decisions: StepDecisions) -> bytes:
    """The plan and the decisions as bytes."""
    return _ENCODER.encode(
        _Step(
            step=plan.step,
            admitted=[
                _Admitted(a.row, a.uid, a.params, a.prompt_len, _int32(a.token_ids), a.cached_len, a.pooling)
                for a in plan.admitted
            ],
            page_rows=_int32(plan.page_rows),
            page_columns=_int32(plan.page_columns),
            page_ids=_int32(plan.page_ids),
            prefill=[_Chunk(c.row, c.start, _int32(c.token_ids), int(c.wants)) for c in plan.prefill],
            decode_rows=_int32(plan.decode_rows),
            decode_lengths=_int32(plan.decode_lengths),
            decode_uids=plan.decode_uids.astype(np.int64, copy=False).tobytes(),
            cleared_pages=_int32(plan.cleared_pages),
            page_groups=_int32(plan.page_groups),
            is_retry=plan.is_retry,
            draft_tokens=_int32(plan.draft_tokens),
            num_proposed=plan.num_proposed,
            num_proposing=plan.num_proposing,
            graph_size=decisions.graph_size,
            resamples=decisions.resamples,
            sampling_graph=decisions.sampling_graph,
            prompt_logprobs=tuple((r.row, r.first, r.position, r.count, r.top) for r in decisions.prompt_logprobs),
            prompt_size=decisions.prompt_size,
        )
    )


def unpack_step(data: bytes) -> tuple[StepPlan, StepDecisions]:
    """Decodes what `pack_step` encoded."""
    plan = _DECODER.decode(data)
    decisions = StepDecisions(
        graph_size=plan.graph_size,
        resamples=plan.resamples,
        sampling_graph=plan.sampling_graph,
        prompt_logprobs=tuple(PromptLogprobsRequest(*request) for request in plan.prompt_logprobs),
        prompt_size=plan.prompt_size,
    )
    return _plan_of(plan), decisions


def _plan_of(plan: _Step) -> StepPlan:
    return StepPlan(
        step=plan.step,
        admitted=tuple(
            AdmittedRow(a.row, a.uid, a.params, a.prompt_len, _array(a.token_ids), a.cached_len, a.pooling)
            for a in plan.admitted
        ),
        page_rows=_array(plan.page_rows),
        page_columns=_array(plan.page_columns),
        page_ids=_array(plan.page_ids),
        prefill=tuple(PrefillChunk(c.row, c.start, _array(c.token_ids), c.wants) for c in plan.prefill),
        decode_rows=_array(plan.decode_rows),
        decode_lengths=_array(plan.decode_lengths),
        decode_uids=np.frombuffer(plan.decode_uids, dtype=np.int64),
        cleared_pages=_array(plan.cleared_pages),
        page_groups=_array(plan.page_groups),
        is_retry=plan.is_retry,
        draft_tokens=_array(plan.draft_tokens),
        num_proposed=plan.num_proposed,
        num_proposing=plan.num_proposing,
    )


def _int32(array: Int32Array) -> bytes:
    return array.astype(np.int32, copy=False).tobytes()


def _array(data: bytes) -> Int32Array:
    return np.frombuffer(data, dtype=np.int32)
