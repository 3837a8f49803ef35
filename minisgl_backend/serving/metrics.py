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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
# Of models with states.
_STATES = "minisgl_states"
_STATES_HELP = "Slots of recurrent states by state; total is their sum"
_STATE_GAUGES = tuple(
    _Series(_STATES, _STATES_HELP, f"states_{name}", (("state", name),))
    for name in ("free", "cached", "owned", "total")
)
_STATE_MISSES = _Series(
    "minisgl_state_missed_tokens_total",
    "Prompt tokens that the prefix cache had pages of, but no state behind them",
    "total_state_misses",
)
_ADAPTERS, _ADAPTERS_HELP = "minisgl_adapters", "LoRA adapters by state"
_ADAPTER_GAUGES = (
    _Series(_ADAPTERS, _ADAPTERS_HELP, "adapters_open", (("state", "open"),)),
    _Series(_ADAPTERS, _ADAPTERS_HELP, "adapters_waiting", (("state", "waiting"),)),
)
_ADAPTER_LOADS = _Series("minisgl_adapter_loads_total", "LoRA adapters copied into slots", "total_adapter_loads")
# Of models that see.
_ENCODER = "minisgl_encoder_cache_bytes"
_ENCODER_HELP = "Bytes of images' vectors: used, and what there is room for in total"
_ENCODER_GAUGES = (
    _Series(_ENCODER, _ENCODER_HELP, "encoder_used_bytes", (("state", "used"),)),
    _Series(_ENCODER, _ENCODER_HELP, "encoder_cache_bytes", (("state", "total"),)),
)
_IMAGE_COUNTERS = (
    _Series("minisgl_image_prompt_tokens_total", "Prompt tokens of images, of started sequences", "total_image_tokens"),
    _Series("minisgl_encoder_patches_total", "Patches of images that were encoded", "total_encoder_patches"),
    _Series("minisgl_encoder_cache_hits_total", "Images whose vectors were held", "total_encoder_hits"),
    _Series("minisgl_encoder_cache_misses_total", "Images that had to be encoded", "total_encoder_misses"),
    _Series("minisgl_encoder_cache_evictions_total", "Images dropped to make room", "total_encoder_evictions"),
)
_IMAGES = _Series("minisgl_images_total", "Images of requests", "")
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


_LORA_REQUESTS = _Series(
    "minisgl_lora_requests_info", "Adapters of running and waiting sequences; the value is when that changed", ""
)
_REFUSED = _Series("minisgl_admin_refused_total", "Commands with a wrong admin key, or none", "")

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
        self._stopping = threading.Event()

        def pause() -> None:
            for _ in range(MAX_PAUSES_PER_VALUE):
                if self._stopping.wait(REPORT_PAUSE_S) or time.monotonic() - front.responder.last_sent > IDLE_AFTER_S:
                    return

        self._metrics = _Metrics(pause)
        self._engine = _EngineMetrics(self._metrics, front, model) if is_leader else None
        latency = front.responder.latency
        self._latency = [
            (_Histogram(self._metrics, name, help, histogram.bounds), histogram)
            for name, help, histogram in (
                ("minisgl_time_to_first_token_seconds", "From submission", latency.first_token),
                ("minisgl_inter_token_seconds", "Between tokens", latency.inter_token),
                ("minisgl_request_queue_time_seconds", "From submission to the first step", latency.queued),
                ("minisgl_e2e_request_latency_seconds", "From submission to the last response", latency.whole),
                ("minisgl_request_prompt_tokens", "Of answered requests", latency.prompt_tokens),
                ("minisgl_request_generation_tokens", "Of their sequences", latency.generated_tokens),
            )
        ]
        self._recorder = latency
        self._images: _Counter | None = None  # of a front that has seen some
        self._refused: _Counter | None = None  # once there is a try to count
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
        self._engine = self._refused = None
        self._latency.clear()
        self._images = None
        self._metrics.close()  # last: a family must outlive its metrics

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
            self._report_images()
            for metric, histogram in self._latency:
                metric.report([(list(histogram.counts), histogram.sum)])
        if refused := self._front.commands.num_refused:
            self._refused = self._refused or self._metrics.counter(_REFUSED)
            self._refused.follow([float(refused)])
        if self._engine is not None:
            try:
                cores = self._front.client.stats()
                self._engine.report(cores)
                self._front.adapter_states.show(_adapter_states(cores))
            except EngineDeadError:
                self._engine.report_dead()

    def _report_images(self) -> None:
        recorder = self._recorder
        if self._images is None and recorder.num_images:
            self._images = self._metrics.counter(_IMAGES)
            name, help = "minisgl_image_decode_seconds", "Of a request's images, in the tokenizer, and their wait there"
            decode = recorder.image_decode
            self._latency.append((_Histogram(self._metrics, name, help, decode.bounds), decode))
        if self._images is not None:
            self._images.follow([float(recorder.num_images)])


