"""The server's metrics as numbers.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .errors import Unavailable

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")


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
        """The sum over the matching samples; None where there are none."""
        values = [sample.value for sample in self.select(name, **labels)]
        return sum(values) if values else None

    def names(self) -> list[str]:
        return sorted({sample.name for sample in self.samples})


def parse_metrics(text: str) -> Metrics:
    """Reads an exposition page; lines of no known form are skipped."""
    samples = []
    for line in text.splitlines():
        match = _SAMPLE.match(line.strip())
        if match is None:
            continue
        labels = {name: _ESCAPE.sub(_unescape, value) for name, value in _LABEL.findall(match["labels"] or "")}
        try:
            samples.append(Sample(match["name"], labels, float(match["value"])))
        except ValueError:
            continue
    return Metrics(samples)


def fetch_metrics(url: str, timeout: float = 5.0) -> Metrics:
    """Scrapes `url` (http://HOST:8002/metrics). Raises Unavailable."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout) as response:
            return parse_metrics(response.read().decode())
    except (OSError, ValueError) as error:
        raise Unavailable(f"no metrics from {url}: {error}") from None


def _unescape(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]
