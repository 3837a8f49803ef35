"""How long a restart waits."""

from __future__ import annotations

from minisgl_backend.process.backoff import Backoff


def test_delays_grow_until_something_lives_long_enough() -> None:
    backoff = Backoff((0.0, 1.0, 5.0), stable_s=10.0)
    assert [backoff.next(lived_s) for lived_s in (0.0, 3.0, 10.0, 0.0, 10.1, 0.0)] == [0.0, 1.0, 5.0, 5.0, 0.0, 1.0]