class _EngineMetrics:
    def __init__(self, metrics: _Metrics, front: EngineFront, model: str) -> None:
        self._metrics = metrics
        num_cores = front.client.num_cores
        lengths = [welcome.max_seq_len for welcome in front.client.welcomes if welcome is not None]
        labels = {"model": model, "version": __version__, "max_model_len": str(min(lengths)) if lengths else ""}
        self._facts = [metrics.gauge(_INFO, *labels.items()), metrics.gauge(_START_TIME)]
        for gauge, value in zip(self._facts, (1.0, float(int(time.time()))), strict=True):
            gauge.show(value)
        self._gauges = [(series.value, metrics.gauge(series)) for series in _GAUGES]
        self._counters = [(series.value, metrics.counter(series)) for series in _COUNTERS]
        self._made: dict[str, Any] = {}  # gauges of what not every model has
        self._later: dict[str, _Counter] = {}  # counters of what not every engine has
        self._up, self._usage = metrics.gauge(_UP), metrics.gauge(_USAGE)
        self._tenants: dict[str, _TenantMetrics] = {}
        self._lora: _Gauge | None = None
        self._lora_labels: list[tuple[str, str]] = []
        self._cores = [_CoreMetrics(metrics, core) for core in range(num_cores if num_cores > 1 else 0)]
        help = "From the detection that a client has left to the release of its sequence's pages"
        self._cancellation = _Histogram(metrics, "minisgl_cancellation_seconds", help, CANCELLATION_BOUNDS_S)

    def report(self, cores: Sequence[Stats | None]) -> None:
        """`cores`: one entry per core, None if it does not answer."""
        figures = [None if stats is None else stats.values for stats in cores]
        for name, counter in self._counters:
            counter.follow(_values_of(name, figures))
        for series in (*_DRAFT_COUNTERS, _STATE_MISSES, _ADAPTER_LOADS, *_IMAGE_COUNTERS):
            self._count_later(series, figures)
        for name, gauges in (
            ("states_total", _STATE_GAUGES),
            ("adapters_open", _ADAPTER_GAUGES),
            ("encoder_cache_bytes", _ENCODER_GAUGES),
        ):
            if gauges[0].value not in self._made and any(values and values.get(name) for values in figures):
                self._made |= {series.value: self._metrics.gauge(series) for series in gauges}
        found = [None if stats is None else stats.histograms.get("cancellation_seconds") for stats in cores]
        self._cancellation.report([None if counts is None else (counts.counts, counts.sum) for counts in found])
        for name, gauge in (*self._gauges, *self._made.items()):
            values = [value for value in _values_of(name, figures) if value is not None]
            if values:
                gauge.show(sum(values))
        if total := sum(values.get("pages_total", 0.0) for values in figures if values):
            leased = sum(values["pages_leased"] for values in figures if values)
            self._usage.show(round(leased / total, 3))
        if any(stats is not None and stats.tenants for stats in cores):
            self._report_tenants(cores)
        self._report_adapters(cores)
        self._show_cores(cores)
        self._up.show(1.0)

    def _count_later(self, series: _Series, figures: Sequence[Mapping[str, float] | None]) -> None:
        """A counter that begins with the first that there is to count."""
        totals = _values_of(series.value, figures)
        if series.value not in self._later and any(totals):
            self._later[series.value] = self._metrics.counter(series)
        if series.value in self._later:
            self._later[series.value].follow(totals)

    def _report_tenants(self, cores: Sequence[Stats | None]) -> None:
        """Series by tenant, created when a tenant first appears. Clients choose the names, so the number of labels is
        limited."""
        named = sorted({name for stats in cores if stats is not None for name in stats.tenants if name})
        for name in (OTHER_TENANTS, *named):
            if name not in self._tenants and len(self._tenants) <= MAX_TENANT_LABELS:
                self._tenants[name] = _TenantMetrics(self._metrics, name)
        for label, metrics in self._tenants.items():
            metrics.report([None if stats is None else self._of_tenants(label, stats) for stats in cores])

    def _of_tenants(self, label: str, stats: Stats) -> Mapping[str, float]:
        """A core's figures for all tenants with this label."""
        if label != OTHER_TENANTS:
            return stats.tenants.get(label, {})
        found: dict[str, float] = {}
        for values in (values for name, values in stats.tenants.items() if name not in self._tenants):
            for key, value in values.items():
                found[key] = found.get(key, 0.0) + value
        return found

    def _report_adapters(self, cores: Sequence[Stats | None]) -> None:
        """As vLLM, whose gauge routers read: names in labels, and as its value when they were last others."""
        found = [stats for stats in cores if stats is not None]
        slots = max((int(stats.values.get("adapter_slots", 0)) for stats in found), default=0)
        if not slots:
            return
        labels = [("max_lora", str(slots))]
        for key in ("running", "waiting"):
            names = sorted({name for stats in found for name, one in stats.adapters.items() if one[key]})
            labels.append((f"{key}_lora_adapters", ",".join(names[:MAX_TENANT_LABELS])))
        if labels != self._lora_labels:
            self._lora_labels, self._lora = labels, self._metrics.gauge(_LORA_REQUESTS, *labels)
            self._lora.show(time.time())

    def report_dead(self) -> None:
        self._show_cores([None] * len(self._cores))
        self._up.show(0.0)

    def _show_cores(self, cores: Sequence[Stats | None]) -> None:
        for core, stats in zip(self._cores, cores, strict=False):  # a single core has no metrics of its own
            core.show(None if stats is None else stats.values)


