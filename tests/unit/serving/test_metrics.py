"""The metrics of a front: sums over engine cores, and given back before its process ends, each before its family."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

import minisgl_backend
from minisgl_backend.delivery.responder import LatencyRecorder
from minisgl_backend.ipc.histogram import CANCELLATION_BOUNDS_S
from minisgl_backend.ipc.messages import HistogramCounts, Stats
from minisgl_backend.step import DraftStats


class Page:
    """Triton's side: the families and metrics that exist, in the order in which they began."""

    def __init__(self) -> None:
        self.families: list[str] = []
        self.metrics: list[str] = []
        self.values: dict[tuple[str, ...], float] = {}

    def family_class(self) -> type:
        page = self

        class Metric:
            def __init__(self, family: str, labels: dict[str, str]) -> None:
                self.family = family
                self.key = (family, *labels.values())
                page.metrics.append(family)

            def set(self, value: float) -> None:
                page.values[self.key] = value

            def increment(self, value: float) -> None:
                page.values[self.key] = page.values.get(self.key, 0.0) + value

            def __del__(self) -> None:
                assert self.family in page.families
                page.metrics.remove(self.family)

        class MetricFamily:
            COUNTER, GAUGE = range(2)

            def __init__(self, name: str, description: str, kind: int) -> None:
                self.name = name
                page.families.append(name)

            def Metric(self, labels: dict[str, str]) -> Metric:
                return Metric(self.name, labels)

            def __del__(self) -> None:
                page.families.remove(self.name)

        return MetricFamily


@pytest.fixture
def page() -> Page:
    return Page()


@pytest.fixture
def reporter(page: Page, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    backend = ModuleType("triton_python_backend_utils")
    backend.__dict__["MetricFamily"] = page.family_class()
    name = "minisgl_backend.serving.metrics"  # it imports that one
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend)
    responder = SimpleNamespace(last_sent=0.0, latency=LatencyRecorder())
    welcomes = [SimpleNamespace(max_seq_len=4096), SimpleNamespace(max_seq_len=2048)]
    client, commands = SimpleNamespace(num_cores=2, welcomes=welcomes), SimpleNamespace(num_refused=0)
    states = SimpleNamespace()
    states.show = partial(setattr, states, "shown")
    front = SimpleNamespace(responder=responder, client=client, commands=commands, adapter_states=states)
    yield importlib.import_module(name).MetricsReporter(front, is_leader=True, model="a/model")
    sys.modules.pop(name, None)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_nothing_is_left_of_the_metrics(reporter: Any, page: Page) -> None:
    assert "minisgl_inter_token_seconds_bucket" in page.metrics
    assert "minisgl_kv_pages" in page.families
    reporter.start()
    reporter.stop()
    assert page.metrics == []
    assert page.families == []


def test_what_is_served_and_since_when(reporter: Any, page: Page) -> None:
    assert page.values["minisgl_info", "a/model", minisgl_backend.__version__, "2048"] == 1
    assert abs(page.values["minisgl_start_time_seconds",] - time.time()) < 60
    reporter.start()
    reporter.stop()


def stats_of(generated: float, running: float, cancelled: int = 0) -> Any:
    values = {"total_generated_tokens": generated, "num_running": running, "num_waiting": 1.0, "restarts": 0.0}
    values |= {"pages_total": 100.0, "pages_leased": 10 * running}
    counts = [0] * (len(CANCELLATION_BOUNDS_S) + 1)
    counts[0] = cancelled
    seconds = HistogramCounts(counts=tuple(counts), sum=0.001 * cancelled)
    return Stats(values=values, histograms={"cancellation_seconds": seconds})


