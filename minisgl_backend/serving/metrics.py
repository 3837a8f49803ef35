"""The engine's counters and the front's latency histograms on Triton's /metrics.

With several engine cores the engine's metrics are sums over the cores that answer; a few are reported per core, too.

docs/operations.md lists the names.

Histograms are written as their Prometheus series (`_bucket`, `_sum`, `_count`) from counts kept in this process: a call
into the server for every token would cost more than the token. `openai/metrics.py` makes histograms of them again.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import triton_python_backend_utils as pb_utils

from minisgl_backend import __version__
from minisgl_backend.delivery.frontend import EngineFront
from minisgl_backend.errors import EngineDeadError
from minisgl_backend.ipc.histogram import CANCELLATION_BOUNDS_S
from minisgl_backend.ipc.messages import Stats
from minisgl_backend.speculative_config import MOST_DRAFTS

REPORT_EVERY_S = 0.25
LATENCIES_EVERY = 4  # in reports: histograms have many values that change
# Each value is a round trip into the server that holds this process's interpreter lock, so there is a pause before it:
# the engine's figures arrive together with a step's tokens, whose responses must not queue behind them.
REPORT_PAUSE_S = 0.002
IDLE_AFTER_S = 0.003  # without a response: the step's tokens have been sent
MAX_PAUSES_PER_VALUE = 4  # for streams that never pause

Pause = Callable[[], object]

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Series:
    """One metric: the family's name and help, the value's name in Stats, and labels."""

    family: str
    help: str
    value: str
    labels: tuple[tuple[str, str], ...] = ()


_PAGES = "minisgl_kv_pages"
_PAGES_HELP = "KV pages by state; total is their sum"
_GAUGES = (
    _Series("minisgl_requests_running", "Sequences in the running batch", "num_running"),
    _Series("minisgl_requests_waiting", "Sequences in the queue", "num_waiting"),
    _Series(_PAGES, _PAGES_HELP, "pages_free", (("state", "free"),)),
    _Series(_PAGES, _PAGES_HELP, "pages_cached", (("state", "cached"),)),
    _Series(_PAGES, _PAGES_HELP, "pages_leased", (("state", "leased"),)),
    _Series(_PAGES, _PAGES_HELP, "pages_total", (("state", "total"),)),
)
_USAGE = _Series("minisgl_kv_cache_usage_ratio", "KV pages that sequences hold, of all; 0 to 1", "")
_UP = _Series("minisgl_engine_up", "1 while an engine core answers, else 0", "")
_INFO = _Series("minisgl_info", "1; what is served, in labels", "")
_START_TIME = _Series("minisgl_start_time_seconds", "When the model was ready, in seconds since 1970", "")
_CORE_UP = _Series("minisgl_core_up", "1 while this engine core answers, else 0", "")
_CORE_REQUESTS = "minisgl_core_requests"
_CORE_REQUESTS_HELP = "Sequences of this engine core by state"
_CORE_GAUGES = (
    _Series(_CORE_REQUESTS, _CORE_REQUESTS_HELP, "num_running", (("state", "running"),)),
    _Series(_CORE_REQUESTS, _CORE_REQUESTS_HELP, "num_waiting", (("state", "waiting"),)),
)
_COUNTERS = (
    _Series("minisgl_prompt_tokens_total", "Prompt tokens of started sequences", "total_prompt_tokens"),
    _Series("minisgl_cached_tokens_total", "Prompt tokens from the prefix cache", "total_cached_tokens"),
    _Series("minisgl_generated_tokens_total", "Tokens sampled", "total_generated_tokens"),
    _Series("minisgl_requests_finished_total", "Sequences that ended by stop or length", "total_finished"),
    _Series("minisgl_requests_cancelled_total", "Sequences that ended by cancellation", "total_cancelled"),
    _Series(
        "minisgl_requests_cancelled_late_total",
        "Sequences that stayed longer than 2 steps and 50 ms after their client was found to have left",
        "total_cancelled_late",
    ),
    _Series("minisgl_requests_failed_total", "Sequences that ended by an error", "total_failed"),
    _Series("minisgl_preemptions_total", "Sequences put back into the queue", "total_preempted"),
    _Series("minisgl_engine_restarts_total", "Restarts of the engine core", "restarts"),
)


# For engines with speculation, once there are drafts.
_DRAFT_COUNTERS = (
    _Series("minisgl_drafts_total", "Drafts verified: of one sequence in one step", "total_drafts"),
    *(
        _Series(f"minisgl_{name}_total", help, f"total_{name}_{position}", (("position", str(position)),))
        for name, help in (
            ("draft_tokens", "Draft tokens verified, by their position in the draft"),
            ("accepted_draft_tokens", "Draft tokens accepted, by their position in the draft"),
        )
        for position in range(1, MOST_DRAFTS + 1)
    ),
)


_TENANT_REQUESTS = "minisgl_tenant_requests"
_TENANT_REQUESTS_HELP = "Sequences of a tenant by state; with fair_shares"
_TENANT_GAUGES = (
    _Series(_TENANT_REQUESTS, _TENANT_REQUESTS_HELP, "num_running", (("state", "running"),)),
    _Series(_TENANT_REQUESTS, _TENANT_REQUESTS_HELP, "num_waiting", (("state", "waiting"),)),
)
_TENANT_COUNTERS = (
    _Series("minisgl_tenant_prompt_tokens_total", "Prompt tokens computed for a tenant", "total_prompt_tokens"),
    _Series("minisgl_tenant_generated_tokens_total", "Tokens sampled for a tenant", "total_generated_tokens"),
)
MAX_TENANT_LABELS = 64  # tenants with series of their own; all others share one
OTHER_TENANTS = "others"


class MetricsReporter:
    """The leader among the fronts reports the engine's metrics, each front its own latencies.

    Totals are written before gauges: once the gauges show that nothing runs, everything is counted.
    """

    def __init__(self, front: EngineFront, *, is_leader: bool, model: str) -> None:
        """`model`: what it is called."""
        self._front = front
        self._families: dict[str, Any] = {}
        self._stopping = threading.Event()

        def pause() -> None:
            for _ in range(MAX_PAUSES_PER_VALUE):
                if self._stopping.wait(REPORT_PAUSE_S) or time.monotonic() - front.responder.last_sent > IDLE_AFTER_S:
                    return

        self._engine = _EngineMetrics(self._families, pause, front, model) if is_leader else None
        latency = front.responder.latency
        self._latency = [
            (_HistogramMetric(name, help, histogram.bounds, pause), histogram)
            for name, help, histogram in (
                ("minisgl_time_to_first_token_seconds", "From submission", latency.first_token),
                ("minisgl_inter_token_seconds", "Between tokens", latency.inter_token),
                ("minisgl_request_queue_time_seconds", "From submission to the first step", latency.queued),
                ("minisgl_e2e_request_latency_seconds", "From submission to the last response", latency.whole),
                ("minisgl_request_prompt_tokens", "Of answered requests", latency.prompt_tokens),
                ("minisgl_request_generation_tokens", "Of their sequences", latency.generated_tokens),
            )
        ]
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends reporting. To be called while the server still answers, since it removes the metrics from the server's
        page."""
        self._stopping.set()
        self._thread.join(2.0)
        if self._thread.is_alive():
            return
        # A Python stub that still has metrics when it exits crashes (SIGSEGV): deleting a metric is a message to the
        # server.
        self._engine = None
        self._latency.clear()
        self._families.clear()  # last: a family must outlive its metrics

    def _run(self) -> None:
        for report in itertools.count(1):
            if self._stopping.wait(REPORT_EVERY_S):
                return
            try:
                self._report(latencies=report % LATENCIES_EVERY == 0)
            except Exception:  # metrics must never end a server
                _LOGGER.exception("metrics could not be reported; the next attempt follows")

    def _report(self, *, latencies: bool) -> None:
        if latencies:
            for metric, histogram in self._latency:
                metric.report([(list(histogram.counts), histogram.sum)])
        if self._engine is not None:
            try:
                self._engine.report(self._front.client.stats())
            except EngineDeadError:
                self._engine.report_dead()


