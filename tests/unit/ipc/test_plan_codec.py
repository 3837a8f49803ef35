"""Plans survive the way to the followers."""

from __future__ import annotations

import numpy as np

from minisgl_backend.ipc.plan_codec import pack_step, unpack
from minisgl_backend.request import Content, Grammar, PoolingParams, SamplingParams
from minisgl_backend.step import (
    AdmittedRow,
    EncodeSlice,
    PrefillChunk,
    PromptLogprobsRequest,
    StepDecisions,
    StepPlan,
    Wants,
)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


IMAGE = Content(start=1, length=6, digest=b"cat", grid=(1, 4, 6), pixels="a/b", shape=(1, 56, 84, 3))
PARAMS = SamplingParams(
    temperature=0.5,
    seed=2**64 - 1,
    logit_bias={3: -1.5},
    bad_words_token_ids=((1, 2), (3,)),
    stop=("x",),
    grammar=Grammar(kind="regex", text="[0-9]"),
)


def test_round_trip() -> None:
    plan = StepPlan(
        step=41,
        admitted=(
            AdmittedRow(2, 1 << 60, PARAMS, 3, ints(5, 6, 7), 2, PoolingParams(kind="mean", dimensions=7), 5, 6),
        ),
        page_rows=ints(2, 2),
        page_columns=ints(0, 1),
        page_ids=ints(9, 8),
        prefill=(PrefillChunk(2, 2, ints(7), Wants.TOKEN), PrefillChunk(3, 0, ints(1, 2), Wants.STATE_SUM, ((1, 9),))),
        decode_rows=ints(0, 1),
        decode_lengths=ints(10, 11),
        decode_uids=np.array([1 << 50, 4], dtype=np.int64),
        cleared_pages=ints(3, 7),
        page_groups=ints(0, 1),
        is_retry=True,
        draft_tokens=ints(-1, 7),
        num_proposed=3,
        num_proposing=1,
        fold_rows=ints(0, 1),
        fold_sources=ints(0, 3),
        fold_targets=ints(2, 3),
        fold_borders=ints(8, 4),
        freed_vectors=(b"gone",),
        adapter_loads=((1, 7), (2, 3)),
        encode=(EncodeSlice(3, b"key", IMAGE, 0, 2, 1),),
    )
    decisions = StepDecisions(
        graph_size=8,
        resamples=True,
        sampling_graph=4,
        prompt_logprobs=(PromptLogprobsRequest(2, 0, 3, 1, 5),),
        prompt_size=64,
    )
    copy, same = unpack(pack_step(plan, decisions))
    assert same == decisions
    assert (copy.step, copy.num_tokens, copy.is_retry) == (plan.step, plan.num_tokens, True)
    assert copy.sampled_rows.tolist() == plan.sampled_rows.tolist()
    assert copy.draft_tokens.tolist() == [-1, 7]
    assert (copy.freed_vectors, copy.encode) == (plan.freed_vectors, plan.encode)
    assert copy.adapter_loads == plan.adapter_loads
    assert (copy.num_proposed, copy.num_proposing) == (3, 1)
    arrays = [name for name in StepPlan.__struct_fields__ if isinstance(getattr(plan, name), np.ndarray)]
    assert len(arrays) == len(StepPlan.__struct_fields__) - 9, "the others are compared one by one"
    for name in arrays:
        assert len(getattr(plan, name)), f"{name}: only what is there can be lost"
        assert getattr(copy, name).dtype == getattr(plan, name).dtype
        assert getattr(copy, name).tolist() == getattr(plan, name).tolist()
    assert (copy.admitted[0].params, copy.admitted[0].pooling) == (PARAMS, plan.admitted[0].pooling)
    assert copy.admitted[0].token_ids.tolist() == [5, 6, 7]
    assert (copy.admitted[0].state_source, copy.admitted[0].state_slot) == (5, 6)
    assert [(c.row, c.start, c.token_ids.tolist(), c.wants, c.checkpoints) for c in copy.prefill] == [
        (2, 2, [7], Wants.TOKEN, ()),
        (3, 0, [1, 2], Wants.STATE_SUM, ((1, 9),)),
    ]


def test_an_empty_plan() -> None:
    none = ints()
    plan = StepPlan(0, (), none, none, none, (), none, none, np.zeros(0, dtype=np.int64))
    copy, decisions = unpack(pack_step(plan, StepDecisions()))
    assert decisions == StepDecisions()
    assert copy.num_tokens == 0
    assert len(copy.sampled_rows) == 0
