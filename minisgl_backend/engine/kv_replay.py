"""Sends KV event batches again to subscribers that missed some, at a bounded cost.

Anyone who reaches the socket may ask, without authentication. So the cost of a reply is bounded in every way: requests
are small, one is answered at a time, a client that does not read loses its reply, and all of it takes no more than a
share of one processor, in pieces so short that they hardly delay the engine, which shares the interpreter's lock (GIL).
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque

import zmq

KEPT_BATCHES = 10_000
KEPT_BYTES = 64 << 20
MAX_REQUEST_BYTES = 512  # per part, and for ZMTP's READY with an id of up to 255 bytes; larger ones end the connection
QUEUED_BATCHES = 64  # per asking subscriber, apart from the operating system's buffers
READER_WAIT_S = 1.0  # how long a client that does not read delays those after it
RETRY_S = 0.01
PIECE_BATCHES = 16  # between two pauses
SHARE = 0.1  # of one processor's time
POLL_MS = 200
END = (-1).to_bytes(8, "big", signed=True)

log = logging.getLogger(__name__)


class KVReplay:
    """Keeps the latest batches, and answers on a thread. `keep` is called by one thread and never waits for a reply."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._router.setsockopt(zmq.SNDHWM, QUEUED_BATCHES)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # reports clients that are gone or have no room
        self._kept: deque[tuple[int, bytes]] = deque()  # consecutive numbers and payloads
        self._kept_bytes = 0
        self._lock = threading.Lock()  # guards the two above
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-replay", daemon=True)

    def start(self, address: str) -> None:
        """Listens at `address`. Raises zmq.ZMQError where that is not possible."""
        self._router.bind(address)
        self._thread.start()

    def keep(self, number: int, payload: bytes) -> None:
        """Adds the next batch. The oldest ones go beyond KEPT_BATCHES or KEPT_BYTES."""
        with self._lock:
            self._kept.append((number, payload))
            self._kept_bytes += len(payload)
            while len(self._kept) > KEPT_BATCHES or self._kept_bytes > KEPT_BYTES:
                self._kept_bytes -= len(self._kept.popleft()[1])

    def close(self, linger_ms: int) -> None:
        """Ends the thread and the socket, which may take `linger_ms` for messages still to be sent."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self._router.close(linger=linger_ms)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                if self._router.poll(POLL_MS):
                    self._answer(self._router.recv_multipart())
            except zmq.ZMQError as error:
                log.warning("a request for KV events could not be answered: %s", error)
                self._closing.wait(RETRY_S)

    def _answer(self, frames: list[bytes]) -> None:
        used = time.thread_time()
        if len(frames) == 3 and len(frames[2]) == 8:
            client, start = frames[0], int.from_bytes(frames[2], "big")
            stop = self._next_number()  # what is published meanwhile is not part of the reply
            while start < stop and (piece := self._piece(start, stop)):
                for number, payload in piece:
                    if not self._send(client, number.to_bytes(8, "big"), payload):
                        return
                start = piece[-1][0] + 1
                used = self._pause(used)
            self._send(client, END, b"")
        else:
            log.debug("a request for KV events is not [empty, number of 8 bytes]")
        self._pause(used)

    def _next_number(self) -> int:
        with self._lock:
            return self._kept[-1][0] + 1 if self._kept else 0

    def _piece(self, start: int, stop: int) -> list[tuple[int, bytes]]:
        """The first few of the batches `start` to `stop` - 1 that are still kept."""
        with self._lock:
            if not self._kept:
                return []
            first = self._kept[0][0]
            low, high = max(start - first, 0), min(stop - first, len(self._kept))
            return list(itertools.islice(self._kept, low, min(high, low + PIECE_BATCHES)))

    def _send(self, client: bytes, number: bytes, payload: bytes) -> bool:
        """False if the client has gone or does not read."""
        deadline = time.monotonic() + READER_WAIT_S
        while True:
            try:
                self._router.send_multipart((client, b"", number, payload), zmq.DONTWAIT)
                return True
            except zmq.Again:
                if time.monotonic() >= deadline or self._closing.wait(RETRY_S):
                    return False
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                return False

    def _pause(self, used: float) -> float:
        """Waits until this thread's time since `used`, a time.thread_time(), is within its share; returns the current
        one."""
        now = time.thread_time()
        self._closing.wait((now - used) * (1 / SHARE - 1))
        return now
