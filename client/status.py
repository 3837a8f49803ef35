"""What `minisgl status` says: five lines for people, or all figures as a table."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.table import Table

from .metrics import Metrics


def status_lines(metrics: Metrics, first: str, now: float) -> Iterator[str]:
    """`first`: the line that needs no metrics; `now`: time.time(). What an older server does not tell is left out."""
    info = next(metrics.select("minisgl_info"), None)
    labels = info.labels if info is not None else {}
    if labels.get("model"):
        first += f"; {labels['model']} on minisgl {labels.get('version', '?')}"
    yield first
    start, length = metrics.value("minisgl_start_time_seconds"), labels.get("max_model_len", "")
    yield _line(
        "engine",
        "up" if _count(metrics, "engine_up") else "down",
        f"for {_duration(now - start)}" if start else "",
        f"context of {int(length):,} tokens" if length.isdecimal() else "",
        f"{_count(metrics, 'engine_restarts_total'):,.0f} restarts",
    )
    yield _line(
        "requests",
        *(f"{_count(metrics, f'requests_{state}'):,.0f} {state}" for state in ("running", "waiting")),
        *(f"{_count(metrics, f'requests_{end}_total'):,.0f} {end}" for end in ("finished", "cancelled", "failed")),
    )
    between = _mean(metrics, "inter_token_seconds")
    yield _line(
        "averages",
        _seconds("first token after", _mean(metrics, "time_to_first_token_seconds")),
        f"then {1 / between:,.1f} tokens/s a sequence" if between else "",
        _seconds("whole answer", _mean(metrics, "e2e_request_latency_seconds")),
        f"{_count(metrics, 'generated_tokens_total'):,.0f} tokens generated",
    )
    prompt, total = _count(metrics, "prompt_tokens_total"), metrics.value("minisgl_kv_pages", state="total")
    used, kept = (metrics.value("minisgl_kv_pages", state=state) or 0 for state in ("leased", "cached"))
    yield _line(
        "cache",
        f"{used:,.0f} of {total:,.0f} pages in use, {kept:,.0f} kept" if total else "",
        f"{_count(metrics, 'cached_tokens_total') / prompt:.0%} of {prompt:,.0f} prompt tokens came from it"
        if prompt
        else "no prompt yet",
        f"{_count(metrics, 'preemptions_total'):,.0f} preemptions",
    )


def metrics_table(metrics: Metrics, model: str) -> Table:
    """All figures but the bounds of histograms."""
    table = Table(box=box.SIMPLE)
    table.add_column("metric", overflow="fold")
    table.add_column("labels", overflow="fold")
    table.add_column("value", justify="right")
    for sample in metrics.samples:
        of_model = sample.name.startswith("nv_inference_request_") and sample.labels.get("model") == model
        ours = sample.name.startswith("minisgl") and not sample.name.endswith("_bucket")
        if ours or (of_model and not sample.name.endswith("_us")):
            hidden = () if sample.name == "minisgl_info" else ("version",)
            labels = ", ".join(f"{name}={value}" for name, value in sample.labels.items() if name not in hidden)
            table.add_row(sample.name, labels, f"{sample.value:,g}")
    return table


def _line(name: str, *parts: str) -> str:
    return f"{name}: {', '.join(filter(None, parts))}"


def _count(metrics: Metrics, name: str) -> float:
    return metrics.value(f"minisgl_{name}") or 0.0


def _mean(metrics: Metrics, name: str) -> float:
    """Of a histogram; 0 where nothing was measured."""
    count = _count(metrics, f"{name}_count")
    return _count(metrics, f"{name}_sum") / count if count else 0.0


def _seconds(what: str, seconds: float) -> str:
    return f"{what} {seconds:,.2f} s" if seconds else ""


def _duration(seconds: float) -> str:
    """Its two largest units."""
    units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    rest = max(0, int(seconds))
    parts: list[str] = []
    for size, unit in units:
        if rest >= size or parts or size == 1:
            parts.append(f"{rest // size} {unit}")
            rest %= size
    return " ".join(parts[:2])
