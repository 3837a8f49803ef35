"""Draws what benchmarks.gpu measured on one GPU, beside peers and what the hardware allows, as one SVG.

    python -m benchmarks.plot benchmarks/results/h200-2026-11-22-25505ff.json [--out docs/performance.svg]

Peers' figures and floors come from benchmarks/results/peers.json, under the names of benchmarks.gpu. A panel or a bar
without figures is left out. The same figures give the same bytes, so that a picture's diff is that of its figures.
Needs matplotlib: pip install -e '.[bench]'
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.comparison import PEERS, Comparison, System
from client.bench.compare import MUTED
from client.bench.compare import STYLE as SHARED_STYLE

OWN_COLOR, LIMIT_COLOR, PEER_COLORS = "#1d5fc4", "#7d848e", ("#e0781a", "#3a8f4d", "#8e4fb5")
DASHES = (0, (4, 2))
TEXT = "#1f2328"
WIDTH, HEAD, ABOVE, BELOW = 11.0, 0.75, 0.4, 0.6  # inches: the picture; its head; around the axes of a row
LINES, BAR = 2.1, 0.42  # inches: height of axes with lines; of a group of bars
# The options of benchmarks.gpu's part `sampling`, as requests spell them.
SAMPLING_LABELS = {
    "greedy": "greedy",
    "temperature": "temperature 0.6",
    "top_k": "top_k 20",
    "top_p": "top_p 0.95",
    "qwen3": "top_k and top_p",
    "min_p": "min_p 0.05",
    "repetition": "repetition 1.1",
    "presence": "presence 0.5",
    "logprobs": "logprobs 5",
    "bias": "logit_bias",
}
STYLE: dict[str, Any] = {
    **SHARED_STYLE,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],  # the widest first: with another one, labels only shrink
    "text.color": TEXT,
    "axes.titlepad": 10,
    "axes.grid": False,
}


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    width: float  # as a share of its row
    labels: float  # inches on its left
    draw: Callable[[Any], None]
    height: float = LINES  # inches, of the axes alone


def make_figure(comparison: Comparison) -> Any:
    """The picture, a matplotlib Figure. Raises SystemExit without matplotlib."""
    matplotlib = _matplotlib()
    rows = _arrange(comparison)
    heights = [max(_stack_height(column) for column in row) for row in rows]
    height = HEAD + sum(heights) + (ABOVE + BELOW) * len(rows)
    with matplotlib.rc_context(STYLE):
        figure = matplotlib.figure.Figure(figsize=(WIDTH, height), facecolor="white")
        _draw_head(figure, comparison)
        top = height - HEAD
        for row, row_height in zip(rows, heights, strict=True):
            _draw_row(figure, row, top, row_height)
            top -= ABOVE + row_height + BELOW
    return figure


def _arrange(comparison: Comparison) -> list[list[list[Panel]]]:
    """Rows of columns of panels. Two models leave room for prompts beside their decode steps, three do not."""
    decode, bars = _decode_panels(comparison), _bars_panel(comparison)
    prefill, start = _prefill_panel(comparison), _start_panel(comparison)
    upper, stack = ([*decode, *prefill], start) if len(decode) < 3 else (decode, [*prefill, *start])
    sampling = [[panel] for panel in _sampling_panels(comparison)]
    rows = [[[panel] for panel in upper], [column for column in (bars, stack) if column], sampling]
    return [row for row in rows if row]


def _stack_height(column: list[Panel]) -> float:
    return sum(panel.height for panel in column) + (len(column) - 1) * (ABOVE + BELOW)


def _draw_row(figure: Any, row: list[list[Panel]], top: float, height: float) -> None:
    """`top` and `height` in inches from the picture's lower edge; columns that are less high are stretched."""
    labels = [max(panel.labels for panel in column) for column in row]
    stretch = (WIDTH - 0.3 - sum(labels)) / sum(column[0].width for column in row)
    left, total = 0.0, figure.get_figheight()
    for column, room in zip(row, labels, strict=True):
        left += room
        gaps = (len(column) - 1) * (ABOVE + BELOW)
        scale = (height - gaps) / (_stack_height(column) - gaps)
        bottom = top + BELOW
        for panel in column:
            bottom -= BELOW + ABOVE + panel.height * scale
            box = (left / WIDTH, bottom / total, panel.width * stretch / WIDTH, panel.height * scale / total)
            panel.draw(figure.add_axes(box))
        left += column[0].width * stretch


def _colored(comparison: Comparison) -> list[tuple[System, str]]:
    """Every system and its colour, front to back."""
    peers = zip(comparison.peers, itertools.cycle(PEER_COLORS), strict=False)
    return [(comparison.own, OWN_COLOR), *peers, (comparison.limit, LIMIT_COLOR)]


def save_svg(figure: Any, out: Path) -> None:
    """Without a date and matplotlib's version."""
    with _matplotlib().rc_context(STYLE):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": "benchmarks.plot"})


