"""Passes on the server's own metrics: one page to scrape, the same for any number of workers."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence

from minisgl_backend.openai.errors import ApiError

log = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 5.0
_FRESH_SECONDS = 0.2  # the server's values change no faster
_PARTS = ("bucket", "sum", "count")
_ABOUT = re.compile(r"# (?:HELP|TYPE) (\S+)")
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)")  # name, labels, value
_LE = re.compile(r'\ble="([^"]*)"')
_DOWN = re.compile(r"^minisgl_engine_up(?:\{[^}]*\})? 0(?:\.0*)?$", re.MULTILINE)


def with_histograms(page: str) -> str:
    """The page with families X_bucket, X_sum and X_count of counters made one histogram X, ordered by `le`.

    Triton's own histograms would take a call for each observation. Its counters change one after the other, so that a
    bucket may lag behind a smaller one: each counts as much as those below it.
    """
    families: dict[str, list[str]] = {}
    for line in page.splitlines():
        found = _ABOUT.match(line) or _SAMPLE.match(line)
        families.setdefault(found[1] if found else "", []).append(line)
    made: list[str] = []
    for name, lines in families.items():
        base, _, part = name.rpartition("_")
        parts = [families.get(f"{base}_{of}") for of in _PARTS]
        if part not in _PARTS or not all(
            of and f"# TYPE {base}_{at} counter" in of for of, at in zip(parts, _PARTS, strict=True)
        ):
            made += lines
        elif part == _PARTS[0]:
            made += _histogram(base, families)
    return "\n".join((*made, ""))


def _histogram(base: str, families: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The lines of one family."""
    buckets: dict[str, list[tuple[float, str, float]]] = {}  # by the other labels: `le`, its text, the count
    for line in families[f"{base}_bucket"]:
        if (found := _SAMPLE.match(line)) and (bound := _LE.search(found[2] or "")):
            others = _LE.sub("", found[2]).strip(",")
            buckets.setdefault(others, []).append((float(bound[1]), bound[1], float(found[3])))
        elif line.startswith("# HELP "):
            yield line.replace(f"{base}_bucket", base, 1)
    yield f"# TYPE {base} histogram"
    for others, counts in buckets.items():
        most = 0.0
        for _, le, count in sorted(counts):
            most = max(most, count)
            yield f'{base}_bucket{{{others}{"," if others else ""}le="{le}"}} {most:.0f}'
        labels = f"{{{others}}}" if others else ""
        for line in families[f"{base}_sum"]:
            if (found := _SAMPLE.match(line)) and (found[2] or "") == others:
                yield line
        yield f"{base}_count{labels} {most:.0f}"


class ServerMetrics:
    """Fetches the metrics, at most a few times a second for all callers."""

    def __init__(self, address: str) -> None:
        """`address`: HOST:PORT; "": there are none."""
        self._address = address
        self._text = ""
        self._fetched_at = 0.0
        self._lock = asyncio.Lock()
        self._is_told = False  # that there are none

    async def text(self) -> str:
        """Raises ApiError if the server does not answer, or has no metrics."""
        if not self._address:
            raise ApiError(404, "this endpoint does not know where the server's metrics are")
        async with self._lock:
            if time.monotonic() - self._fetched_at > _FRESH_SECONDS:
                self._text = await asyncio.to_thread(self._fetch)
                self._fetched_at = time.monotonic()
            return self._text

    async def engine_is_down(self) -> bool:
        """True if the server's metrics say so; they may be out of reach while the server answers."""
        if not self._address:
            return False
        try:
            text = await self.text()
        except ApiError:
            if not self._is_told:
                self._is_told = True
                log.warning("/health cannot tell if the engine is down: no metrics at %s (--metrics)", self._address)
            return False
        return _DOWN.search(text) is not None

    def _fetch(self) -> str:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://{self._address}/metrics", timeout=_TIMEOUT_SECONDS) as reply:
                return with_histograms(str(reply.read().decode("utf-8", "replace")))
        except (urllib.error.URLError, OSError):
            raise ApiError(503, "the server's metrics cannot be reached", code="unavailable") from None