def test_slots_of_states_are_shown_of_models_that_have_some(reporter: Any, page: Page) -> None:
    engine = reporter._engine

    def with_states(**values: float) -> Any:
        stats = stats_of(0, 0)
        return msgspec.structs.replace(stats, values=stats.values | values)

    engine.report([with_states(states_total=0.0, total_state_misses=0.0), stats_of(0, 0)])
    assert not any("state" in family for family in page.families)
    engine.report([with_states(states_total=8.0, states_free=5.0, states_cached=2.0, states_owned=1.0)] * 2)
    engine.report([with_states(states_total=8.0, total_state_misses=64.0)] * 2)
    shown = [page.values["minisgl_states", state] for state in ("total", "free", "cached", "owned")]
    assert shown == [16, 10, 4, 2]
    assert page.values["minisgl_state_missed_tokens_total",] == 128
    del engine
    reporter.start()
    reporter.stop()


def test_images_are_counted_where_some_came(reporter: Any, page: Page) -> None:
    reporter._front.client.stats = lambda: [stats_of(0, 0)] * 2
    reporter._report(latencies=True)
    assert not any("image" in family for family in page.families)
    reporter._front.responder.latency.on_images(3, 0.015)
    for _ in range(2):
        reporter._report(latencies=True)
    assert page.values["minisgl_images_total",] == 3
    assert ("minisgl_image_decode_seconds_bucket", "0.01") not in page.values
    assert page.values["minisgl_image_decode_seconds_bucket", "0.02"] == 1
    assert page.values["minisgl_image_decode_seconds_sum",] == pytest.approx(0.015)
    reporter.start()
    reporter.stop()
    assert page.metrics == []


def test_adapters_are_shown_where_some_are_served(reporter: Any, page: Page) -> None:
    engine, stats = reporter._engine, stats_of(0, 0)
    engine.report([stats])
    assert not any("adapter" in family for family in page.families)
    values = {"adapters_open": 2.0, "adapters_waiting": 1.0, "total_adapter_loads": 5.0}
    engine.report([msgspec.structs.replace(stats, values=stats.values | values)] * 2)
    assert [page.values["minisgl_adapters", state] for state in ("open", "waiting")] == [4, 2]
    assert page.values["minisgl_adapter_loads_total",] == 10
    values["adapter_slots"] = 4.0
    for running in ("b,a", "c", "c"):
        figures = {name: {"slots": 1, "running": 2, "waiting": 0} for name in running.split(",")}
        adapters = figures | {"w": {"slots": 0, "running": 0, "waiting": 1}}
        cores = [msgspec.structs.replace(stats, values=stats.values | values, adapters=adapters), stats_of(0, 0)]
        engine.report(cores)
        reporter._front.client.stats = partial(list, cores)
        reporter._report(latencies=False)
    assert abs(page.values["minisgl_lora_requests_info", "4", "a,b", "w"] - time.time()) < 60
    assert abs(page.values["minisgl_lora_requests_info", "4", "c", "w"] - time.time()) < 60
    assert page.metrics.count("minisgl_lora_requests_info") == 1, "one for all labels"
    assert reporter._front.adapter_states.shown == {"c": "slot", "w": "host"}
    del engine
    reporter.start()
    reporter.stop()


def test_images_are_counted_of_models_that_see(reporter: Any, page: Page) -> None:
    engine, stats = reporter._engine, stats_of(0, 0)
    engine.report([stats])
    assert not any("encoder" in family or "image" in family for family in page.families)
    values = {"encoder_cache_bytes": 100.0, "encoder_used_bytes": 40.0, "total_encoder_misses": 3.0}
    values |= {"total_image_tokens": 700.0, "total_encoder_hits": 0.0}
    engine.report([msgspec.structs.replace(stats, values=stats.values | values)] * 2)
    assert [page.values["minisgl_encoder_cache_bytes", state] for state in ("used", "total")] == [80, 200]
    assert page.values["minisgl_encoder_cache_misses_total",] == 6
    assert page.values["minisgl_image_prompt_tokens_total",] == 1400
    assert "minisgl_encoder_cache_hits_total" not in page.families
    del engine
    reporter.start()
    reporter.stop()


