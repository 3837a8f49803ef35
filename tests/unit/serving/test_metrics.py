"""The metrics of a front are given back before its process ends, each before the family that it belongs to."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from minisgl_backend.delivery.latency import LatencyRecorder


class Page:
    """Triton's side: the families and metrics that exist, in the order in which they began."""

    def __init__(self) -> None:
        self.families: list[str] = []
        self.metrics: list[str] = []

    def family_class(self) -> type:
        page = self

        class Metric:
            def __init__(self, family: str) -> None:
                self.family = family
                page.metrics.append(family)

            def __del__(self) -> None:
                assert self.family in page.families
                page.metrics.remove(self.family)

        class MetricFamily:
            COUNTER, GAUGE = range(2)

            def __init__(self, name: str, description: str, kind: int) -> None:
                self.name = name
                page.families.append(name)

            def Metric(self, labels: dict[str, str]) -> Metric:
                return Metric(self.name)

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
    front = SimpleNamespace(latency=LatencyRecorder())
    yield importlib.import_module(name).MetricsReporter(front, is_leader=True)
    sys.modules.pop(name, None)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_nothing_is_left_of_the_metrics(reporter: Any, page: Page) -> None:
    assert "minisgl_inter_token_seconds_bucket" in page.metrics
    assert "minisgl_kv_pages" in page.families
    reporter.start()
    reporter.stop()
    assert page.metrics == []
    assert page.families == []
