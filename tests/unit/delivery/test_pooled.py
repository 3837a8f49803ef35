"""Requests for vectors: their prompts go to a core as there is room, and one response answers for all."""

from __future__ import annotations

import numpy as np

from minisgl_backend.delivery.pooled import PooledRequests
from minisgl_backend.errors import CapacityError
from minisgl_backend.ipc.messages import Outputs
from minisgl_backend.ipc.wire import EngineRequest, OutputOptions
from minisgl_backend.request import NO_SAMPLING, FinishReason, PoolingParams, Request
from minisgl_backend.step import SequenceDetail
from tests.unit.delivery.fake_engine import Recorder


class Core:
    """Has room for `room` prompts; what is submitted beyond is refused at once, or later where `late`."""

    def __init__(self, room: int, late: bool) -> None:
        self.room, self.late = room, late
        self.waiting: list[int] = []
        self.late_ones: list[int] = []
        self.aborted: list[int] = []

    def new_uid(self, count: int) -> int:
        return 1

    def submit(self, request: Request) -> None:
        if len(self.waiting) < self.room:
            self.waiting.append(request.uid)
        elif self.late:
            self.late_ones.append(request.uid)
        else:
            raise CapacityError("full")

    def abort(self, uids: list[int], reason: FinishReason) -> None:
        self.aborted += uids


def ask(core: Core, num_prompts: int) -> tuple[PooledRequests, Recorder]:
    pooled, sender = PooledRequests(core), Recorder()
    lengths = np.full(num_prompts, 3, dtype="<i4").tobytes()
    spec = EngineRequest(params=NO_SAMPLING, options=OutputOptions(), poolings=(PoolingParams(),), lengths=lengths)
    pooled.submit(sender, np.ones(3 * num_prompts, dtype=np.int32), spec, 100)  # type: ignore[arg-type]
    return pooled, sender


def finish(pooled: PooledRequests, core: Core) -> None:
    uid = core.waiting.pop(0)
    vector = np.array([uid], dtype="<f4").tobytes()
    pooled.take(
        Outputs(
            uids=np.array([uid], dtype="<i8").tobytes(),
            token_ids=np.array([-1], dtype="<i4").tobytes(),
            reasons=bytes([FinishReason.STOP]),
            details={0: SequenceDetail(pooled=vector)},
        )
    )


def test_more_prompts_than_the_queue_has_room_for_wait_for_one_another() -> None:
    for late in (False, True):
        core = Core(4, late)
        pooled, sender = ask(core, 11)
        while core.waiting:
            for uid in core.late_ones:
                pooled.reject(uid, CapacityError("full"))
            core.late_ones.clear()
            finish(pooled, core)
        pooled.close()
        assert sender.error is None
        assert sender.details[0]["embedding"].ravel().tolist() == [float(uid) for uid in range(1, 12)]
        assert len(pooled) == 0


def test_where_the_queue_is_full_of_others_prompts_it_is_refused() -> None:
    core = Core(0, False)
    pooled, sender = ask(core, 3)
    pooled.close()
    assert sender.error is not None
    assert len(pooled) == 0
