"""Several benchmarks side by side: tables, and a picture."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..console import CommandError, FigureTable
from .report import Report, label_of, number

_FORMATS = ("svg", "png", "pdf")
COLORS = ("#1d5fc4", "#e0781a", "#3a8f4d", "#8e4fb5", "#7d848e")
MUTED = "#59636e"
STYLE: dict[str, Any] = {
    "svg.hashsalt": "minisgl",
    "svg.fonttype": "none",  # text stays text: small, sharp, and readable in a diff
    "font.size": 9.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e4e7eb",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
}
_Run = Mapping[str, Any]

# Row of a table -> path in a run's figures.
_ROWS: dict[str, tuple[str, ...]] = {
    "requests/s": ("requests_per_s",),
    "output tokens/s": ("output_tokens_per_s",),
    "failed": ("failed",),
    "first token p50 (ms)": ("ttft_ms", "p50"),
    "first token p99 (ms)": ("ttft_ms", "p99"),
    "between pieces p50 (ms)": ("between_ms", "p50"),
    "between pieces p99 (ms)": ("between_ms", "p99"),
    "a token after the first p50 (ms)": ("per_token_ms", "p50"),
    "a token after the first p99 (ms)": ("per_token_ms", "p99"),
    "whole answer p50 (ms)": ("e2e_ms", "p50"),
    "whole answer p99 (ms)": ("e2e_ms", "p99"),
    "tokens a step with drafts": ("speculation", "tokens_per_step"),
}
# Panel of the picture -> its lines: a label and the path.
_PANELS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "Output tokens a second": (("", ("output_tokens_per_s",)),),
    "First token (ms), dashed: p99": (("p50", ("ttft_ms", "p50")), ("p99", ("ttft_ms", "p99"))),
    "A token after the first (ms), dashed: p99": (("p50", ("per_token_ms", "p50")), ("p99", ("per_token_ms", "p99"))),
    "Whole answer (ms), dashed: p99": (("p50", ("e2e_ms", "p50")), ("p99", ("e2e_ms", "p99"))),
}
_X_LABELS = {"concurrency": "requests at once", "rate": "requests a second"}


def compare_reports(reports: Sequence[Report]) -> Iterator[FigureTable]:
    """A table for each run that all reports have. Raises ValueError if there is none."""
    names = names_of(reports)
    common = _common_loads(reports)
    for load in common:
        runs = [_named_runs(report)[load] for report in reports]
        rows = []
        for row, path in _ROWS.items():
            values = [_value(run, path) for run in runs]
            if any(value is not None for value in values):
                rows.append([row, *map(number, values), *(_ratio(value, values[0]) for value in values[1:])])
        yield FigureTable(load, ["", *names, *(f"{name} / {names[0]}" for name in names[1:])], rows)


def names_of(reports: Sequence[Report]) -> list[str]:
    """The reports' names, numbered if they occur twice."""
    names = [report.name for report in reports]
    return [name if names.count(name) == 1 else f"{name} ({place})" for place, name in enumerate(names, start=1)]


def draw_comparison(reports: Sequence[Report], out: Path) -> None:
    """Lines over the load if the reports share several loads of one kind, otherwise bars.

    Raises ValueError for another kind of file, CommandError without matplotlib.
    """
    if out.suffix.lstrip(".") not in _FORMATS:
        raise ValueError(f"--plot is {str(out)!r}; allowed: a file that ends in .{', .'.join(_FORMATS)}")
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
        figure_module: Any = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise CommandError("a picture needs matplotlib: pip install 'minisgl-backend[bench]'") from None
    loads = _common_loads(reports)
    kinds = {next(iter(_named_runs(reports[0])[load]["load"])) for load in loads}
    as_lines = len(loads) > 1 and len(kinds) == 1 and kinds <= set(_X_LABELS)
    with matplotlib.rc_context(STYLE):
        figure = figure_module.Figure(figsize=(10, 6.4), facecolor="white", layout="constrained")
        for axes, (title, lines) in zip(figure.subplots(2, 2).flat, _PANELS.items(), strict=True):
            axes.set_title(title if as_lines else title.split(",")[0])
            if as_lines:
                _draw_lines(axes, reports, loads, lines, _X_LABELS[kinds.copy().pop()])
            else:
                _draw_bars(axes, reports, loads, lines)
            axes.set_ylim(bottom=0)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
        try:
            figure.savefig(out, metadata={"Date": None, "Creator": "minisgl bench"} if out.suffix == ".svg" else None)
        except OSError as error:
            raise ValueError(f"{out} cannot be written: {error}") from None


def _draw_lines(
    axes: Any, reports: Sequence[Report], loads: Sequence[str], lines: Sequence[tuple[str, tuple[str, ...]]], x: str
) -> None:
    ticks: set[float] = set()
    for name, report, color in zip(names_of(reports), reports, _colors(reports), strict=True):
        runs = [_named_runs(report)[load] for load in loads]
        for style, (_, path) in zip(("-", "--"), lines, strict=False):
            points = [(next(iter(run["load"].values())), _value(run, path)) for run in runs]
            known = sorted((at, value) for at, value in points if value is not None)
            ticks |= {at for at, _ in known}
            text = name if style == "-" else None
            axes.plot(
                [at for at, _ in known], [value for _, value in known], style, color=color, marker="o", label=text
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ticks), [f"{tick:g}" for tick in sorted(ticks)])
    axes.minorticks_off()
    axes.margins(x=0.08)
    axes.set_xlabel(x)


def _draw_bars(
    axes: Any, reports: Sequence[Report], loads: Sequence[str], lines: Sequence[tuple[str, tuple[str, ...]]]
) -> None:
    groups = [(load, label, path) for load in loads for label, path in lines]
    thick = 0.8 / len(reports)
    for place, (name, report, color) in enumerate(zip(names_of(reports), reports, _colors(reports), strict=True)):
        heights = [_value(_named_runs(report)[load], path) or 0.0 for load, _, path in groups]
        at = [group + (place - (len(reports) - 1) / 2) * thick for group in range(len(groups))]
        bars = axes.bar(at, heights, 0.9 * thick, color=color, label=name)
        axes.bar_label(bars, [number(height) for height in heights], size=8, color=color)
    axes.set_xticks(range(len(groups)), [f"{label}\n{load}".strip() for load, label, _ in groups])
    axes.tick_params(length=0)


def _colors(reports: Sequence[Report]) -> list[str]:
    return [COLORS[place % len(COLORS)] for place in range(len(reports))]


def _common_loads(reports: Sequence[Report]) -> list[str]:
    """Names of the runs that all reports have, in the first one's order. Raises ValueError if there is none."""
    names = [list(_named_runs(report)) for report in reports]
    common = [name for name in names[0] if all(name in others for others in names[1:])]
    if not common:
        listed = "; ".join(f"{report.name}: {', '.join(of)}" for report, of in zip(reports, names, strict=True))
        raise ValueError(f"no run is in all files ({listed})")
    return common


def _named_runs(report: Report) -> dict[str, _Run]:
    """By label; repeated loads are numbered."""
    counts: Counter[str] = Counter()
    named: dict[str, _Run] = {}
    for run in report.runs:
        label = label_of(run["load"])
        counts[label] += 1
        named[label if counts[label] == 1 else f"{label} ({counts[label]})"] = run
    return named


def _value(run: _Run, path: Sequence[str]) -> float | None:
    value: Any = run
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, (int, float)) else None


def _ratio(value: float | None, basis: float | None) -> str:
    return "-" if value is None or not basis else f"{value / basis:.2f}"
