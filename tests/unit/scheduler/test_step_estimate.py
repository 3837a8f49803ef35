"""The share of background requests on a machine whose steps take other times than they took at start."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from minisgl_backend.scheduler.background import LEFT_OUT, BackgroundShare
from minisgl_backend.scheduler.measured_steps import MeasuredSteps
from minisgl_backend.scheduler.step_estimate import LEAST_FACTOR, MOST_FACTOR, REMEMBERED, StepEstimate, StepLoad
from minisgl_backend.scheduler.step_plan_builder import StepPlanBuilder
from minisgl_backend.step import PrefillChunk, StepTimes

STREAMS, LINES = 8, 16
PROMPT, ANSWER = 32, 16  # tokens of a line
CONVERGED = 80  # steps, after which the share is what it should be


@dataclass
class Machine:
    """A step takes `first`, `row` for each row, `token` for each prompt token and `chunk` for each chunk; seconds."""

    first: float = 0.0085
    row: float = 0.00075
    token: float = 0.0002
    chunk: float = 0.0005
    noise: float = 0.05  # standard deviation, of a step's time
    outliers: float = 0.0  # of the steps, which take five times as long
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def seconds(self, rows: int, tokens: int, chunks: int) -> float:
        return self.first + self.row * rows + self.token * tokens + self.chunk * chunks

    def taken(self, rows: int, tokens: int, chunks: int) -> float:
        disturbed = 5.0 if self.chance.random() < self.outliers else self.chance.gauss(1.0, self.noise)
        return disturbed * self.seconds(rows, tokens, chunks)

    def timed(self, wrong: Callable[[], float] = lambda: 1.0) -> StepTimes:
        """`wrong`: how many times as long each of them took at start."""
        prompts = [(tokens, self.seconds(1, tokens, tokens > 0) * wrong()) for tokens in (0, 1, 32, 64)]
        rows = [(rows, self.seconds(rows, 0, 0) * wrong()) for rows in (1, 32)]
        return StepTimes(prompts=tuple(prompts), rows=tuple(rows))


class Batch:
    """Lines beside streams that decode in each step; a line's prompt may take several steps."""

    def __init__(self, machine: Machine, slowdown: float, times: StepTimes, most_streams: int = STREAMS) -> None:
        self.machine, self._first = machine, most_streams  # the row of the first line
        self.steps = MeasuredSteps(times)
        self.share = BackgroundShare(slowdown, self.steps.estimate)
        self._is_background = np.arange(most_streams + LINES) >= most_streams
        self.now, self.step, self.lines_done = 0.0, 0, 0
        self._prompts = [PROMPT] * LINES  # tokens to be computed
        self._answers = [ANSWER] * LINES

    def run(self, steps: int, streams: int = STREAMS) -> Iterator[tuple[int, int, float]]:
        """Of each step: background rows and tokens, and how many times as long it should take as without them."""
        for _ in range(steps):
            ready = [line for line in range(LINES) if not self._prompts[line]]
            most_rows, most_tokens = self.share.of_step(streams, 0, len(ready))
            rows, builder, tokens, chunks = ready[:most_rows], StepPlanBuilder(), 0, 0
            numbers = np.array([*range(streams), *(self._first + line for line in rows)], dtype=np.int32)
            builder.decode(numbers, numbers.astype(np.int64), numbers)
            for line in set(range(LINES)) - set(ready):
                part = min(most_tokens - tokens, self._prompts[line])
                if part > 0:
                    builder.add_chunk(PrefillChunk(self._first + line, 0, np.zeros(part, dtype=np.int32), 0))
                    self._prompts[line], tokens, chunks = self._prompts[line] - part, tokens + part, chunks + 1
            plan = builder.build(self.step)
            self.steps.note_plan(plan, self._is_background)
            self.now += self.machine.taken(streams + len(rows), tokens, chunks)
            self.steps.note_end(self.step, self.now)
            self.step += 1
            self._answer(rows)
            full, without = (
                self.machine.seconds(streams + len(rows), tokens, chunks),
                self.machine.seconds(streams, 0, 0),
            )
            yield len(rows), tokens, full / without

    def _answer(self, rows: list[int]) -> None:
        for line in rows:
            self._answers[line] -= 1
            if not self._answers[line]:
                self._prompts[line], self._answers[line] = PROMPT, ANSWER
                self.lines_done += 1


