"""Finding perf_analyzer, writing its input, reading its reports."""

from __future__ import annotations

import json
import random
import stat
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from client import Client
from client.bench.figures import percentile
from client.bench.perf_analyzer import ENVIRONMENT_VARIABLE, PerfAnalyzer, PerfAnalyzerError, find_perf_analyzer
from client.bench.perf_runs import Prompts, Workload, fit_prompts, measure, read_reports
from client.bench.workload import make_prompt
from client.cli import app

REPORT = (
    "Concurrency,Inferences/Second,Response Throughput,Client Send,p50 latency,p90 latency,p95 latency,p99 latency\n"
    "2,39.7875,795.75,0,72101,74696,135585,138113\n"
)


def _script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def _export(requests: list[tuple[int, list[int]]]) -> str:
    records = [{"timestamp": start, "response_timestamps": stamps} for start, stamps in requests]
    return json.dumps({"experiments": [{"requests": records}], "version": "2.48.0"})


def test_reports_become_a_row() -> None:
    ms = 1_000_000
    export = _export([(0, [10 * ms, 20 * ms, 30 * ms]), (5 * ms, [25 * ms, 45 * ms, 65 * ms])])
    row = read_reports(REPORT, export, concurrency=2, tokens_per_request=5)
    assert (row.requests, row.requests_per_s, row.latency_p50, row.latency_p99) == (2, 39.7875, 72.101, 138.113)
    assert row.tokens_per_s == pytest.approx(10 / 0.065)
    assert (row.first_token_p50, row.first_token_p99) == (10, 20)
    assert (row.per_token_p50, row.per_token_p99) == (5, 10)


def test_one_response_a_request_has_no_token_times() -> None:
    row = read_reports(REPORT, _export([(0, [10]), (0, [12])]), 2, 5)
    assert row.first_token_p50 is None
    assert row.per_token_p99 is None


def test_no_finished_request_is_an_error() -> None:
    with pytest.raises(PerfAnalyzerError, match="no request at concurrency 2"):
        read_reports(REPORT, _export([(0, [])]), 2, 5)


def test_percentile() -> None:
    values = list(range(1, 101))
    assert (percentile(values, 50), percentile(values, 99), percentile([7.0], 99)) == (50, 99, 7.0)


def test_prompts_differ_from_the_first_word(tmp_path: Path) -> None:
    path = tmp_path / "input.json"
    Prompts(6, 10, 4).write(path, 20, 1, Workload(10, 4))
    steps = json.loads(path.read_text())["data"]
    prompts = [step["text_input"][0] for step in steps]
    assert len({prompt.split()[0] for prompt in prompts}) == 20
    assert {len(prompt.split()) for prompt in prompts} == {6}
    assert all(step["max_tokens"] == [4] and step["stream"] == [True] for step in steps)


def test_seed_and_temperature_reach_the_input(tmp_path: Path) -> None:
    path = tmp_path / "input.json"

    def words(workload: Workload) -> list[list[str]]:
        Prompts(6, 10, 4).write(path, 20, 2, workload)
        steps = json.loads(path.read_text())["data"]
        assert all(step["temperature"] == [workload.temperature] for step in steps)
        return [step["text_input"][0].split()[1:] for step in steps]

    first = Workload(10, 4, temperature=0.7, seed=1)
    assert words(first) == words(first) != words(Workload(10, 4, seed=2))


def test_prompt_length_is_fitted_by_the_servers_counts(client: Client) -> None:
    prompts = fit_prompts(client, Workload(prompt_tokens=50, max_tokens=5))
    assert prompts.num_output_tokens == 5
    assert len(make_prompt(random.Random(0), prompts.num_words).split()) == prompts.num_words


@pytest.fixture
def scripted(tmp_path: Path) -> Path:
    """A perf_analyzer that writes the same reports in every run, and copies its input to input.json beside itself."""
    report, export = tmp_path / "report", tmp_path / "export"
    report.write_text(REPORT)
    export.write_text(_export([(0, [10, 20])]))
    body = f"""
    while [ $# -gt 0 ]; do
      case "$1" in
        -f) cp {report} "$2";;
        --profile-export-file) cp {export} "$2";;
        --input-data) cp "$2" {tmp_path}/input.json;;
      esac; shift
    done
    """
    return _script(tmp_path / "perf_analyzer", body)


def test_measure_runs_the_binary_once(scripted: Path) -> None:
    analyzer = PerfAnalyzer(scripted)
    row = measure(analyzer, "127.0.0.1:1", "ensemble", Prompts(3, 4, 5), Workload(4, 5), 2, 4, timeout=30)
    assert (row.concurrency, row.requests) == (2, 1)


def test_the_command(grpc_url: str, scripted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(scripted))
    arguments = ["--url", grpc_url, "--perf-analyzer", "--concurrency", "1", "--temperature", "0.5"]
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "input.json").read_text())["data"][0]["temperature"] == [0.5]


@pytest.mark.parametrize(
    ("body", "timeout", "message"),
    [
        ("echo 'error: failed to reach it'; echo more; exit 1", 30.0, "^perf_analyzer: error: failed to reach it$"),
        ("exit 3", 30.0, "^perf_analyzer: exit status 3$"),
        ("exec sleep 30", 0.2, r"^perf_analyzer did not end within 0\.2 s$"),
    ],
)
def test_failures_take_one_line(tmp_path: Path, body: str, timeout: float, message: str) -> None:
    with pytest.raises(PerfAnalyzerError, match=message):
        PerfAnalyzer(_script(tmp_path / "perf_analyzer", body)).run([], timeout=timeout)


def test_the_named_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = _script(tmp_path / "mine", "echo 'Perf Analyzer Version 9'")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(binary))
    assert find_perf_analyzer().binary == binary
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(PerfAnalyzerError, match="absent does not run here"):
        find_perf_analyzer()


def test_the_one_on_path_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    binary = _script(tmp_path / "perf_analyzer", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_perf_analyzer().binary == binary


@pytest.fixture
def lonely(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A supported machine without any perf_analyzer; its pip runs the script in the returned path."""
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    pip = tmp_path / "python"
    monkeypatch.setattr("sys.executable", str(pip))
    return pip


def test_it_is_fetched_once(lonely: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "tritonclient-2.48.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tritonclient-2.48.0.data/data/bin/perf_analyzer", "#!/bin/sh\nexit 0\n")
    _script(lonely, f'while [ "$1" != --dest ]; do shift; done; cp {wheel} "$2"')
    first = find_perf_analyzer(tmp_path / "cache")
    _script(lonely, "exit 1")
    assert find_perf_analyzer(tmp_path / "cache") == first
    assert first.run(["--version"], timeout=10) == ""


def test_no_network(lonely: Path, tmp_path: Path) -> None:
    _script(lonely, "echo 'ERROR: no such host' >&2; exit 1")
    with pytest.raises(PerfAnalyzerError, match="ERROR: no such host") as caught:
        find_perf_analyzer(tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_missing_libraries_are_explained(lonely: Path, tmp_path: Path) -> None:
    binary = tmp_path / "cache" / "perf_analyzer-2.48.0" / "perf_analyzer"
    binary.parent.mkdir(parents=True)
    _script(binary, "echo 'error while loading shared libraries: libb64.so.0d: cannot open' >&2; exit 127")
    with pytest.raises(PerfAnalyzerError, match="pip install nvidia-pytriton"):
        find_perf_analyzer(tmp_path / "cache")


def test_other_machines(lonely: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(PerfAnalyzerError, match="x86-64 only"):
        find_perf_analyzer(tmp_path)
