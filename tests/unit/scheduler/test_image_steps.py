"""Sixteen streams beside a photo of a phone, in simulated time: a step takes what an H200 was seen to take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from minisgl_backend.encoder_limits import EncoderLimits
from minisgl_backend.errors import ConfigError
from minisgl_backend.request import Content, Request
from minisgl_backend.scheduler.encoder_costs import EncoderCosts
from minisgl_backend.scheduler.image_share import BESIDE, LONG_S
from minisgl_backend.scheduler.limits import SchedulerLimits
from minisgl_backend.scheduler.scheduler import Scheduler
from minisgl_backend.step import StepPlan, StepTimes
from tests.fakes import FakePending, FakeRunner, Loop, make_request

STREAMS = 16
TOKEN_S = 22.5e-6  # of Qwen3-8B's prompts


class Machine(NamedTuple):
    """Seconds."""

    decode: float  # a step of the streams
    call: float  # a part of a layer of the encoder
    pair: float  # likewise, for each patch attended to: attention takes as long for one tile as for a few

    def times(self) -> StepTimes:
        calls = tuple((count * self.call, count * self.pair) for count in (1, 2, 3, 4))
        prompts = [(count, max(self.decode, 9e-4 + count * TOKEN_S)) for count in (0, 64, 128, 256, 512, 1024)]
        return StepTimes(prompts=tuple(prompts), rows=((1, 0.9 * self.decode), (32, 1.1 * self.decode)), encoder=calls)


H200, H100 = Machine(4.75e-3, 8e-5, 1.45e-8), Machine(5.4e-3, 8.5e-5, 1.5e-8)
QWEN3 = EncoderLimits(
    num_layers=27, capacity=2 << 30, vector_bytes=32768, state_bytes=20_000, patch_area=256,
    patch_cost=2.2e-3, pair_cost=5e-7, begin_cost=6e-4, plane_cost=1.5e-3, context_cost=6.4e-5,
    part_patches=1024, plane_layers=(8, 16, 24),
)  # fmt: skip
# Qwen2.5-VL's: attention stays in windows but for four layers.
QWEN25 = dataclasses.replace(QWEN3, num_layers=32, window=64, full_layers=(7, 15, 23, 31), plane_layers=())
SMALL = Content(start=16, length=64, digest=b"small" * 7, shape=(1, 256, 256, 3))
PHOTO = Content(start=16, length=11844, digest=b"photo" * 7, shape=(1, 3008, 4032, 3))


@pytest.mark.parametrize(
    ("machine", "encoder"),
    [
        pytest.param(H200, QWEN3, id="h200-qwen3-vl"),
        pytest.param(H100, QWEN25, id="h100-qwen2.5-vl"),
        pytest.param(H100, QWEN3, id="h100-qwen3-vl", marks=pytest.mark.full),
        pytest.param(H200, QWEN25, id="h200-qwen2.5-vl", marks=pytest.mark.full),
    ],
)
def test_steps_beside_a_photo_are_bounded_and_its_first_token_comes_soon(
    machine: Machine, encoder: EncoderLimits
) -> None:
    limits = limits_of(encoder, machine.times())
    loop = streams(limits, lambda plan: seconds(plan, machine, encoder))
    runner, scheduler = loop.runner, loop.scheduler
    prompt = make_request(STREAMS, [1] * 16 + [90] * PHOTO.length + [2] * 48, max_tokens=1)
    scheduler.add(msgspec.structs.replace(prompt, contents=(PHOTO,)))
    first = len(runner.plans)
    while STREAMS not in loop.records.tokens:
        loop.step()
    while sum(seconds(plan, machine, encoder) for plan in runner.plans[first:]) < 4.0:
        loop.step()  # until the next photo
    taken = np.array([seconds(plan, machine, encoder) for plan in runner.plans[first:]])
    assert all(len(plan.decode_rows) == STREAMS for plan in runner.plans[first:])
    assert 4.0 <= taken.sum() < 4.0 + machine.decode, "the first token has come before"
    assert np.percentile(taken, 99) <= 1.01 * (1 + BESIDE) * machine.decode
    assert taken.max() <= 1.2 * LONG_S


def limits_of(encoder: EncoderLimits, times: StepTimes, **changes: Any) -> SchedulerLimits:
    values: dict[str, Any] = {"max_prefill_length": 8192, "mixed_prefill_length": 768, **changes}
    return SchedulerLimits(
        page_size=64, num_pages=1000, max_seq_len=20_000, max_running_requests=32, max_waiting_requests=100,
        eos_token_ids=(), encoder=encoder, step_times=times, **values,
    )  # fmt: skip


class TimedRunner(FakeRunner):
    """Steps take what a function of their plan says."""

    now = 0.0  # seconds

    def __init__(self, limits: SchedulerLimits, taken: Callable[[StepPlan], float]) -> None:
        super().__init__(limits)
        self._taken = taken

    def execute(self, batch: StepPlan) -> FakePending:
        self.now += self._taken(batch)
        return super().execute(batch)


def streams(limits: SchedulerLimits, taken: Callable[[StepPlan], float], count: int = STREAMS) -> Loop:
    """That have decoded for some steps."""
    runner = TimedRunner(limits, taken)
    loop = Loop(Scheduler(limits, seed=0, clock=lambda: runner.now), runner, overlap=False, check=False)
    for uid in range(count):
        loop.scheduler.add(make_request(uid, [uid + 1] * 64, max_tokens=4000))
    while len(runner.plans) < 30:
        loop.step()
    return loop


def steps_to_first_token(loop: Loop, request: Request, most: int = 3000) -> int:
    loop.scheduler.add(request)
    for count in range(most):
        if request.uid in loop.records.tokens:
            return count
        loop.step()
    raise AssertionError(f"no token after {most} steps")


def asking(uid: int, content: Content, more: int, **params: Any) -> Request:
    """A prompt with so many tokens of text behind its image."""
    tokens = [1] * content.start + [90] * content.length + [2] * more
    return msgspec.structs.replace(make_request(uid, tokens, max_tokens=1, **params), contents=(content,))


def test_an_image_is_encoded_where_one_token_takes_more_than_images_may() -> None:
    times = StepTimes(prompts=((0, 0.1), (1, 0.151), (32, 0.1 + 32 * 0.051)), rows=((1, 0.1), (32, 0.1)))
    loop = streams(limits_of(QWEN3, times), lambda plan: 0.1, count=1)
    most = QWEN3.num_units(SMALL)
    assert steps_to_first_token(loop, asking(1, SMALL, 16)) <= most + SMALL.length // 32 + 3


def test_text_behind_the_last_image_is_computed_as_text_is() -> None:
    times, more = H200.times(), 12_000
    loop = streams(limits_of(QWEN3, times), lambda plan: seconds(plan, H200, QWEN3))
    text = steps_to_first_token(loop, make_request(100, [3] * more, max_tokens=1))
    alone = steps_to_first_token(loop, asking(101, SMALL, 1))
    other = msgspec.structs.replace(SMALL, digest=b"other" * 7)
    assert steps_to_first_token(loop, asking(102, other, more)) <= alone + text + 2


def test_images_of_a_batch_have_what_others_leave_of_a_step() -> None:
    limits = limits_of(QWEN3, H200.times(), background_slowdown=50.0)
    loop = streams(limits, lambda plan: seconds(plan, H200, QWEN3))
    first = len(loop.runner.plans)
    other = msgspec.structs.replace(PHOTO, digest=b"other" * 7)
    loop.scheduler.add(asking(101, other, 48, priority=1000))
    loop.scheduler.add(asking(100, PHOTO, 48))
    for _ in range(60):
        loop.step()
    found = loop.runner.plans[first:]
    assert {one.key for plan in found for one in plan.encode}, "images are encoded"
    assert max(seconds(plan, H200, QWEN3) for plan in found) <= 1.01 * (1 + BESIDE) * H200.decode


def test_images_have_a_share_of_what_steps_take_now() -> None:
    """Steps are four times as long as they were at start."""
    assert encoding_steps(4 * H200.decode) < encoding_steps(H200.decode) / 3


def encoding_steps(step_s: float) -> int:
    """That a photo takes where a step takes so many seconds."""
    loop = streams(limits_of(QWEN3, H200.times()), lambda plan: step_s)
    first = len(loop.runner.plans)
    steps_to_first_token(loop, asking(100, PHOTO, 48))
    return sum(bool(plan.encode) for plan in loop.runner.plans[first:])


@pytest.mark.parametrize("changes", [{"num_state_slots": 4}, {"chunk_multiple": 64}])
def test_images_whose_tokens_see_each_other_need_chunks_that_end_anywhere(changes: dict[str, int]) -> None:
    limits_of(QWEN3, H200.times(), **changes)
    with pytest.raises(ConfigError, match="num_state_slots"):
        limits_of(dataclasses.replace(QWEN3, bidirectional=True), H200.times(), **changes)


def seconds(plan: StepPlan, machine: Machine, encoder: EncoderLimits) -> float:
    costs = EncoderCosts(encoder, tuple((a / TOKEN_S, b / TOKEN_S) for a, b in machine.times().encoder))
    encoding = sum(costs.most(one.content, one.first, 1e9)[1] for one in plan.encode)
    encoding -= sum(costs.most(one.content, one.last, 1e9)[1] for one in plan.encode)
    chunk = sum(len(one.token_ids) for one in plan.prefill)
    context = sum(len(one.token_ids) * one.start * encoder.context_cost for one in plan.prefill)
    return max(machine.decode, 9e-4 + chunk * TOKEN_S) + TOKEN_S * (encoding + context)
