"""The load generator of `minisgl bench`: what it asks, when, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import pytest
from fake_openai import PIECES, TOKENS_PER_PIECE, Script
from typer.testing import CliRunner

from benchmarks import make_trace
from client.bench.figures import Figures, figures_of, spread
from client.bench.generator import Record, Run
from client.bench.report import Report, _caption, figures_table
from client.bench.speculation import DraftCounts, Speculation, fetch_draft_counts
from client.bench.trace import read_trace
from client.bench.workload import (
    Lengths,
    Load,
    PromptMaker,
    closed_load,
    fit_prompt_maker,
    poisson_load,
    trace_load,
    warm_up_load,
)
from client.cli import app
from client.errors import Unavailable
from client.metrics import Metrics, parse_metrics

ROOT = Path(__file__).parents[3]
TRACE = ROOT / "benchmarks" / "traces" / "online-1000.jsonl"
MAKER = PromptMaker(2.0, 4.0)
WAIT = 20.0


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def record(sent: float, deliveries: list[float], ended: float, **given: Any) -> Record:
    values = {"finished": True, "output_tokens": 5, "input_tokens": 9, **given}
    return Record(planned=sent, sent=sent, ended=ended, deliveries=array("d", deliveries), **values)


# --- what is asked


def test_lengths() -> None:
    assert Lengths.parse("--x", "128") == Lengths(128, 128)
    assert Lengths.parse("--x", "64-256") == Lengths(64, 256)
    drawn = {Lengths(3, 5).draw(random.Random(seed)) for seed in range(50)}
    assert drawn == {3, 4, 5}


def test_prompts_have_the_wanted_length_by_the_servers_count() -> None:
    async def count(prompt: str) -> int:
        return 11 + 3 * (len(prompt.split()) - 1)  # a number that is 11 tokens, words of three

    maker = asyncio.run(fit_prompt_maker(count, 500))
    for wanted in (32, 100, 500):
        assert abs(asyncio.run(count(maker.make(random.Random(0), wanted))) - wanted) <= 2


def test_a_server_without_counts_gets_a_word_a_token() -> None:
    async def count(prompt: str) -> None:
        return None

    maker = asyncio.run(fit_prompt_maker(count, 500))
    assert len(maker.make(random.Random(0), 40).split()) == 40


def test_the_seed_decides_everything_but_the_first_word() -> None:
    def words(load: Load) -> list[Any]:
        return [(one.prompt.split()[1:], one.output_tokens, one.at) for one in load.questions]

    lengths = Lengths(20, 60)
    first, second = (poisson_load(4.0, 50, lengths, lengths, MAKER, seed=3) for _ in range(2))
    assert words(first) == words(second) != words(poisson_load(4.0, 50, lengths, lengths, MAKER, seed=4))
    starts = [load.questions[0].prompt.split()[0] for load in (first, second)]
    assert starts[0] != starts[1]  # no cache has it


@pytest.mark.parametrize("kind", ["closed", "poisson"])
def test_every_server_gets_the_same_load(kind: str) -> None:
    """Whatever number of words a server needs for a length."""

    def load(maker: PromptMaker) -> Load:
        inputs, outputs = Lengths(20, 600), Lengths(4, 90)
        if kind == "closed":
            return closed_load(4, 50, inputs, outputs, maker, seed=3)
        return poisson_load(4.0, 50, inputs, outputs, maker, seed=3)

    first, second = (load(PromptMaker(per_word, 0.0)) for per_word in (1.0, 2.0))
    assert [(one.output_tokens, one.at) for one in first.questions] == [
        (one.output_tokens, one.at) for one in second.questions
    ]
    numbers = [[len(one.prompt.split()) for one in load.questions] for load in (first, second)]
    assert all(abs(one / 2 - two) <= 0.5 for one, two in zip(*numbers, strict=True))


def test_poisson_arrivals() -> None:
    load = poisson_load(5.0, 4000, Lengths(8, 8), Lengths(4, 4), MAKER, seed=0)
    times = [one.at for one in load.questions]
    assert load.concurrency is None
    assert times[0] == 0
    assert times == sorted(times)
    assert times[-1] == pytest.approx(4000 / 5.0, rel=0.1)
    slow = poisson_load(2.5, 4000, Lengths(8, 8), Lengths(4, 4), MAKER, seed=0)
    assert slow.questions[-1].at == pytest.approx(2 * times[-1])


def test_closed_loads_and_warm_ups() -> None:
    load = closed_load(3, 10, Lengths(8, 80), Lengths(4, 9), MAKER, seed=0)
    assert (load.concurrency, len(load.questions)) == (3, 10)
    warm_up = warm_up_load(load, 4, seed=0)
    assert (warm_up.concurrency, len(warm_up.questions)) == (3, 4)
    assert [len(one.prompt.split()) for one in warm_up.questions] == [
        len(one.prompt.split()) for one in load.questions[:4]
    ]
    assert warm_up_load(poisson_load(1.0, 5, Lengths(8, 8), Lengths(4, 4), MAKER, 0), 4, 0).concurrency == 4


# --- traces


def write_trace(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_trace_starts_at_zero_and_is_sorted(tmp_path: Path) -> None:
    lines = [
        '{"timestamp": 12.5, "input_length": 30, "output_length": 3, "chat_id": 7}',
        "",
        '{"timestamp": 10, "input_length": 20, "output_length": 2}',
    ]
    path = write_trace(tmp_path / "trace", *lines)
    arrivals = read_trace(path, time_scale=2.0)
    assert [(one.at, one.input_tokens, one.output_tokens) for one in arrivals] == [(0.0, 20, 2), (5.0, 30, 3)]
    assert len(read_trace(path, limit=1)) == 1
    load = trace_load("trace", arrivals, MAKER, seed=0)
    assert [(one.at, one.output_tokens) for one in load.questions] == [(0.0, 2), (5.0, 3)]
    assert [len(one.prompt.split()) for one in load.questions] == [8, 13]


GOOD = '{"timestamp": 0, "input_length": 1, "output_length": 1}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: no JSON"),
        ("[1, 2]", r"line 2: '\[1, 2\]'; allowed: a JSON object"),
        ('{"timestamp": 1, "input_length": 1}', "line 2: output_length is missing"),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1}', "line 2: timestamp is -1; allowed: seconds"),
        ('{"timestamp": "1", "input_length": 1, "output_length": 1}', "line 2: timestamp is '1'"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', "line 2: timestamp is nan"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "line 2: input_length is 0; allowed: a whole"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 2.5}', r"line 2: output_length is 2\.5"),
        ('{"timestamp": 1, "input_length": true, "output_length": 2}', "line 2: input_length is True"),
    ],
)
def test_a_wrong_trace_is_refused_by_line(tmp_path: Path, line: str, message: str) -> None:
    path = write_trace(tmp_path / "trace", GOOD, line)
    with pytest.raises(ValueError, match=message):
        read_trace(path)
    done = run("--trace", path)
    assert done.exit_code == 2
    assert f"{path}, line 2" in done.stderr


def test_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        read_trace(tmp_path / "absent")
    with pytest.raises(ValueError, match="holds no request"):
        read_trace(write_trace(tmp_path / "empty", ""))


def test_the_committed_trace_is_what_its_command_makes(tmp_path: Path) -> None:
    made = tmp_path / "trace"
    make_trace.main(["--requests", "1000", "--seed", "1", "--out", str(made)])
    assert made.read_bytes() == TRACE.read_bytes()
    arrivals = read_trace(TRACE)
    assert len(arrivals) == 1000
    assert max(one.input_tokens + one.output_tokens for one in arrivals) < 4000


# --- what is made of the answers


def test_figures() -> None:
    records = [
        record(10.0, [10.1, 10.2, 10.4], 10.5),
        record(10.0, [10.3, 10.5], 11.0, output_tokens=15),
        record(10.2, [], 10.3, finished=False, output_tokens=None, error="Unavailable: queue of 3 is full"),
        record(10.2, [], 10.4, finished=False, output_tokens=None, error="Unavailable: queue of 4 is full"),
        record(10.3, [10.4], 10.6, finished=False, output_tokens=None),
    ]
    found = figures_of(Run(Load({"concurrency": 2}, [], 2), records, interrupted=True))
    assert (found.sent, found.completed, found.failed, found.unfinished) == (5, 2, 2, 1)
    assert found.errors == {"Unavailable: queue of 3 is full": 2}
    assert found.seconds == pytest.approx(1.0)
    assert found.requests_per_s == pytest.approx(2.0)
    assert found.output_tokens_per_s == pytest.approx(20.0)
    assert found.input_tokens_per_s == pytest.approx(18.0)
    assert found.counted_by == "usage"
    assert (found.ttft_ms.p50, found.ttft_ms.p99) == (pytest.approx(100), pytest.approx(300))
    assert (found.between_ms.p50, found.between_ms.max) == (pytest.approx(200), pytest.approx(200))
    assert (found.per_token_ms.p50, found.per_token_ms.p99) == (pytest.approx(50), pytest.approx(100))
    assert (found.e2e_ms.p50, found.e2e_ms.max) == (pytest.approx(500), pytest.approx(1000))
    assert found.tokens_per_piece == pytest.approx(4.0)
    assert found.late_ms is None


def test_figures_without_the_servers_counts() -> None:
    run = Run(Load({"rate": 1.0}, []), [record(0.0, [1.0, 2.0], 2.0, output_tokens=None, input_tokens=None)], False)
    found = figures_of(run)
    assert (found.counted_by, found.output_tokens.mean, found.input_tokens) == ("pieces", 2, None)
    assert found.late_ms.max == 0


def test_tokens_of_the_first_piece_are_no_time_between_tokens() -> None:
    records = [
        record(0.0, [1.0], 1.001, output_tokens=64, first_tokens=64),  # in one piece
        record(0.0, [1.0], 1.001, output_tokens=64),  # and counted at the end alone
        record(0.0, [1.0, 1.4], 1.4, output_tokens=12, first_tokens=8),
        record(0.0, [1.0, 1.3], 1.3, output_tokens=4),
    ]
    found = figures_of(Run(Load({"concurrency": 2}, [], 2), records, False))
    assert (found.per_token_ms.p50, found.per_token_ms.max) == (pytest.approx(100), pytest.approx(100))
    assert "up to 24 a piece" in _caption([found])


def test_waits_begin_when_a_request_was_due() -> None:
    late = Record(planned=10.0, sent=10.5, ended=11.0, deliveries=array("d", [10.7]), output_tokens=1, finished=True)
    found = figures_of(Run(Load({"rate": 4.0}, []), [late], False))
    times = (found.ttft_ms.max, found.e2e_ms.max, found.late_ms.max)
    assert times == (pytest.approx(700), pytest.approx(1000), pytest.approx(500))


class _Speculating:
    """A server's pages of metrics, one after the other."""

    def __init__(self, *pages: str) -> None:
        self._pages = iter(pages)

    async def metrics(self) -> Metrics:
        try:
            return parse_metrics(next(self._pages))
        except StopIteration:
            raise Unavailable("no metrics") from None


