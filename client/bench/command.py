"""The command `minisgl bench` and its subcommand `compare`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..client import Client
from ..connection import parse_url
from ..console import CommandError, FigureTable, errors_in_one_line, print_figures, progress, say_error
from ..request import SamplingOptions
from ..server_options import ApiKey, ModelOfEither, OpenAIUrl
from .compare import compare_reports, draw_comparison
from .figures import Figures, figures_of
from .generator import allow_many_connections, run_load
from .perf_analyzer import find_perf_analyzer
from .perf_runs import Measurement, Prompts, Workload, fit_prompts, measure
from .report import Report, check_writable, describe_machine, duration, figures_table, label_of, number, write_json
from .speculation import fetch_draft_counts
from .targets import StreamClient, Target, openai_target, triton_target
from .trace import Arrival, read_trace
from .workload import (
    Lengths,
    Load,
    PromptMaker,
    closed_load,
    fit_prompt_maker,
    poisson_load,
    trace_load,
    warm_up_load,
)

bench_app = typer.Typer(invoke_without_command=True, add_completion=False, pretty_exceptions_enable=False)

_LEVELS = "1,8,32"
_INPUT_TOKENS, _OUTPUT_TOKENS = "128", "64"
_OPEN_REQUESTS = 100  # of a Poisson run
_WARM_UP = 8
_STOPPED = 130
# Fields that the benchmark sets in every request itself -> the command's option.
_OWN_OPTIONS = {
    "max_tokens": "--output-tokens",
    "max_completion_tokens": "--output-tokens",
    "model": "--model",
    "prompt": "--input-tokens",
    "messages": "--chat",
}


@bench_app.callback()
def bench(
    context: typer.Context,
    url: Annotated[
        str | None,
        typer.Option(help="Triton: HOST:PORT, or http://HOST:PORT; default: MINISGL_URL, else 127.0.0.1:8001."),
    ] = None,
    openai: OpenAIUrl = None,
    api_key: ApiKey = None,
    model: ModelOfEither = None,
    concurrency: Annotated[
        str | None, typer.Option(help=f"Requests in flight; several with commas: a run each; default: {_LEVELS}.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Requests a second that arrive at random (Poisson); several with commas.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Replay arrival times and lengths from this file of JSON lines.")
    ] = None,
    time_scale: Annotated[float, typer.Option(help="Multiplies the trace's times; 0.001 for milliseconds.")] = 1.0,
    input_tokens: Annotated[
        str | None,
        typer.Option("--input-tokens", "--prompt-tokens", help="Length of prompts, about: 128 (default), or 64-256."),
    ] = None,
    output_tokens: Annotated[
        str | None, typer.Option("--output-tokens", "--max-tokens", help="Length of answers: 64 (default), or 32-128.")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Of each run; default: 8 times the concurrency or 32; with --rate 100."),
    ] = None,
    warm_up: Annotated[
        int | None, typer.Option(min=0, help=f"Requests before each run that do not count; default: {_WARM_UP}.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of lengths, arrival times and words.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Prompts as chat messages, not as plain text.")] = False,
    ignore_eos: Annotated[
        bool, typer.Option(help="Answers of exactly the wanted length; not every server can.")
    ] = True,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Another sampling option of each request, as top_k=20; repeatable."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for one answer; with --perf-analyzer for one run.")] = 900.0,
    name: Annotated[str | None, typer.Option(help="What comparisons call these figures; default: the model.")] = None,
    output: Annotated[
        Path | None, typer.Option("--json", "--output", help="Also write the figures to this file, as JSON.")
    ] = None,
    perf_analyzer: Annotated[
        bool, typer.Option("--perf-analyzer", help="Measure with NVIDIA's perf_analyzer instead (Triton over gRPC).")
    ] = False,
    stream: Annotated[bool, typer.Option(help="With --perf-analyzer: streamed answers, or one response each.")] = True,
) -> None:
    """Measure a running server: throughput, time to the first token, between tokens, errors.

    Ctrl-C ends a run and shows what was measured. `minisgl bench compare A.json B.json` compares.
    """
    if context.invoked_subcommand is not None:
        return
    with errors_in_one_line():
        _check_together(url, openai, api_key, concurrency, rate, trace, time_scale)
        if output is not None:
            check_writable(output)
        if trace is not None:
            _check_alone("--trace", {"--input-tokens": input_tokens, "--output-tokens": output_tokens})
        inputs = Lengths.parse("--input-tokens", _INPUT_TOKENS if input_tokens is None else input_tokens)
        outputs = Lengths.parse("--output-tokens", _OUTPUT_TOKENS if output_tokens is None else output_tokens)
        levels = _parse_levels(_LEVELS if concurrency is None else concurrency)
        if perf_analyzer:
            others = {
                "--openai": openai, "--rate": rate, "--trace": trace, "--chat": chat or None,
                "--option": option or None, "--no-ignore-eos": None if ignore_eos else True, "--warm-up": warm_up,
                "--name": name,
            }  # fmt: skip
            _check_alone("--perf-analyzer", others)
            if inputs.low != inputs.high or outputs.low != outputs.high:
                raise ValueError("--perf-analyzer takes one length of prompts and one of answers, no ranges")
            if requests is not None and requests < max(levels):
                raise ValueError(f"--requests is {requests}; allowed: with --perf-analyzer at least --concurrency, "
                                 f"{max(levels)}")  # fmt: skip
            workload = Workload(inputs.low, outputs.low, stream, temperature, seed)
            _run_perf_analyzer(url, model or "ensemble", workload, levels, requests, timeout, output)
            return
        if not stream:
            raise ValueError("--no-stream goes with --perf-analyzer alone")
        rates = None if rate is None else _parse_rates(rate)
        arrivals = None
        if trace is not None:
            arrivals = read_trace(trace, limit=requests, time_scale=time_scale)
            # Shows times that were taken for another unit before they are waited for.
            typer.echo(f"trace {trace.name}: {len(arrivals):,} requests over {duration(arrivals[-1].at)}", err=True)
        options = _sampling_options(option, known_only=openai is None)
        options = {"temperature": temperature, **({"ignore_eos": True} if ignore_eos else {}), **options}
        if openai is None:
            target = triton_target(url, model or "ensemble", chat, timeout, options)
        else:
            target = openai_target(openai, api_key, model, chat, timeout, options)
        warm_up = _WARM_UP if warm_up is None else warm_up
        plan = _Plan(inputs, outputs, levels, rates, trace, arrivals, requests, warm_up, seed)
        allow_many_connections()
        runs = asyncio.run(_measure_all(target, plan))
        _finish(target, plan, runs, name, output)


@bench_app.command()
def compare(
    files: Annotated[list[Path], typer.Argument(help="What --json wrote, two files or more; the first is the basis.")],
    plot: Annotated[Path | None, typer.Option(help="Also draw a picture: .svg, .png or .pdf.")] = None,
) -> None:
    """Compare figures of several benchmarks, run by run."""
    with errors_in_one_line():
        if len(files) < 2:
            raise ValueError("one file is given; allowed: two or more")
        reports = [Report.read(file) for file in files]
        for table in compare_reports(reports):
            print_figures(table)
        if plot is not None:
            draw_comparison(reports, plot)
            typer.echo(f"wrote {plot}")


@dataclass(frozen=True)
class _Plan:
    """What to measure."""

    inputs: Lengths
    outputs: Lengths
    levels: Sequence[int]
    rates: Sequence[float] | None
    trace: Path | None
    arrivals: Sequence[Arrival] | None
    requests: int | None
    warm_up: int
    seed: int

    @property
    def longest_input(self) -> int:
        if self.arrivals is not None:
            return max(arrival.input_tokens for arrival in self.arrivals)
        return self.inputs.high

    def loads(self, maker: PromptMaker) -> Iterator[Load]:
        """One run after the other; their prompts are made just before."""
        if self.arrivals is not None and self.trace is not None:
            yield trace_load(self.trace.name, self.arrivals, maker, self.seed)
        elif self.rates is not None:
            for rate in self.rates:
                count = self.requests or _OPEN_REQUESTS
                yield poisson_load(rate, count, self.inputs, self.outputs, maker, self.seed)
        else:
            for level in self.levels:
                count = _requests_at(level, self.requests)
                yield closed_load(level, count, self.inputs, self.outputs, maker, self.seed)

    def about(self) -> dict[str, Any]:
        lengths = {"input_tokens": str(self.inputs), "output_tokens": str(self.outputs)}
        return {**({} if self.arrivals is not None else lengths), "warm_up": self.warm_up, "seed": self.seed}


async def _measure_all(target: Target, plan: _Plan) -> list[Figures]:
    """The figures of each run, up to one that Ctrl-C has stopped. Raises ClientError if the server accepts nothing."""
    found: list[Figures] = []
    async with target.connect() as client:
        with progress("finding out how long prompts are"):
            maker = await fit_prompt_maker(lambda prompt: _count(target, client, prompt), plan.longest_input)
        for load in plan.loads(maker):
            if plan.warm_up:
                with progress(f"{label_of(load.label)}: {plan.warm_up} requests to warm up"):
                    warmed = await run_load(target, client, warm_up_load(load, plan.warm_up, plan.seed), lambda: None)
                if warmed.interrupted:
                    break
            before = await fetch_draft_counts(client)
            with _bar(f"{label_of(load.label)}", len(load.questions)) as advance:
                run = await run_load(target, client, load, advance)
            after = await fetch_draft_counts(client)
            found.append(figures_of(run, None if after is None else after.since(before)))
            if run.interrupted:
                break
    return found


async def _count(target: Target, client: StreamClient, prompt: str) -> int | None:
    # Servers refuse a minimum length above the one token that is requested here.
    options = {name: value for name, value in target.options.items() if name != "min_tokens"}
    async with dataclasses.replace(target, options=options).ask(client, prompt, 1) as stream:
        return (await stream.result()).num_input_tokens


def _finish(target: Target, plan: _Plan, runs: Sequence[Figures], name: str | None, output: Path | None) -> None:
    """Shows and writes the figures, and exits with the matching status."""
    if not runs:
        raise KeyboardInterrupt
    print_figures(figures_table(runs, f"{target.model} at {target.url}"))
    for run in runs:
        for message, count in run.errors.items():
            say_error(f"[red]{label_of(run.load)}: {count:,} failed:[/red] {escape(message)}")
    if output is not None:
        server = {"kind": target.kind, "url": target.url, "model": target.model, "chat": target.chat}
        about = {
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "server": server,
            "options": target.options,
            **plan.about(),
            "machine": describe_machine(),
        }
        Report(name or target.model, about, [run.as_json() for run in runs]).write(output)
    if any(run.interrupted for run in runs):
        raise typer.Exit(_STOPPED)
    if not any(run.completed for run in runs):
        raise CommandError("no request was answered")


@contextlib.contextmanager
def _bar(text: str, total: int) -> Iterator[Any]:
    """A progress bar on a terminal, otherwise a line on stderr; yields a function that counts one more."""
    console = Console(stderr=True)
    if not console.is_terminal:
        typer.echo(f"{text}: {total} requests ...", err=True)
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as shown:
        task = shown.add_task(escape(text), total=total)
        yield lambda: shown.advance(task)


def _check_together(
    url: str | None,
    openai: str | None,
    api_key: str | None,
    concurrency: str | None,
    rate: str | None,
    trace: Path | None,
    time_scale: float,
) -> None:
    if url is not None and openai is not None:
        raise ValueError("--url and --openai are both given; allowed: one of them")
    loads = {"--concurrency": concurrency, "--rate": rate, "--trace": trace}
    given = [option for option, value in loads.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are given; allowed: one of {', '.join(loads)}")
    if not 0 < time_scale < float("inf"):
        raise ValueError(f"--time-scale is {time_scale:g}; allowed: above 0")
    if time_scale != 1 and trace is None:
        raise ValueError(f"--time-scale is {time_scale:g}; allowed: only with --trace")


def _check_alone(option: str, others: Mapping[str, object]) -> None:
    """Refuses options that have no effect together with `option`; None: not given."""
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise ValueError(f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} given; allowed: without {option}")


def _parse_levels(text: str) -> list[int]:
    levels = [int(part) for part in text.split(",") if part.strip().isdigit()]
    if len(levels) != len(text.split(",")) or min(levels, default=0) < 1:
        raise ValueError(f"--concurrency is {text!r}; allowed: whole numbers from 1 with commas between them")
    return levels


def _requests_at(level: int, requested: int | None) -> int:
    return max(32, 8 * level) if requested is None else requested


def _parse_rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise ValueError(f"--rate is {text!r}; allowed: numbers above 0 with commas between them")
    return rates


def _sampling_options(given: list[str] | None, known_only: bool) -> dict[str, Any]:
    """NAME=VALUE, the value as JSON or otherwise as text. Triton's client knows all names; other servers may take
    more."""
    options: dict[str, Any] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"--option is {text!r}; allowed: NAME=VALUE")
        if name in _OWN_OPTIONS:
            raise ValueError(f"--option is {text!r}; allowed: {_OWN_OPTIONS[name]} instead")
        if known_only and name not in SamplingOptions.__annotations__:
            allowed = ", ".join(sorted(SamplingOptions.__annotations__.keys() - _OWN_OPTIONS))
            raise ValueError(f"--option is {text!r}; allowed names: {allowed}")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def _run_perf_analyzer(
    url: str | None,
    model: str,
    workload: Workload,
    levels: Sequence[int],
    requests: int | None,
    timeout: float,
    output: Path | None,
) -> None:
    address = parse_url(url, "grpc")
    rows: list[Measurement] = []
    with Client(url, "grpc", model, timeout=timeout) as client:
        with progress("looking for perf_analyzer, which is fetched once"):
            analyzer = find_perf_analyzer()
        with progress("finding out how long prompts are"):
            prompts = fit_prompts(client, workload)
        try:
            for level in levels:
                count = _requests_at(level, requests)
                with progress(f"{count} requests, {level} at once"):
                    rows.append(measure(analyzer, address.authority, model, prompts, workload, level, count, timeout))
        finally:
            if rows:  # also rows from before an error or Ctrl-C
                print_figures(_perf_table(rows, prompts))
    if output is not None:
        figures = {"prompt_tokens": prompts.num_input_tokens, "output_tokens": prompts.num_output_tokens}
        content = {"tool": "perf_analyzer", **figures, "rows": [dataclasses.asdict(row) for row in rows]}
        write_json(output, content)


def _perf_table(rows: Sequence[Measurement], prompts: Prompts) -> FigureTable:
    return FigureTable(
        f"prompts of about {prompts.num_input_tokens} tokens, answers of {prompts.num_output_tokens}",
        ("concurrency", "requests", "req/s", "tokens/s", "latency", "first token", "per token"),
        [
            (
                str(row.concurrency),
                str(row.requests),
                f"{row.requests_per_s:,.2f}",
                f"{row.tokens_per_s:,.1f}",
                _pair(row.latency_p50, row.latency_p99),
                _pair(row.first_token_p50, row.first_token_p99),
                _pair(row.per_token_p50, row.per_token_p99),
            )
            for row in rows
        ],
        "Times: p50 / p99 in ms. req/s and latency are perf_analyzer's figures, the rest is from its export.",
        padding=0,
    )


def _pair(p50: float | None, p99: float | None) -> str:
    return "-" if p50 is None or p99 is None else f"{number(p50)} / {number(p99)}"