class _EngineMetrics:
    def __init__(self, families: dict[str, Any], pause: Pause, front: EngineFront, model: str) -> None:
        self._pause = pause
        num_cores = front.client.num_cores
        lengths = [welcome.max_seq_len for welcome in front.client.welcomes if welcome is not None]
        labels = {"model": model, "version": __version__, "max_model_len": str(min(lengths)) if lengths else ""}
        gauge = pb_utils.MetricFamily.GAUGE
        self._facts = [
            _metric(families, replace(_INFO, labels=tuple(labels.items())), gauge),
            _metric(families, _START_TIME, gauge),
        ]
        for metric, value in zip(self._facts, (1.0, float(int(time.time()))), strict=True):
            metric.set(value)
        self._gauges = {series: _metric(families, series, pb_utils.MetricFamily.GAUGE) for series in _GAUGES}
        self._counters = {
            series: _Counter(_metric(families, series, pb_utils.MetricFamily.COUNTER), pause) for series in _COUNTERS
        }
        self._families = families
        self._drafts: dict[_Series, _Counter] = {}
        self._up = _metric(families, _UP, pb_utils.MetricFamily.GAUGE)
        self._usage = _metric(families, _USAGE, pb_utils.MetricFamily.GAUGE)
        self._tenants = _TenantMetrics(families, pause)
        self._cores = [_CoreMetrics(families, core) for core in range(num_cores if num_cores > 1 else 0)]
        self._shown: dict[_Series, float] = {}
        help = "From the detection that a client has left to the release of its sequence's pages"
        self._cancellation = _HistogramMetric("minisgl_cancellation_seconds", help, CANCELLATION_BOUNDS_S, pause)

    def report(self, cores: Sequence[Stats | None]) -> None:
        """`cores`: one entry per core, None if it does not answer."""
        for series, counter in self._counters.items():
            counter.follow([None if stats is None else stats.values.get(series.value) for stats in cores])
        self._count_drafts(cores)
        found = [None if stats is None else stats.histograms.get("cancellation_seconds") for stats in cores]
        self._cancellation.report([None if counts is None else (counts.counts, counts.sum) for counts in found])
        for series, gauge in self._gauges.items():
            values = [value for stats in cores if stats and (value := stats.values.get(series.value)) is not None]
            if values:
                self._show(series, gauge, sum(values))
        if total := sum(stats.values.get("pages_total", 0.0) for stats in cores if stats):
            leased = sum(stats.values["pages_leased"] for stats in cores if stats)
            self._show(_USAGE, self._usage, round(leased / total, 3))
        if any(stats is not None and stats.tenants for stats in cores):
            self._tenants.report(cores)
        self._show_cores(cores)
        self._show(_UP, self._up, 1.0)

    def _count_drafts(self, cores: Sequence[Stats | None]) -> None:
        for series in _DRAFT_COUNTERS:
            totals = [None if stats is None else stats.values.get(series.value) for stats in cores]
            if series not in self._drafts and any(totals):
                metric = _metric(self._families, series, pb_utils.MetricFamily.COUNTER)
                self._drafts[series] = _Counter(metric, self._pause)
            if series in self._drafts:
                self._drafts[series].follow(totals)

    def report_dead(self) -> None:
        self._show_cores([None] * len(self._cores))
        self._show(_UP, self._up, 0.0)

    def _show_cores(self, cores: Sequence[Stats | None]) -> None:
        for core, stats in zip(self._cores, cores, strict=False):  # a single core has no metrics of its own
            for series, gauge in core.gauges:
                self._show(series, gauge, 0.0 if stats is None else stats.values[series.value])
            self._show(*core.up, float(stats is not None))

    def _show(self, series: _Series, gauge: Any, value: float) -> None:
        if self._shown.get(series) != value:
            self._pause()
            gauge.set(value)
            self._shown[series] = value