def drafts_page(drafts: int, *positions: tuple[int, int]) -> str:
    """positions: tokens drafted and accepted."""
    lines = ["minisgl_engine_up 1", f"minisgl_drafts_total {drafts}"]
    for position, (drafted, accepted) in enumerate(positions, 1):
        lines.append(f'minisgl_draft_tokens_total{{position="{position}"}} {drafted}')
        lines += [f'minisgl_accepted_draft_tokens_total{{position="{position}"}} {accepted}'] if accepted else []
    return "\n".join(lines)


def test_drafts_of_a_run_come_from_the_servers_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("client.bench.speculation.SETTLE_S", 0.0)

    def counted(*pages: str) -> DraftCounts | None:
        return asyncio.run(fetch_draft_counts(_Speculating(*pages)))  # type: ignore[arg-type]

    assert counted() is None
    assert counted("vllm:something 3") is None
    assert counted("minisgl_engine_up 1", "minisgl_engine_up 1") is None
    before = counted("minisgl_engine_up 1", drafts_page(10, (10, 5)))
    after = counted("minisgl_engine_up 1", drafts_page(20, (20, 13), (4, 0)))
    assert after is not None
    assert after.since(after) is None
    assert DraftCounts(1, [1], [1]).since(after) is None  # the server has started anew
    found = after.since(before)
    assert found == Speculation(10, [10, 4], [8, 0], tokens_per_step=pytest.approx(1.8))
    run = Run(Load({"concurrency": 1}, [], 1), [record(0.0, [1.0], 2.0)], False)
    with_drafts, without = (figures_of(run, one) for one in (found, None))
    rows = {str(row[0]): row[1:] for row in figures_table([with_drafts, without], "").rows}
    assert rows["tokens a step with drafts"] == ["1.8", "-"]
    assert rows["accepted, by position (%)"] == ["80 / 0", "-"]
    assert not any("drafts" in str(row[0]) for row in figures_table([without], "").rows)


