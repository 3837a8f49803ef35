"""Embeddings of SmolLM2 beside sentence-transformers: equal, and as fast. Processor time of one thread each, which
other work on the machine changes little."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.embeddings import compare
from tests.environments import environment_behind
from tests.real.models import smollm2

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]


def test_embeddings_beside_sentence_transformers(tmp_path: Path) -> None:
    python = environment_behind(tmp_path / "peer", "sentence-transformers")
    found = compare(str(smollm2()), rounds=1, threads=1, peer_python=str(python), batch_sizes=(1, 4))
    print(found)
    assert found["difference"] < 1e-4
    assert found["processor_ratio"] >= 0.9, found
