"""Measures a running server with perf_analyzer: writes its input, reads its reports.

Requests a second and latencies are perf_analyzer's own figures; what it does not report for streams (time to first
token, between tokens, tokens a second) is computed from the time stamps that it exports.
"""

from __future__ import annotations

import asyncio
import csv
import json
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..client import Client
from .figures import percentile
from .perf_analyzer import PerfAnalyzer, PerfAnalyzerError
from .workload import fit_prompt_maker, make_prompt

_MAX_PROMPTS = 2000


@dataclass(frozen=True)
class Workload:
    """The parameters of every request of a benchmark."""

    prompt_tokens: int  # approximate
    max_tokens: int
    stream: bool = True
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Prompts:
    """Prompts of about the requested length, and the server's token counts of one of them."""

    num_words: int
    num_input_tokens: int
    num_output_tokens: int

    def write(self, path: Path, count: int, concurrency: int, workload: Workload) -> None:
        """perf_analyzer's input file: `count` requests whose prompts differ from their first word on."""
        draw = random.Random(f"{workload.seed} {concurrency}")
        fixed = {"max_tokens": [workload.max_tokens], "stream": [workload.stream]}
        fixed |= {"temperature": [workload.temperature], "ignore_eos": [True]}
        steps = [{"text_input": [make_prompt(draw, self.num_words)], **fixed} for _ in range(count)]
        path.write_text(json.dumps({"data": steps}), encoding="utf-8")


@dataclass(frozen=True)
class Measurement:
    """One row of the table; times in milliseconds. The last five are None if nothing was streamed."""

    concurrency: int
    requests: int
    requests_per_s: float  # perf_analyzer's
    latency_p50: float  # perf_analyzer's
    latency_p99: float  # perf_analyzer's
    tokens_per_s: float  # of output, from the first request sent to the last response
    first_token_p50: float | None
    first_token_p99: float | None
    per_token_p50: float | None  # of the requests' means after the first token
    per_token_p99: float | None


def fit_prompts(client: Client, workload: Workload) -> Prompts:
    """Finds how many words give `prompt_tokens`, by the server's own counts; warms the server up, too.

    Raises the client's errors.
    """

    async def count(prompt: str) -> int | None:
        return client.generate(prompt, max_tokens=1, ignore_eos=True).num_input_tokens

    maker = asyncio.run(fit_prompt_maker(count, workload.prompt_tokens))
    num_words = maker.num_words(workload.prompt_tokens)
    whole = client.generate(
        make_prompt(random.Random(0), num_words), max_tokens=workload.max_tokens, temperature=0.0, ignore_eos=True
    )
    return Prompts(num_words, whole.num_input_tokens or 0, whole.num_output_tokens or workload.max_tokens)


def measure(
    analyzer: PerfAnalyzer,
    address: str,
    model: str,
    prompts: Prompts,
    workload: Workload,
    concurrency: int,
    requests: int,
    timeout: float,
) -> Measurement:
    """One run of perf_analyzer over gRPC (`address` is HOST:PORT). Raises PerfAnalyzerError."""
    with tempfile.TemporaryDirectory(prefix="minisgl-bench-") as directory:
        data, report, export = (Path(directory) / name for name in ("input.json", "report.csv", "export.json"))
        prompts.write(data, min(requests, _MAX_PROMPTS), concurrency, workload)
        arguments = ["-m", model, "-u", address, "-i", "grpc", "--async", "--streaming"]
        arguments += ["--concurrency-range", f"{concurrency}:{concurrency}", "--request-count", str(requests)]
        arguments += ["--input-data", str(data), "-f", str(report), "--profile-export-file", str(export)]
        output = analyzer.run(arguments, timeout)
        if not report.is_file() or not export.is_file():
            raise PerfAnalyzerError(f"perf_analyzer wrote no report: {output.strip().splitlines()[-1:]}")
        # Outputs that are not text stand in the export as raw bytes, so it may not be valid UTF-8.
        return read_reports(
            report.read_text(), export.read_text(errors="replace"), concurrency, prompts.num_output_tokens
        )


def read_reports(report: str, export: str, concurrency: int, tokens_per_request: int) -> Measurement:
    """perf_analyzer's CSV report and profile export of one concurrency -> a row."""
    rows = list(csv.DictReader(line for line in report.splitlines() if line.strip()))
    requests = json.loads(export, strict=False)["experiments"][0]["requests"]
    requests = [request for request in requests if request["response_timestamps"]]
    if not rows or not requests:
        raise PerfAnalyzerError(f"perf_analyzer finished no request at concurrency {concurrency}")
    starts = [request["timestamp"] for request in requests]
    stamps = [request["response_timestamps"] for request in requests]
    elapsed_s = (max(times[-1] for times in stamps) - min(starts)) / 1e9
    first = sorted((times[0] - start) / 1e6 for start, times in zip(starts, stamps, strict=True))
    streamed = any(len(times) > 1 for times in stamps) and tokens_per_request > 1
    per_token = sorted((times[-1] - times[0]) / 1e6 / (tokens_per_request - 1) for times in stamps) if streamed else []
    return Measurement(
        concurrency=concurrency,
        requests=len(requests),
        requests_per_s=float(rows[0]["Inferences/Second"]),
        latency_p50=float(rows[0]["p50 latency"]) / 1e3,
        latency_p99=float(rows[0]["p99 latency"]) / 1e3,
        tokens_per_s=len(requests) * tokens_per_request / elapsed_s,
        first_token_p50=percentile(first, 50) if streamed else None,
        first_token_p99=percentile(first, 99) if streamed else None,
        per_token_p50=percentile(per_token, 50) if streamed else None,
        per_token_p99=percentile(per_token, 99) if streamed else None,
    )