def _draw_head(figure: Any, comparison: Comparison) -> None:
    """Machine, date and versions on the left, what the colours mean on the right."""
    from matplotlib.lines import Line2D

    machine, height = comparison.machine, figure.get_figheight()
    facts = ["bf16, random weights in real shapes"]
    facts += [f"torch {machine['torch']}"] if "torch" in machine else []
    facts += [machine["date"]] if "date" in machine else []
    figure.text(0.25 / WIDTH, 1 - 0.3 / height, f"One {machine.get('gpu', 'GPU')}", size=13, weight="bold", va="center")
    figure.text(0.25 / WIDTH, 1 - 0.54 / height, ", ".join(facts), color=MUTED, va="center")
    handles = [
        Line2D([], [], color=color, lw=3, ls=(0, (2, 1)) if system is comparison.limit else "-")
        for system, color in _colored(comparison)
    ]
    names = [system.name for system, _ in _colored(comparison)]
    place = (1 - 0.2 / WIDTH, 1 - 0.38 / height)
    figure.legend(
        handles, names, loc="center right", bbox_to_anchor=place, ncols=len(names), frameon=False, fontsize=11
    )


def _decode_panels(comparison: Comparison) -> list[Panel]:
    patterns = [(title, rf"{prefix}_bs(\d+)_ms") for prefix, title in comparison.models]
    return [
        Panel(1, 0.6, partial(_draw_decode, comparison, title, pattern))
        for title, pattern in patterns
        if comparison.own.series(pattern)
    ]


def _draw_decode(comparison: Comparison, title: str, pattern: str, axes: Any) -> None:
    axes.set_title(f"{title}: decode step (ms)")
    axes.set_xlabel("batch size, 1,024 tokens of context")
    _draw_lines(comparison, pattern, axes)
    _set_log_ticks(axes, [number for number, _ in comparison.own.series(pattern)])


def _prefill_panel(comparison: Comparison) -> list[Panel]:
    """Of the models that were measured with several prompt lengths; the others have a bar."""
    patterns = [(title, rf"{prefix}_prefill_(\d+)_tok_s") for prefix, title in comparison.models]
    several = [(title, pattern) for title, pattern in patterns if len(comparison.own.series(pattern)) > 1]
    return [Panel(1, 0.65, partial(_draw_prefill, comparison, several))] if several else []


def _draw_prefill(comparison: Comparison, models: list[tuple[str, str]], axes: Any) -> None:
    axes.set_title(f"{models[0][0]}: prefill (tokens/s)" if len(models) == 1 else "Prefill (tokens/s)")
    axes.set_xlabel("tokens a prompt")
    lengths: set[int] = set()
    for title, pattern in models:
        _draw_lines(comparison, pattern, axes)
        series = comparison.own.series(pattern)
        lengths |= {number for number, _ in series}
        if len(models) > 1:
            axes.annotate(
                title, series[-1], (-9, -3), textcoords="offset points", ha="right", va="center", color=OWN_COLOR
            )
    if len(models) > 1:
        axes.margins(y=0.15)  # for the lowest line's title
    _set_log_ticks(axes, sorted(lengths))


def _draw_lines(comparison: Comparison, pattern: str, axes: Any) -> None:
    for system, color in reversed(_colored(comparison)):
        series = system.series(pattern)
        own, limit = system is comparison.own, system is comparison.limit
        axes.plot(
            [number for number, _ in series], [value for _, value in series], color=color, marker="o",
            ls=DASHES if limit else "-", lw=2.2 if own else 1.5, ms=3 if limit else 5,
        )  # fmt: skip


