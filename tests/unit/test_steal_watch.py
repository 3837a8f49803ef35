"""What the hypervisor took, by half second."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import steal_watch
from benchmarks.steal_watch import StealWatch


def test_moments_are_judged_by_the_half_second_they_lie_in(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([(10.0, 5, 100), (10.5, 5, 200), (11.0, 8, 300)])
    current = next(looks)
    monkeypatch.setattr(steal_watch.time, "monotonic", lambda: current[0])
    # user nice system idle iowait irq softirq steal guest guest_nice
    monkeypatch.setattr(
        Path, "read_text", lambda self: f"cpu  1 1 1 {current[2] - current[1] - 3} 0 0 0 {current[1]} 9 9"
    )
    watch = StealWatch()
    watch._look()
    for current in looks:  # noqa: B007  read by the two lambdas
        watch._look()
    moments = np.array([9.9, 10.0, 10.4, 10.6, 11.1])
    assert watch.undisturbed(moments).tolist() == [False, True, True, False, False]
    assert watch.percent == 100 * 3 / 200


@pytest.mark.parametrize(
    ("reads", "limit"), [([2_000_000_000, 0, 2_000_000_000], 0), ([2_000_000_000], None), ([5], 5), ([], None)]
)
def test_the_shortest_wake_up_time_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[int], limit: int | None
) -> None:
    device = tmp_path / "cpu_dma_latency"
    monkeypatch.setattr(steal_watch, "WAKE_UP_DEVICE", device)
    watch = StealWatch()
    watch._look()  # nobody may read it
    for value in reads:
        device.write_bytes(value.to_bytes(4, "little"))
        watch._look()
    assert watch.wake_up_limit_us == limit
