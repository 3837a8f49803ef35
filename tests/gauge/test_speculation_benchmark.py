"""The program that measures speculation on a GPU runs to its end without one, and what it counts is true."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from benchmarks import speculation_gpu

TINY = [
    *("--shape", "tiny", "--draft-shape", "tiny", "--answers-shape", "tiny", "--num-pages", "256"),
    *("--context", "24", "--tokens", "12", "--rounds", "2", "--batches", "1", "2", "--wrong-batches", "1", "4"),
    *("--streams", "4", "--stream-requests", "2", "--stream-prompt", "16", "--stream-tokens", "8"),
    *("--offline-requests", "6", "--answers", "6", "--answer-tokens", "12"),
]


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_every_part_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps that are padded as captured ones are."""
    monkeypatch.setenv("MINISGL_EAGER_GRAPHS", "1")
    parts = [part for part in speculation_gpu.PARTS if part != "mtp"]  # for which the shape has no layer
    speculation_gpu.main([*TINY, "--only", ",".join(parts)])
    found: list[dict[str, Any]] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    counts = Counter(one["figure"] for one in found)
    each = {"oracle": 8, "wrong": 2, "streams": 1, "offline": 1, "answers": 1}
    assert counts == {**each, "eagle3": 8, "eagle3_cost": 2, "draft_model": 8, "draft_model_cost": 2}
    delivered = {(one["figure"], one["batch"], one["drafts"]): one["delivered"] for one in found if "speedup" in one}
    for batch in (1, 2):
        assert delivered["oracle", batch, "all right"] >= delivered["oracle", batch, "about three delivered"] > 1
        assert delivered["oracle", batch, "all wrong, every draft verified"] == 1
        for method in ("eagle3", "draft_model"):
            assert delivered[method, batch, "about three delivered"] > 1
            assert delivered[method, batch, "no request speculates"] == 1
    (streams,) = (one for one in found if one["figure"] == "streams")
    assert streams["drafts"] > 0
    (answers,) = (one for one in found if one["figure"] == "answers")
    assert answers["answers"] == 6
    assert answers["delivered"] > 1
    assert answers["share_that_differs"] == answers["share_between_batches"] == 0, "the CPU computes in float32"
    assert all(set(held) <= {"at least", "at most", "met"} for one in found for held in one["bars"].values())
