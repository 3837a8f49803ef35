"""The path benchmark runs, and finds every stream right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl_backend.errors import ConfigError
from minisgl_backend.host.triton_server import find_triton_server

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("way", [pytest.param([], marks=pytest.mark.full), ["--openai"]], ids=["grpc", "openai"])
def test_every_stream_of_the_path_benchmark_is_right(way: list[str]) -> None:
    try:
        find_triton_server()
    except ConfigError as error:
        pytest.skip(f"no tritonserver: {error}")
    load = ["--streams", "20", "--rate", "200", "--seconds", "1", "--attempts", "1"]
    command = [sys.executable, "-m", "benchmarks.path", "--json", *load, *way]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    report = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, report["wrong_streams"]) == (0, 0), done.stderr[-3000:]
    assert report["tokens"] == 20 * 200
    assert report["tokens_per_response"] >= 1
    assert report["added_latency_ms"]["p99"] >= report["added_latency_ms"]["p50"] > 0