@pytest.mark.parametrize("slowdown", [1.5, 2.0])
@pytest.mark.parametrize("seed", [0, 2, 3, 8])
def test_steps_take_what_the_option_says_however_wrong_the_start_was(seed: int, slowdown: float) -> None:
    """Each time at start is up to 40% too long or too short, and one step of 50 is disturbed."""
    chance = random.Random(seed)
    machine = Machine(outliers=0.02, chance=chance)
    batch = Batch(machine, slowdown, machine.timed(lambda: chance.uniform(0.6, 1.4)))
    list(batch.run(CONVERGED))
    found = [(ratio, rows or tokens) for rows, tokens, ratio in batch.run(600)]
    ratios = [ratio for ratio, any_of_them in found if any_of_them]
    assert statistics.mean(ratios) == pytest.approx(slowdown, rel=0.06)
    assert np.percentile(ratios, 99) < 1.25 * slowdown
    assert len(found) - len(ratios) == pytest.approx(600 / LEFT_OUT, abs=1)


def test_without_noise_a_right_start_stays() -> None:
    machine = Machine(noise=0.0)
    batch = Batch(machine, 2.0, machine.timed())
    ratios = [ratio for rows, tokens, ratio in batch.run(200) if rows or tokens]
    assert 1.8 < min(ratios) <= max(ratios) < 2.1
    assert batch.lines_done / batch.now > 0.5 / machine.seconds(LINES, PROMPT, 1), "half of its speed alone"


@pytest.mark.parametrize("streams", [2, 12])
def test_the_share_follows_when_more_or_fewer_streams_run(streams: int) -> None:
    chance = random.Random(1)
    machine = Machine(chance=chance)
    batch = Batch(machine, 2.0, machine.timed(lambda: chance.uniform(0.6, 1.4)), most_streams=12)
    list(batch.run(CONVERGED))
    list(batch.run(REMEMBERED * LEFT_OUT, streams))
    ratios = [ratio for rows, tokens, ratio in batch.run(200, streams) if rows or tokens]
    assert statistics.mean(ratios) == pytest.approx(2.0, rel=0.06)


def test_the_share_follows_when_the_machine_gets_slower() -> None:
    """As when contexts grow."""
    machine = Machine()
    batch = Batch(machine, 2.0, machine.timed())
    list(batch.run(CONVERGED))
    machine.row *= 3
    list(batch.run(REMEMBERED * LEFT_OUT))
    ratios = [ratio for rows, tokens, ratio in batch.run(200) if rows or tokens]
    assert statistics.mean(ratios) == pytest.approx(2.0, rel=0.06)


@pytest.mark.parametrize("seconds", [0.0, 1e-6, 1e3])
def test_times_that_mean_nothing_leave_the_share_within_bounds(seconds: float) -> None:
    estimate = StepEstimate(Machine().timed())
    for step in range(500):
        estimate.note(StepLoad(step, 8, 0, *((4, 16) if step % 5 else (0, 0))), seconds)
    first = StepEstimate(Machine().timed())
    for found, before in (
        (estimate.alone(8, 0), first.alone(8, 0)),
        (estimate.row_part(8, 4), first.row_part(8, 4)),
        (estimate.prompt_part(16), first.prompt_part(16)),
    ):
        assert LEAST_FACTOR - 1e-9 <= found / before <= MOST_FACTOR + 1e-9


def test_background_requests_go_on_where_steps_take_much_longer_than_they_should() -> None:
    machine = Machine(row=0.1, noise=0.0)
    batch = Batch(machine, 1.1, Machine().timed())
    found = list(batch.run(20 * LEFT_OUT))
    having = [rows or tokens for rows, tokens, _ in found]
    assert having.count(0) == pytest.approx(20, abs=7)
    assert batch.lines_done


@pytest.mark.parametrize(
    "load", [StepLoad(1, 8, 5, 4, 0), StepLoad(1, 0, 0, 4, 0), StepLoad(1, 8, 0, 4, 0, is_plain=False)]
)
def test_steps_that_have_more_than_rows_and_a_background_say_nothing(load: StepLoad) -> None:
    estimate = StepEstimate(Machine().timed())
    estimate.note(StepLoad(0, 8, 0, 0, 0), Machine().seconds(8, 0, 0))
    before = estimate.alone(8, 0), estimate.row_part(8, 4)
    for _ in range(50):
        estimate.note(load, 1.0)
    assert (estimate.alone(8, 0), estimate.row_part(8, 4)) == before
