"""Histograms of the time to the first token and between tokens, cheap enough for every token."""

from __future__ import annotations

import threading
import time

from minisgl_backend.delivery.stream import SequenceStream
from minisgl_backend.ipc.histogram import Histogram

FIRST_TOKEN_BOUNDS_S = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
INTER_TOKEN_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class LatencyRecorder:
    """Times as they are when a responder thread takes tokens over; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.first_token = Histogram(FIRST_TOKEN_BOUNDS_S)
        self.inter_token = Histogram(INTER_TOKEN_BOUNDS_S)

    def on_tokens(self, sequence: SequenceStream, num_tokens: int) -> None:
        """`num_tokens` of the sequence are about to be sent; several at once share their time."""
        now, last = time.monotonic(), sequence.last_sent
        sequence.last_sent = now
        stream = sequence.stream
        with self._lock:
            if not stream.started:
                stream.started = True
                self.first_token.observe((time.time_ns() - stream.arrival_ns) / 1e9)
            if last:
                self.inter_token.observe((now - last) / num_tokens, num_tokens)
            else:
                self.inter_token.observe(0.0, num_tokens - 1)