def _set_log_ticks(axes: Any, numbers: list[int]) -> None:
    """Both axes logarithmic: across, a tick for each of `numbers`; up, round ones."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    digits = (1, 2, 5) if high > 20 * low else (1, 1.5, 2, 3, 5, 7)
    up = [digit * 10**power for power in range(-3, 8) for digit in digits]
    up = [value for value in up if low <= value <= high]
    axes.set_xticks(numbers, [_short(number) for number in numbers])
    axes.set_yticks(up, [_short(value) for value in up])
    axes.minorticks_off()
    axes.tick_params(length=0)
    axes.grid(axis="y")


def _bars_panel(comparison: Comparison) -> list[Panel]:
    """Whole workloads whose limit is known, by workload and then by model."""
    workloads = [
        ("offline", "offline_tok_s"),
        ("single stream", "single_tok_s"),
        ("prefill of 4,000", "prefill_4000_tok_s"),
    ]
    bars = [
        (f"{title}, {workload}", f"{prefix}_{name}")
        for workload, name in workloads
        for prefix, title in comparison.models
        if all(f"{prefix}_{name}" in system.figures for system in (comparison.own, comparison.limit))
    ]
    return [Panel(1.7, 2.45, partial(_draw_bars, comparison, bars), BAR * len(bars))] if bars else []


def _draw_bars(comparison: Comparison, bars: list[tuple[str, str]], axes: Any) -> None:
    axes.set_title("Tokens per second, as a share of the hardware limit")
    limits = [comparison.limit.figures[name] for _, name in bars]
    for row, (_, name) in enumerate(bars):
        _draw_group(comparison, name, row, 100 / limits[row], "", axes)
        axes.text(125, row, f"{limits[row]:,.0f}", ha="right", va="center", color=MUTED)
    axes.axvline(100, color=LIMIT_COLOR, lw=1.5, ls=DASHES, zorder=1)
    axes.set_xlim(0, 125)
    axes.set_xticks([0, 25, 50, 75, 100], ["0", "25", "50", "75", "100%"])
    _set_bar_labels(axes, [label for label, _ in bars])


def _start_panel(comparison: Comparison) -> list[Panel]:
    kinds = [("no kernel\ncaches", "cold_start_s"), ("warm\ncaches", "warm_start_s")]
    bars = [
        (title, [(label, f"{prefix}_{name}") for label, name in kinds if f"{prefix}_{name}" in comparison.own.figures])
        for prefix, title in comparison.models
    ]
    return [Panel(1, 0.95, partial(_draw_start, comparison, title, group), 1.3) for title, group in bars if group]


def _draw_start(comparison: Comparison, title: str, bars: list[tuple[str, str]], axes: Any) -> None:
    axes.set_title(f"{title}: start to first token")
    for row, (_, name) in enumerate(bars):
        _draw_group(comparison, name, row, 1.0, " s", axes)
    axes.set_xlim(0, 1.12 * axes.get_xlim()[1])
    _drop_ticks_beyond(axes)
    axes.set_xlabel("seconds")
    _set_bar_labels(axes, [label for label, _ in bars])


def _sampling_panels(comparison: Comparison) -> list[Panel]:
    """One stream and many, by what a request's sampling asks for."""
    panels = []
    for count, title in ((1, "one stream"), (64, "64 streams")):
        bars = [
            (label, f"sampling_{option}_{count}_tok_s")
            for option, label in SAMPLING_LABELS.items()
            if f"sampling_{option}_{count}_tok_s" in comparison.own.figures
        ]
        if bars:
            panels.append(Panel(1, 1.5, partial(_draw_sampling, comparison, title, bars), 0.8 * BAR * len(bars)))
    return panels


def _draw_sampling(comparison: Comparison, title: str, bars: list[tuple[str, str]], axes: Any) -> None:
    axes.set_title(f"Qwen3-0.6B, {title} (tokens/s)")
    for row, (_, name) in enumerate(bars):
        _draw_group(comparison, name, row, 1.0, "", axes)
    axes.set_xlim(0, 1.2 * axes.get_xlim()[1])
    axes.locator_params(axis="x", nbins=4)
    _drop_ticks_beyond(axes)
    axes.xaxis.set_major_formatter(lambda value, _: _short(value))
    _set_bar_labels(axes, [label for label, _ in bars])


def _drop_ticks_beyond(axes: Any) -> None:
    """Of the ticks that matplotlib picked, the one that may lie right of the axes."""
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= axes.get_xlim()[1]])


def _draw_group(comparison: Comparison, name: str, row: int, scale: float, unit: str, axes: Any) -> None:
    """A bar of each system that has this figure, `scale` long for each of its units, with its value."""
    bars = [(system, color) for system, color in _colored(comparison) if system is not comparison.limit]
    thick = 0.8 / len(bars)
    bars = [(system, color) for system, color in bars if name in system.figures]
    for index, (system, color) in enumerate(bars):
        value = system.figures[name]
        y = row + (index - (len(bars) - 1) / 2) * thick
        weight = "bold" if system is comparison.own else "normal"
        axes.barh(y, value * scale, 0.88 * thick, color=color)
        axes.annotate(
            f"{value:,.0f}{unit}", (value * scale, y), (4, 0), textcoords="offset points", va="center", size=9,
            color=color, weight=weight, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )  # fmt: skip


def _set_bar_labels(axes: Any, labels: list[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.tick_params(axis="y", labelcolor=TEXT)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")


def _short(value: float) -> str:
    """4000 as 4k, a million as 1M, 0.5 as 0.5."""
    for size, letter in ((1_000_000, "M"), (1000, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _matplotlib() -> Any:
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError:
        raise SystemExit("benchmarks.plot needs matplotlib: pip install -e '.[bench]'") from None
    return matplotlib


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="what benchmarks.gpu --out wrote")
    parser.add_argument("--out", type=Path, default=Path("docs/performance.svg"))
    parser.add_argument("--peers", type=Path, default=PEERS, help="peers' figures and floors")
    options = parser.parse_args(arguments)
    save_svg(make_figure(Comparison.read(options.results, options.peers)), options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
