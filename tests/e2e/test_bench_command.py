"""`minisgl bench` against the real server: its ensemble, and the endpoint before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from client.cli import app
from tests.e2e.openai_stack import Endpoint
from tests.e2e.wire import Server

pytestmark = pytest.mark.e2e


@pytest.fixture(
    params=[
        "grpc",
        pytest.param("http", marks=pytest.mark.full),
        pytest.param("openai", marks=pytest.mark.full),
        "openai chat",
    ]
)
def target(request: pytest.FixtureRequest, server: Server, endpoint: Endpoint) -> list[str]:
    """The options that name the server."""
    return {
        "grpc": ["--url", f"127.0.0.1:{server.grpc}"],
        "http": ["--url", f"http://127.0.0.1:{server.http}", "--chat"],
        "openai": ["--openai", endpoint.url],
        "openai chat": ["--openai", endpoint.url, "--chat"],
    }[str(request.param)]


def measure(out: Path, *arguments: str) -> list[dict[str, Any]]:
    done = CliRunner().invoke(app, ["bench", *arguments, "--json", str(out)])
    assert done.exit_code == 0, done.output
    runs: list[dict[str, Any]] = json.loads(out.read_text())["runs"]
    return runs


def test_lengths_and_counts_are_the_servers(target: list[str], tmp_path: Path) -> None:
    load = ["--concurrency", "1,6", "--requests", "12", "--input-tokens", "200", "--output-tokens", "12-20"]
    for found in measure(tmp_path / "out.json", *target, *load):
        assert (found["completed"], found["failed"], found["counted_by"]) == (12, 0, "usage")
        assert found["input_tokens"]["mean"] == pytest.approx(200, rel=0.1)
        assert 12 <= found["output_tokens"]["mean"] <= found["output_tokens"]["max"] <= 20
        assert 0 < found["ttft_ms"]["p50"] < found["e2e_ms"]["p50"]


def test_a_trace(target: list[str], tmp_path: Path) -> None:
    trace, lengths = tmp_path / "trace.jsonl", (40, 300, 90)
    lines = [{"timestamp": at / 10, "input_length": length, "output_length": 10 + at} for at, length in
             enumerate(lengths)]  # fmt: skip
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = measure(tmp_path / "out.json", *target, "--trace", str(trace), "--warm-up", "1")
    assert (found["completed"], found["output_tokens"]["mean"]) == (3, 11)
    assert found["input_tokens"]["mean"] == pytest.approx(sum(lengths) / 3, rel=0.1)


def test_what_the_model_refuses_is_counted(target: list[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f'{{"timestamp": 0, "input_length": {n}, "output_length": 4}}\n' for n in (30, 9000)))
    (found,) = measure(tmp_path / "out.json", *target, "--trace", str(trace), "--warm-up", "0")
    assert (found["completed"], found["failed"]) == (1, 1)
    assert "4095" in next(iter(found["errors"])) or "4096" in next(iter(found["errors"]))