class _TenantMetrics:
    """Series by tenant, created when a tenant first appears. Clients choose the names, so the number of labels is
    limited."""

    def __init__(self, families: dict[str, Any], pause: Pause) -> None:
        self._families = families
        self._pause = pause
        self._shown: dict[_Series, float] = {}
        self._gauges: dict[str, list[tuple[_Series, Any]]] = {}
        self._counters: dict[str, list[tuple[_Series, _Counter]]] = {}

    def report(self, cores: Sequence[Stats | None]) -> None:
        if not self._gauges:
            self._add(OTHER_TENANTS)
        for name in sorted({name for stats in cores if stats is not None for name in stats.tenants}):
            if name and name not in self._gauges and len(self._gauges) <= MAX_TENANT_LABELS:
                self._add(name)
        for label in self._gauges:
            self._report(label, [None if stats is None else self._of(label, stats) for stats in cores])

    def _of(self, label: str, stats: Stats) -> dict[str, float]:
        """A core's figures for all tenants with this label."""
        if label != OTHER_TENANTS:
            return stats.tenants.get(label, {})
        found: dict[str, float] = {}
        for name, values in stats.tenants.items():
            if name not in self._gauges:
                for key, value in values.items():
                    found[key] = found.get(key, 0.0) + value
        return found

    def _report(self, label: str, cores: Sequence[dict[str, float] | None]) -> None:
        for series, counter in self._counters[label]:
            counter.follow([None if one is None else one.get(series.value) for one in cores])
        for series, gauge in self._gauges[label]:
            value = sum(one.get(series.value, 0.0) for one in cores if one is not None)
            if self._shown.get(series) != value:
                self._pause()
                gauge.set(value)
                self._shown[series] = value

    def _add(self, label: str) -> None:
        def labelled(series: _Series) -> _Series:
            return replace(series, labels=(("tenant", label), *series.labels))

        gauge, counter = pb_utils.MetricFamily.GAUGE, pb_utils.MetricFamily.COUNTER
        self._gauges[label] = [
            (series, _metric(self._families, series, gauge)) for series in map(labelled, _TENANT_GAUGES)
        ]
        self._counters[label] = [
            (series, _Counter(_metric(self._families, series, counter), self._pause))
            for series in map(labelled, _TENANT_COUNTERS)
        ]


