"""The real perf_analyzer against the ensemble, where its binary is at hand (`minisgl bench` fetches it)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from client.bench.perf_analyzer import ENVIRONMENT_VARIABLE, PerfAnalyzer, find_perf_analyzer
from tests.e2e.wire import PATIENCE_SECONDS, Server

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def analyzer(monkeypatch_module: pytest.MonkeyPatch) -> PerfAnalyzer:
    def refuse(binary: Path) -> None:
        pytest.skip(f"no perf_analyzer: {binary} is missing; run `minisgl bench` once, or set {ENVIRONMENT_VARIABLE}")

    monkeypatch_module.setattr("client.bench.perf_analyzer._fetch", refuse)
    return find_perf_analyzer()


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def test_streams_are_measured_without_an_error(server: Server, analyzer: PerfAnalyzer, tmp_path: Path) -> None:
    entries = [{"text_input": [f"What is {n} + 4?"], "max_tokens": [8], "stream": [True]} for n in range(10, 20)]
    inputs = tmp_path / "inputs.json"
    inputs.write_text(json.dumps({"data": entries}))
    arguments = ["-m", "ensemble", "-u", f"127.0.0.1:{server.grpc}", "-i", "grpc", "--streaming", "--async"]
    arguments += ["--input-data", str(inputs), "--concurrency-range", "4", "--request-count", "40"]
    arguments += ["--shape", "text_input:1", "--shape", "max_tokens:1", "--shape", "stream:1"]
    report = analyzer.run(arguments, PATIENCE_SECONDS)
    assert "Throughput" in report
