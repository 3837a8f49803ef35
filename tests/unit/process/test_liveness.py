"""What signs of life say, and when their absence counts as a hang."""

from __future__ import annotations

import threading

import pytest

from minisgl_backend.process.liveness import LONG_S, PERIOD_S, Heartbeat, Liveness, Sign, wait_in_vain

HANG_S = 15.0


class Process:
    """A heartbeat that is looked at once in every second of a clock of its own."""

    def __init__(self, *, on_cpu: bool = False) -> None:
        self.heartbeat = Heartbeat(HANG_S)
        self.heartbeat.ready(on_cpu=on_cpu)
        self._now = 0.0

    def sign_after(self, seconds: float) -> Sign:
        for _ in range(int(seconds / PERIOD_S)):
            self._now += PERIOD_S
            self.heartbeat.look(self._now)
        return self.heartbeat.sign

    def sleep(self, seconds: float) -> None:
        self._now += seconds


def test_an_idle_process_is_well() -> None:
    process = Process()
    assert process.sign_after(1000) is Sign.WELL


def test_a_step_that_does_not_end_is_stuck_and_one_step_after_the_other_is_not() -> None:
    process = Process()
    with process.heartbeat.step():
        assert process.sign_after(HANG_S) is Sign.WELL
        assert process.sign_after(2) is Sign.STUCK
    assert process.sign_after(1) is Sign.WELL
    for _ in range(10):
        with process.heartbeat.step(), process.heartbeat.step():
            assert process.sign_after(HANG_S - 2) is Sign.WELL
        with process.heartbeat.step():  # a turn of a loop, of which a part is a step
            with process.heartbeat.step():
                process.sign_after(HANG_S - 2)
            assert process.sign_after(HANG_S - 2) is Sign.WELL
    with process.heartbeat.step():
        for _ in range(3):
            assert process.sign_after(HANG_S - 2) is Sign.WELL
            process.heartbeat.progress()


def test_a_start_and_its_first_steps_may_take_any_time() -> None:
    heartbeat = Heartbeat(HANG_S)
    with heartbeat.step(), heartbeat.waiting():
        signs = {heartbeat.look(float(second)) for second in range(10_000)}
    assert signs == {Sign.LOADING}


def test_a_kernel_may_take_minutes_to_compile_and_the_step_goes_on_after_it() -> None:
    process = Process()
    with process.heartbeat.step():
        process.sign_after(HANG_S - 2)
        process.heartbeat.compiling()
        assert process.sign_after(LONG_S) is Sign.LOADING
        process.heartbeat.compiled()
        assert process.sign_after(HANG_S) is Sign.WELL
        assert process.sign_after(2) is Sign.STUCK
        process.heartbeat.compiling()
        assert process.sign_after(LONG_S + 2) is Sign.STUCK
    process.heartbeat.compiling()  # outside of a step nobody waits for it
    assert process.sign_after(1) is Sign.WELL


def test_the_cpu_may_compute_for_minutes_but_not_wait_for_others() -> None:
    process = Process(on_cpu=True)
    with process.heartbeat.step():
        assert process.sign_after(LONG_S) is Sign.COMPUTING
        with process.heartbeat.waiting():
            assert process.sign_after(HANG_S) is Sign.WELL
            assert process.sign_after(2) is Sign.STUCK
        assert process.sign_after(LONG_S) is Sign.COMPUTING
        assert process.sign_after(2) is Sign.STUCK


def test_time_in_which_a_process_was_stopped_does_not_count() -> None:
    process = Process()
    with process.heartbeat.step():
        process.sign_after(2)
        process.sleep(10_000.0)
        assert process.sign_after(1) is Sign.WELL


def test_signs_are_given_on_a_thread() -> None:
    heard: list[Sign] = []
    twice = threading.Event()

    def hear(sign: Sign) -> None:
        heard.append(sign)
        if len(heard) == 3:
            twice.set()

    heartbeat = Heartbeat(HANG_S)
    heartbeat.start(hear)
    heartbeat.start()  # changes nothing
    heartbeat.ready(on_cpu=False)
    assert twice.wait(60)
    assert heard[0] is Sign.LOADING
    assert heard[2] is Sign.WELL


def silent_after(liveness: Liveness, seconds: float, start: float) -> bool:
    return [liveness.is_silent(start + second) for second in range(int(seconds) + 1)][-1]


def test_silence_is_a_hang_and_later_where_the_process_may_hold_the_interpreter() -> None:
    liveness = Liveness(HANG_S)
    assert not silent_after(liveness, LONG_S - 1, start=0.0), "it has not said anything yet"
    liveness.heard(b"ll.")
    assert not silent_after(liveness, HANG_S - 1, start=1000.0)
    liveness.heard(b".")
    assert silent_after(liveness, HANG_S, start=2000.0)
    liveness.heard(b"l")
    assert not silent_after(liveness, LONG_S - 1, start=3000.0)
    assert silent_after(liveness, 2, start=3000.0 + LONG_S)


def test_time_in_which_the_watcher_slept_does_not_count() -> None:
    liveness = Liveness(HANG_S)
    liveness.heard(b"s")
    liveness.is_silent(0.0)
    assert not liveness.is_silent(10_000.0)
    assert liveness.sign is Sign.STUCK


@pytest.mark.parametrize(
    ("signs", "hang"),
    [
        ([Sign.WELL, Sign.WELL], False),
        ([Sign.STUCK, Sign.STUCK], True),
        ([Sign.STUCK, Sign.WELL], True),  # the other is idle, or waits, too
        ([Sign.WELL, Sign.STUCK, Sign.WELL], True),
        ([Sign.STUCK, Sign.LOADING], False),  # it waits for one that compiles
        ([Sign.STUCK, Sign.COMPUTING, Sign.STUCK], False),
    ],
)
def test_ranks_hang_where_some_are_stuck_and_none_is_at_work(signs: list[Sign], hang: bool) -> None:
    assert wait_in_vain(signs) == hang
