"""The command `minisgl bench` and its subcommand `compare`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from minisgl_backend.host.options.commands import declared_options, with_options

from ..client import Client
from ..connection import parse_url
from ..console import CommandError, FigureTable, errors_in_one_line, print_figures, progress, say_error
from .compare import compare_reports, draw_comparison
from .figures import Figures, figures_of
from .generator import allow_many_connections, run_load
from .options import BenchOptions, Plan
from .perf_analyzer import find_perf_analyzer
from .perf_runs import Measurement, Prompts, Workload, fit_prompts, measure
from .pictures import Pictures
from .report import Report, check_writable, describe_machine, duration, figures_table, label_of, number, write_json
from .speculation import fetch_draft_counts
from .targets import StreamClient, Target
from .trace import read_trace
from .workload import Load, fit_prompt_maker, warm_up_load

bench_app = typer.Typer(invoke_without_command=True, add_completion=False, pretty_exceptions_enable=False)

_STOPPED = 130


@bench_app.callback()
@with_options("options", declared_options(BenchOptions), lambda values: BenchOptions(**values))
def bench(context: typer.Context, options: BenchOptions) -> None:
    """Measure a running server: throughput, time to the first token, between tokens, errors.

    Ctrl-C ends a run and shows what was measured. `minisgl bench compare A.json B.json` compares.
    """
    if context.invoked_subcommand is not None:
        return
    with errors_in_one_line():
        options.check()
        if options.output is not None:
            check_writable(options.output)
        if options.perf_analyzer:
            _run_perf_analyzer(options)
            return
        _ = options.rates  # refused before a trace is read
        arrivals = None
        if options.trace is not None:
            arrivals = read_trace(options.trace, limit=options.requests, time_scale=options.time_scale)
            # Shows times that were taken for another unit before they are waited for.
            over = duration(arrivals[-1].at)
            typer.echo(f"trace {options.trace.name}: {len(arrivals):,} requests over {over}", err=True)
        target, plan = options.target(), Plan(options, arrivals)
        allow_many_connections()
        _finish(target, plan, asyncio.run(_measure_all(target, plan)))


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


async def _measure_all(target: Target, plan: Plan) -> list[Figures]:
    """The figures of each run, up to one that Ctrl-C has stopped. Raises ClientError if the server accepts nothing."""
    found: list[Figures] = []
    async with target.connect() as client:
        with progress("finding out how long prompts are"):
            maker = await fit_prompt_maker(lambda prompt: _count(target, client, prompt), plan.longest_input)
        pictures = plan.options.pictures
        for bare in plan.loads(maker):
            load = _with_pictures(pictures, bare)
            if count := plan.options.warm_ups:
                with progress(f"{label_of(load.label)}: {count} requests to warm up"):
                    first = pictures.added(warm_up_load(load, count, plan.options.seed))
                    warmed = await run_load(target, client, first, lambda: None)
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


def _with_pictures(pictures: Pictures, load: Load) -> Load:
    if not pictures.count:
        return load
    with _bar(f"pictures of {label_of(load.label)}", len(load.questions)) as advance:
        return pictures.added(load, advance)


async def _count(target: Target, client: StreamClient, prompt: str) -> int | None:
    # Servers refuse a minimum length above the one token that is requested here.
    options = {name: value for name, value in target.options.items() if name != "min_tokens"}
    async with dataclasses.replace(target, options=options).ask(client, prompt, 1) as stream:
        return (await stream.result()).num_input_tokens


def _finish(target: Target, plan: Plan, runs: Sequence[Figures]) -> None:
    """Shows and writes the figures, and exits with the matching status."""
    if not runs:
        raise KeyboardInterrupt
    print_figures(figures_table(runs, f"{target.model} at {target.url}"))
    for run in runs:
        for message, count in run.errors.items():
            say_error(f"[red]{label_of(run.load)}: {count:,} failed:[/red] {escape(message)}")
    if plan.options.output is not None:
        server = {"kind": target.kind, "url": target.url, "model": target.model, "chat": target.chat}
        about = {
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "server": server,
            "options": target.options,
            **plan.about(),
            "machine": describe_machine(),
        }
        named = plan.options.name or target.model
        Report(named, about, [run.as_json() for run in runs]).write(plan.options.output)
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


def _run_perf_analyzer(options: BenchOptions) -> None:
    address, model = parse_url(options.url, "grpc"), options.model or "ensemble"
    workload = Workload(options.inputs.low, options.outputs.low, options.stream, options.temperature, options.seed)
    rows: list[Measurement] = []
    with Client(options.url, "grpc", model, timeout=options.timeout) as client:
        with progress("looking for perf_analyzer, which is fetched once"):
            analyzer = find_perf_analyzer()
        with progress("finding out how long prompts are"):
            prompts = fit_prompts(client, workload)
        try:
            for level in options.levels:
                count = options.requests_at(level)
                with progress(f"{count} requests, {level} at once"):
                    rows.append(
                        measure(analyzer, address.authority, model, prompts, workload, level, count, options.timeout)
                    )
        finally:
            if rows:  # also rows from before an error or Ctrl-C
                print_figures(_perf_table(rows, prompts))
    if options.output is not None:
        figures = {"prompt_tokens": prompts.num_input_tokens, "output_tokens": prompts.num_output_tokens}
        content = {"tool": "perf_analyzer", **figures, "rows": [dataclasses.asdict(row) for row in rows]}
        write_json(options.output, content)


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