class _CoreMetrics:
    """The gauges of one engine core, if there are several."""

    def __init__(self, families: dict[str, Any], core: int) -> None:
        def metric(series: _Series) -> tuple[_Series, Any]:
            labelled = replace(series, labels=(("core", str(core)), *series.labels))
            return labelled, _metric(families, labelled, pb_utils.MetricFamily.GAUGE)

        self.up = metric(_CORE_UP)
        self.gauges = [metric(series) for series in _CORE_GAUGES]


class _Counter:
    """A Triton counter that follows totals, each of which restarts at 0 with its engine core."""

    def __init__(self, metric: Any, pause: Pause) -> None:
        self._metric = metric
        self._pause = pause
        self._last: dict[int, float] = {}  # by index of the total

    def follow(self, totals: Sequence[float | None]) -> None:
        """None: the total is unknown now."""
        increment = 0.0
        for index, total in enumerate(totals):
            if total is not None:
                last = self._last.get(index, 0.0)
                increment += total - last if total >= last else total
                self._last[index] = total
        if increment > 0:
            self._pause()
            self._metric.increment(increment)


class _HistogramMetric:
    def __init__(self, name: str, help: str, bounds: Sequence[float], pause: Pause) -> None:
        families: dict[str, Any] = {}
        counter = pb_utils.MetricFamily.COUNTER
        self._buckets = [
            _Counter(_metric(families, _Series(f"{name}_bucket", help, "", (("le", bound),)), counter), pause)
            for bound in (*(f"{bound:g}" for bound in bounds), "+Inf")
        ]
        self._count = _Counter(_metric(families, _Series(f"{name}_count", help, ""), counter), pause)
        self._sum = _Counter(_metric(families, _Series(f"{name}_sum", help, ""), counter), pause)
        self._families = families  # a family must outlive its metrics

    def report(self, sources: Sequence[tuple[Sequence[int], float] | None]) -> None:
        """For each source the counts by upper bound (the last one above all bounds) and the sum of the values; None:
        unknown now."""
        totals = [None if source is None else list(itertools.accumulate(source[0])) for source in sources]
        for index, bucket in enumerate(self._buckets):
            bucket.follow([None if counts is None else float(counts[index]) for counts in totals])
        self._count.follow([None if counts is None else float(counts[-1]) for counts in totals])
        self._sum.follow([None if source is None else source[1] for source in sources])


def _metric(families: dict[str, Any], series: _Series, kind: Any) -> Any:
    if series.family not in families:
        families[series.family] = pb_utils.MetricFamily(name=series.family, description=series.help, kind=kind)
    return families[series.family].Metric(labels=dict(series.labels))