def test_drafts_are_counted_by_position_from_the_first_on(reporter: Any, page: Page) -> None:
    engine = reporter._engine

    def with_drafts(*counts: float) -> Any:
        stats = stats_of(0, 0)
        speculation = DraftStats(int(counts[0]), drafted=(30, 20), accepted=(18, 9)) if counts else DraftStats()
        return msgspec.structs.replace(stats, values=stats.values | speculation.values())

    engine.report([with_drafts(), with_drafts()])
    assert not any("draft" in family for family in page.families)
    engine.report([with_drafts(30), with_drafts()])
    engine.report([with_drafts(30), with_drafts(30)])
    assert page.values["minisgl_drafts_total",] == 60
    assert page.values["minisgl_draft_tokens_total", "2"] == 40
    assert page.values["minisgl_accepted_draft_tokens_total", "1"] == 36
    assert ("minisgl_draft_tokens_total", "3") not in page.values
    del engine
    reporter.start()
    reporter.stop()


def test_tenants_have_series_of_their_own_as_long_as_they_are_few(reporter: Any, page: Page) -> None:
    engine = reporter._engine

    def of_tenants(*names: str) -> Any:
        keys = ("num_running", "num_waiting", "total_prompt_tokens", "total_generated_tokens")
        tenants = {name: dict(zip(keys, (1.0, 2.0, 30.0, 40.0), strict=True)) for name in names}
        return msgspec.structs.replace(stats_of(0, 0), tenants=tenants)

    engine.report([stats_of(0, 0), stats_of(0, 0)])
    assert not any("tenant" in family for family in page.families)
    engine.report([of_tenants("a", ""), of_tenants("a")])
    assert page.values["minisgl_tenant_generated_tokens_total", "a"] == 80
    assert page.values["minisgl_tenant_requests", "a", "waiting"] == 4
    assert page.values["minisgl_tenant_prompt_tokens_total", "others"] == 30
    engine.report([of_tenants("", *(f"t{number:03}" for number in range(100))), stats_of(0, 0)])
    labels = {key[1] for key in page.values if key[0] == "minisgl_tenant_requests"}
    assert len(labels) == 65
    assert page.values["minisgl_tenant_requests", "a", "running"] == 0
    assert page.values["minisgl_tenant_requests", "others", "running"] == 38
    del engine
    reporter.start()
    reporter.stop()


def test_figures_of_several_cores_are_summed_and_no_restart_takes_any_back(reporter: Any, page: Page) -> None:
    engine = reporter._engine
    engine.report([stats_of(100, 3, 2), stats_of(50, 1)])
    assert page.values["minisgl_generated_tokens_total",] == 150
    assert page.values["minisgl_requests_running",] == 4
    assert page.values["minisgl_requests_waiting",] == 2
    assert page.values["minisgl_cancellation_seconds_count",] == 2
    assert page.values["minisgl_core_requests", "0", "running"] == 3
    assert page.values["minisgl_kv_cache_usage_ratio",] == 0.2
    engine.report([None, stats_of(60, 2)])
    assert page.values["minisgl_generated_tokens_total",] == 160
    assert page.values["minisgl_requests_running",] == 2
    assert page.values["minisgl_core_up", "0"] == 0
    assert page.values["minisgl_core_up", "1"] == page.values["minisgl_engine_up",] == 1
    engine.report([stats_of(7, 1, 1), stats_of(60, 2, 4)])
    assert page.values["minisgl_generated_tokens_total",] == 167, "its counters began anew"
    assert page.values["minisgl_cancellation_seconds_bucket", "0.001"] == 7
    assert page.values["minisgl_core_up", "0"] == 1
    engine.report_dead()
    assert [page.values["minisgl_core_up", core] for core in "01"] == [0, 0]
    assert page.values["minisgl_engine_up",] == 0
    del engine
    reporter.start()
    reporter.stop()