class _TenantMetrics:
    """The series of one label."""

    def __init__(self, metrics: _Metrics, label: str) -> None:
        tenant = ("tenant", label)
        self._gauges = [(series.value, metrics.gauge(series, tenant)) for series in _TENANT_GAUGES]
        self._counters = [(series.value, metrics.counter(series, tenant)) for series in _TENANT_COUNTERS]

    def report(self, cores: Sequence[Mapping[str, float] | None]) -> None:
        for name, counter in self._counters:
            counter.follow(_values_of(name, cores))
        for name, gauge in self._gauges:
            gauge.show(sum(one.get(name, 0.0) for one in cores if one is not None))


class _CoreMetrics:
    """The gauges of one engine core, if there are several."""

    def __init__(self, metrics: _Metrics, core: int) -> None:
        label = ("core", str(core))
        self._up = metrics.gauge(_CORE_UP, label)
        self._gauges = [(series.value, metrics.gauge(series, label)) for series in _CORE_GAUGES]

    def show(self, values: Mapping[str, float] | None) -> None:
        """None: the core does not answer."""
        for name, gauge in self._gauges:
            gauge.show(0.0 if values is None else values[name])
        self._up.show(float(values is not None))


def _adapter_states(cores: Sequence[Stats | None]) -> dict[str, str]:
    """By name; of several cores that of the one that has it closest."""
    found: dict[str, str] = {}
    for name, one in ((name, one) for stats in cores if stats is not None for name, one in stats.adapters.items()):
        if one["slots"] or name not in found:
            found[name] = "slot" if one["slots"] else "host"
    return found


def _values_of(name: str, cores: Sequence[Mapping[str, float] | None]) -> list[float | None]:
    return [None if values is None else values.get(name) for values in cores]


class _Metrics:
    """Makes Triton's metrics, and keeps their families, which must outlive them."""

    def __init__(self, pause: Pause) -> None:
        """`pause`: before each value."""
        self._pause = pause
        self._families: dict[str, Any] = {}

    def gauge(self, series: _Series, *labels: tuple[str, str]) -> _Gauge:
        """`labels`: before those of the series."""
        return _Gauge(self._new(series, labels, pb_utils.MetricFamily.GAUGE), self._pause)

    def counter(self, series: _Series, *labels: tuple[str, str]) -> _Counter:
        return _Counter(self._new(series, labels, pb_utils.MetricFamily.COUNTER), self._pause)

    def close(self) -> None:
        self._families.clear()

    def _new(self, series: _Series, labels: Sequence[tuple[str, str]], kind: Any) -> Any:
        name = series.family
        if name not in self._families:
            self._families[name] = pb_utils.MetricFamily(name=name, description=series.help, kind=kind)
        return self._families[name].Metric(labels=dict((*labels, *series.labels)))


class _Gauge:
    """A Triton gauge, which is written when its value changes."""

    def __init__(self, metric: Any, pause: Pause) -> None:
        self._metric = metric
        self._pause = pause
        self._shown: float | None = None

    def show(self, value: float) -> None:
        if value != self._shown:
            self._pause()
            self._metric.set(value)
            self._shown = value


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


class _Histogram:
    def __init__(self, metrics: _Metrics, name: str, help: str, bounds: Sequence[float]) -> None:
        self._buckets = [
            metrics.counter(_Series(f"{name}_bucket", help, "", (("le", bound),)))
            for bound in (*(f"{bound:g}" for bound in bounds), "+Inf")
        ]
        self._count = metrics.counter(_Series(f"{name}_count", help, ""))
        self._sum = metrics.counter(_Series(f"{name}_sum", help, ""))

    def report(self, sources: Sequence[tuple[Sequence[int], float] | None]) -> None:
        """For each source the counts by upper bound (the last one above all bounds) and the sum of the values; None:
        unknown now."""
        totals = [None if source is None else list(itertools.accumulate(source[0])) for source in sources]
        for index, bucket in enumerate(self._buckets):
            bucket.follow([None if counts is None else float(counts[index]) for counts in totals])
        self._count.follow([None if counts is None else float(counts[-1]) for counts in totals])
        self._sum.follow([None if source is None else source[1] for source in sources])