def test_figures_of_nothing() -> None:
    found = figures_of(Run(Load({"concurrency": 1}, [], 1), [], True))
    assert (found.sent, found.seconds, found.output_tokens_per_s, found.ttft_ms) == (0, 0, 0, None)


def test_percentiles_are_nearest_ranks() -> None:
    found = spread(list(range(1, 201)))
    assert (found.mean, found.p50, found.p90, found.p99, found.max) == (100.5, 100, 180, 198, 200)
    assert spread([7.0]).p99 == 7.0


# --- whole runs


def runs_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["runs"]


def test_openai_servers(openai_url: str, script: Script, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run("--openai", openai_url, "--concurrency", "1,4", "--requests", 8, "--json", out, "--option", "top_k=20",
               "--output-tokens", "3-6")  # fmt: skip
    assert done.exit_code == 0, done.output
    one, four = runs_of(out)
    assert [one["load"], four["load"]] == [{"concurrency": 1}, {"concurrency": 4}]
    for found in (one, four):
        assert (found["completed"], found["failed"], found["interrupted"]) == (8, 0, False)
        assert found["output_tokens"]["mean"] == TOKENS_PER_PIECE * len(PIECES)
        assert found["tokens_per_piece"] == TOKENS_PER_PIECE
        assert found["ttft_ms"]["p50"] > 0
    assert "4 at once" in done.stdout
    sent = [request for request in script.requests if request["max_tokens"] > 1]
    assert len({request["max_tokens"] for request in sent}) > 1
    assert {request["max_tokens"] for request in sent} <= {3, 4, 5, 6}
    assert all((request["top_k"], request["ignore_eos"], request["temperature"]) == (20, True, 0) for request in sent)
    assert json.loads(out.read_text())["server"]["model"] == "first"


def test_a_least_length_is_not_asked_of_probes(openai_url: str, script: Script) -> None:
    """A server refuses min_tokens above the one token that a probe asks for."""
    done = run("--openai", openai_url, "--concurrency", 1, "--requests", 2, "--option", "min_tokens=16")
    assert done.exit_code == 0, done.output
    probes = [request for request in script.requests if request["max_tokens"] == 1]
    assert probes
    assert all("min_tokens" not in request for request in probes)
    assert {request["min_tokens"] for request in script.requests if request["max_tokens"] > 1} == {16}


@pytest.mark.parametrize("more", [(), ("--perf-analyzer",)], ids=["own", "perf_analyzer"])
def test_a_file_that_cannot_be_written_is_refused_first(tmp_path: Path, more: tuple[str, ...]) -> None:
    """No server is asked: none is there."""
    done = run("--url", "127.0.0.1:1", "--json", tmp_path / "absent" / "x.json", *more)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "--json is" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_fewer_requests_than_would_be_in_flight(openai_url: str, script: Script, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run("--openai", openai_url, "--concurrency", 4, "--requests", 2, "--warm-up", 0, "--json", out)
    assert done.exit_code == 0, done.output
    assert (runs_of(out)[0]["sent"], sum(request["max_tokens"] > 1 for request in script.requests)) == (2, 2)


@pytest.mark.parametrize("load", [("--concurrency", 2), ("--rate", 200)], ids=["closed", "poisson"])
def test_more_requests_to_warm_up_than_count(openai_url: str, script: Script, load: tuple[str, int]) -> None:
    done = run("--openai", openai_url, *load, "--requests", 2, "--warm-up", 9)
    assert done.exit_code == 0, done.output
    assert "9 requests to warm up" in done.stderr
    assert sum(request["max_tokens"] > 1 for request in script.requests) == 11


def test_triton(url: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run("--url", url, "--rate", 200, "--requests", 20, "--json", out, "--chat")
    assert done.exit_code == 0, done.output
    assert (runs_of(out)[0]["completed"], runs_of(out)[0]["output_tokens"]["mean"]) == (20, 5)
    assert "200 a second" in done.stdout


def test_errors_are_counted_and_told(openai_url: str, script: Script, tmp_path: Path) -> None:
    script.failure, out = "refuse every third", tmp_path / "out.json"
    done = run("--openai", openai_url, "--concurrency", "2", "--requests", 12, "--warm-up", 0, "--json", out)
    assert done.exit_code == 0, done.output
    assert (runs_of(out)[0]["completed"], runs_of(out)[0]["failed"]) == (8, 4)
    assert list(runs_of(out)[0]["errors"].values()) == [4]
    assert "8, 4 failed" in done.stdout
    assert "2 at once: 4 failed: Unavailable: request 3: the queue is full" in done.stderr


def test_a_server_that_refuses_everything(openai_url: str, script: Script) -> None:
    script.failure = "html"
    done = run("--openai", openai_url)
    assert done.exit_code == 1
    assert "Unavailable: <html>Bad Gateway</html>" in done.stderr


def test_a_trace_is_replayed(openai_url: str, script: Script, tmp_path: Path) -> None:
    lines = [json.dumps({"timestamp": at, "input_length": 9, "output_length": at + 2}) for at in range(5)]
    path, out = write_trace(tmp_path / "my.jsonl", *lines), tmp_path / "out.json"
    done = run("--openai", openai_url, "--trace", path, "--time-scale", 0.05, "--warm-up", 0, "--json", out)
    assert done.exit_code == 0, done.output
    found = runs_of(out)[0]
    assert (found["load"], found["completed"]) == ({"trace": "my.jsonl"}, 5)
    assert found["seconds"] >= 0.15  # 0.2 by the plan
    assert [request["max_tokens"] for request in script.requests[-5:]] == [2, 3, 4, 5, 6]
    assert "trace my.jsonl: 5 requests over 0.2 s" in done.stderr


@pytest.mark.parametrize(
    ("milliseconds", "scale", "told"),
    [(3_599_999, 1.0, "1,000 h"), (3_599_999, 0.001, "60 min"), (61_000, 0.001, "61 s"), (0, 1.0, "0 s")],
)
def test_a_plan_shows_what_unit_the_times_were_taken_for(
    tmp_path: Path, milliseconds: int, scale: float, told: str
) -> None:
    """Mooncake's traces have milliseconds."""
    second = json.dumps({"timestamp": milliseconds, "input_length": 1, "output_length": 1})
    path = write_trace(tmp_path / "my.jsonl", GOOD, second)
    done = run("--openai", "127.0.0.1:1", "--model", "m", "--trace", path, "--time-scale", scale)
    assert done.stderr.splitlines()[0] == f"trace my.jsonl: 2 requests over {told}"


def test_ctrl_c_shows_what_was_measured(openai_url: str, script: Script, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "client", "bench", "--openai", openai_url, "--warm-up", "0", "--json", str(out)]
    process = subprocess.Popen(
        [*command, "--concurrency", "2", "--requests", "5000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ},
    )  # fmt: skip
    try:
        assert process.stderr is not None
        while "5000 requests" not in (line := process.stderr.readline()):
            assert line
        deadline = time.monotonic() + WAIT
        while len(script.requests) < 20:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        script.endless = True
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=WAIT)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "unfinished" in output
    assert "Traceback" not in errors
    found = runs_of(out)[0]
    assert found["interrupted"] is True
    assert found["completed"] >= 10
    assert found["failed"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--concurrency", "1,0"), "--concurrency is '1,0'; allowed: whole numbers from 1"),
        (("--rate", "0"), "--rate is '0'; allowed: numbers above 0"),
        (("--rate", "fast"), "--rate is 'fast'"),
        (("--rate", "4", "--concurrency", "2"), "--concurrency and --rate are given; allowed: one of"),
        (("--input-tokens", "9-3"), "--input-tokens is '9-3'; allowed: tokens, as 128 or 64-256"),
        (("--output-tokens", "0"), "--output-tokens is '0'"),
        (("--url", "a:1", "--openai", "b:2"), "--url and --openai are both given"),
        (("--time-scale", "0"), "--time-scale is 0; allowed: above 0"),
        (("--time-scale", "2", "--rate", "4"), "--time-scale is 2; allowed: only with --trace"),
        (("--option", "top_k"), "--option is 'top_k'; allowed: NAME=VALUE"),
        (("--option", "topk=3"), "--option is 'topk=3'; allowed names: add_special_tokens"),
        (("--option", "max_tokens=5"), "--option is 'max_tokens=5'; allowed: --output-tokens instead"),
        (("--openai", "b:2", "--option", "prompt=x"), "--option is 'prompt=x'; allowed: --input-tokens instead"),
        (("--no-stream",), "--no-stream goes with --perf-analyzer alone"),
        (("--trace", str(TRACE), "--input-tokens", "9"), "--input-tokens is given; allowed: without --trace"),
        (("--trace", str(TRACE), "--output-tokens", "9"), "--output-tokens is given; allowed: without --trace"),
        (("--perf-analyzer", "--rate", "4"), "--rate is given; allowed: without --perf-analyzer"),
        (("--perf-analyzer", "--chat", "--option", "top_k=1"), "--chat, --option are given; allowed: without --perf"),
        (("--perf-analyzer", "--no-ignore-eos"), "--no-ignore-eos is given; allowed: without --perf-analyzer"),
        (("--perf-analyzer", "--warm-up", "8"), "--warm-up is given; allowed: without --perf-analyzer"),
        (("--perf-analyzer", "--name", "ours"), "--name is given; allowed: without --perf-analyzer"),
        (("--perf-analyzer", "--input-tokens", "3-4"), "no ranges"),
        (("--perf-analyzer", "--requests", "2", "--concurrency", "1,4"), "--requests is 2; allowed: with --perf-analy"),
    ],
)
def test_wrong_options(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


# --- comparisons


def written(path: Path, name: str, factor: float, loads: list[dict[str, Any]]) -> Path:
    runs: list[Figures] = []
    for number, load in enumerate(loads, start=1):
        records = [record(0.0, [0.1 * factor, 0.2 * factor * number], 0.3 * factor) for _ in range(number)]
        runs.append(figures_of(Run(Load(load, [], 1), records, False)))
    Report(name, {"seed": 0}, [one.as_json() for one in runs]).write(path)
    return path


LEVELS = [{"concurrency": 1}, {"concurrency": 8}]


def test_comparisons_are_of_the_runs_that_all_have(tmp_path: Path) -> None:
    ours = written(tmp_path / "a", "ours", 1.0, [*LEVELS, {"concurrency": 32}])
    theirs = written(tmp_path / "b", "theirs", 2.0, LEVELS)
    done = run("compare", ours, theirs)
    assert done.exit_code == 0, done.output
    assert "8 at once" in done.stdout
    assert "32 at once" not in done.stdout
    row = next(line for line in done.stdout.splitlines() if "first token p50" in line)
    assert row.split()[-3:] == ["100", "200", "2.00"]


def test_runs_of_one_load_are_compared_one_by_one(tmp_path: Path) -> None:
    twice = [{"concurrency": 8}, {"concurrency": 8}]
    ours, theirs = written(tmp_path / "a", "ours", 1.0, twice), written(tmp_path / "b", "theirs", 2.0, twice)
    done = run("compare", ours, theirs)
    assert done.exit_code == 0, done.output
    assert "8 at once\n" in done.stdout
    assert "8 at once (2)\n" in done.stdout
    rows = [line for line in done.stdout.splitlines() if "between pieces p50" in line]
    assert [row.split()[-3:] for row in rows] == [["100", "200", "2.00"], ["300", "600", "2.00"]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "cannot be read as JSON"),
        ("{}", "holds no figures to compare"),
        ('{"tool": "perf_analyzer", "rows": [{}]}', "allowed: what minisgl bench --json wrote without --perf-ana"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    good, bad = written(tmp_path / "good", "good", 1.0, LEVELS), tmp_path / "bad"
    bad.write_text(content)
    done = run("compare", good, bad)
    assert (done.exit_code, message in done.stderr) == (2, True)
    assert run("compare", good).exit_code == 2
    nothing = run("compare", good, written(tmp_path / "other", "other", 1.0, [{"rate": 1.0}]))
    assert "no run is in all files (good: 1 at once, 8 at once; other: 1 a second)" in nothing.stderr


@pytest.mark.parametrize("loads", [LEVELS, [{"trace": "t"}], 2 * LEVELS], ids=["lines", "bars", "again"])
def test_a_picture(tmp_path: Path, loads: list[dict[str, Any]]) -> None:
    pytest.importorskip("matplotlib")
    files = [written(tmp_path / name, name, factor, loads) for name, factor in (("ours", 1.0), ("theirs", 2.0))]
    for name in ("first.svg", "second.svg"):
        done = run("compare", *files, "--plot", tmp_path / name)
        assert done.exit_code == 0, done.output
    svg = (tmp_path / "first.svg").read_text()
    assert svg == (tmp_path / "second.svg").read_text()
    assert all(text in svg for text in ("ours", "theirs", "First token (ms)"))


def test_a_picture_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    files = [written(tmp_path / name, name, 1.0, LEVELS) for name in ("a", "b")]
    done = run("compare", *files, "--plot", tmp_path / "out.svg")
    assert (done.exit_code, "pip install 'minisgl-backend[bench]'" in done.stderr) == (1, True)
    wrong = run("compare", *files, "--plot", tmp_path / "out.txt")
    assert (wrong.exit_code, "allowed: a file that ends in .svg" in wrong.stderr) == (2, True)
