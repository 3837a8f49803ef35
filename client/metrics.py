"""The server's metrics as numbers.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import contextlib
import http.client
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .errors import Unavailable


@dataclass(frozen=True)
class Sample:
    """One line of the page."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class Metrics:
    """All samples of one scrape."""

    samples: Sequence[Sample]

    def select(self, name: str, **labels: str) -> Iterator[Sample]:
        """The samples of this name that carry all of these labels."""
        for sample in self.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                yield sample

    def value(self, name: str, **labels: str) -> float | None:
        """The sum over the matching samples; None if there are none."""
        values = [sample.value for sample in self.select(name, **labels)]
        return sum(values) if values else None

    def names(self) -> list[str]:
        return sorted({sample.name for sample in self.samples})


def parse_metrics(text: str) -> Metrics:
    """Reads an exposition page; unknown lines are skipped."""
    from prometheus_client.parser import text_string_to_metric_families  # extra `client`: `minisgl serve` may lack it

    samples = []
    for line in text.splitlines():  # one by one: after its TYPE a counter is renamed, and a wrong line ends the reading
        with contextlib.suppress(ValueError, IndexError, OverflowError):
            for family in text_string_to_metric_families(line):
                samples += [Sample(found.name, found.labels, float(found.value)) for found in family.samples]
    return Metrics(samples)


def fetch_metrics(url: str, timeout: float = 5.0) -> Metrics:
    """Scrapes `url` (http://HOST:8002/metrics). Raises Unavailable."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout) as response:
            return parse_metrics(response.read().decode())
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise Unavailable(f"no metrics from {url}: {str(error).strip()}") from None
