"""What tests with a real server take for metrics in which all is counted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tests.e2e import wire

LATENCIES_EVERY_S = 1.0
IDLE = {"minisgl_requests_running": 0.0, "minisgl_requests_waiting": 0.0}


class Clock:
    """Time passes in sleep alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(wire, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep))
    return clock


def settled(monkeypatch: pytest.MonkeyPatch, metrics: Callable[[], dict[str, float]]) -> dict[str, float]:
    monkeypatch.setattr(wire.Server, "metrics", lambda self: metrics())
    return wire.Server(http=0, grpc=0, metrics_port=0, process_id=0).settled_metrics()


def test_what_a_late_report_counts_is_in_them(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    late = 2 * LATENCIES_EVERY_S
    found = settled(monkeypatch, lambda: {**IDLE, "count": float(clock.now > late)})
    assert found["count"] == 1.0
    assert clock.now > late + LATENCIES_EVERY_S


def test_what_still_runs_or_waits_is_awaited(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence may stand still for longer than any report takes."""
    for name in IDLE:
        until = clock.now + 50 * LATENCIES_EVERY_S
        settled(monkeypatch, lambda name=name, until=until: {**IDLE, name: float(clock.now < until)})
        assert clock.now > until


@pytest.mark.parametrize("busy", [{"minisgl_requests_running": 1.0}, {"minisgl_requests_waiting": 1.0}])
def test_what_never_ends_fails(clock: Clock, monkeypatch: pytest.MonkeyPatch, busy: dict[str, float]) -> None:
    with pytest.raises(AssertionError, match="never settled"):
        settled(monkeypatch, lambda: {**IDLE, **busy})


def test_what_never_stands_still_fails(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    count = itertools.count()
    with pytest.raises(AssertionError, match="never settled"):
        settled(monkeypatch, lambda: {**IDLE, "count": float(next(count))})


def test_a_page_without_metrics_is_none(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="never settled"):
        settled(monkeypatch, dict)
