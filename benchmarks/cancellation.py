"""How fast clients that leave are gone from the engine: the real server, the null runner, half of the streams leaving.

    python -m benchmarks.cancellation [--json] [--streams 64] [--leave 32] [--rate 200] [--rounds 5] [--way WAY ...]

docs/operations.md explains the figures. With --json the last line is one JSON object. The exit code is 1 where a
sequence stayed longer than 2 steps and 50 ms after the server had found its client gone.
"""

from __future__ import annotations

import argparse
import json
import select
import selectors
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from tritonclient.grpc import service_pb2

from benchmarks.path_client import Connection, Exchange
from benchmarks.served import Served, command_line
from minisgl_backend.errors import EngineDeadError
from minisgl_backend.ipc.channel import FrontChannel
from minisgl_backend.ipc.histogram import CANCELLATION_BOUNDS_S
from minisgl_backend.ipc.messages import GetStats, Stats

HOST = "127.0.0.1"
WATCHER = 60000  # the index of a front that nobody else has
PATIENCE_S = 60.0
STEADY_S = 1.0  # of undisturbed streaming before anybody leaves
ENDLESS = 8000  # tokens
WAYS = ("grpc_cancel", "grpc_disconnect", "http_disconnect")


class CoreWatch:
    """Asks the core for its counters all the time, as a front that sends nothing else. Use it as a context."""

    def __init__(self, socket_dir: Path) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._channel = FrontChannel(self._context, socket_dir)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.seen: list[tuple[float, Stats]] = []  # time.monotonic() seconds, growing

    def __enter__(self) -> CoreWatch:
        if not self._channel.greet(WATCHER, round(PATIENCE_S * 1000)):
            raise EngineDeadError("the engine core does not answer")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._channel.close()
        self._context.term()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._channel.send(GetStats(front=WATCHER))
            if select.select([self._channel], [], [], 1.0)[0]:
                now = time.monotonic()
                self.seen += [(now, event) for event in self._channel.receive() if isinstance(event, Stats)]
            time.sleep(0.001)

    def last(self) -> Stats:
        return self.seen[-1][1]


class Crowd:
    """Streams over cheap connections, all read by one thread while it pumps."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._selector = selectors.DefaultSelector()
        self._http: dict[socket.socket, int] = {}  # bytes received
        self._exchanges: list[Exchange] = []

    def connect(self) -> Connection:
        """A gRPC connection."""
        connection = Connection(HOST, self._served.grpc_port)
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        return connection

    def start_grpc(self, connection: Connection, request: bytes) -> Exchange:
        exchange = Exchange(len(self._exchanges), request)
        self._exchanges.append(exchange)
        connection.start(exchange)
        return exchange

    def start_http(self, body: bytes) -> socket.socket:
        one = socket.create_connection((HOST, self._served.http_port))
        head = f"POST /v2/models/ensemble/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        one.sendall(head.encode() + body)
        self._http[one] = 0
        self._selector.register(one, selectors.EVENT_READ, None)
        return one

    def close(self, one: Connection | socket.socket) -> None:
        """Disconnects."""
        found = one.socket if isinstance(one, Connection) else one
        self._selector.unregister(found)
        self._http.pop(found, None)
        found.close()

    def pump(self, until: Callable[[], bool]) -> None:
        """Reads until the condition holds. Raises TimeoutError where it never does."""
        deadline = time.monotonic() + PATIENCE_S
        while not until():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {PATIENCE_S:g} s in vain")
            for key, _ in self._selector.select(0.005):
                if key.data is None:
                    assert isinstance(key.fileobj, socket.socket)
                    self._http[key.fileobj] += len(key.fileobj.recv(1 << 18))
                else:
                    key.data.receive()

    def all_started(self) -> bool:
        """Whether each stream has brought something."""
        return all(exchange.received for exchange in self._exchanges) and all(self._http.values())

    def close_all(self) -> None:
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            self.close(key.fileobj)
        self._selector.close()


@dataclass
class Seen:
    """What was seen of one way to leave; seconds."""

    gone: list[float] = field(default_factory=list)  # from the client's leaving to the core's count of it
    found_counts: list[int] = field(
        default_factory=lambda: [0] * (len(CANCELLATION_BOUNDS_S) + 1)
    )  # from finding to gone
    found_sum: float = 0.0
    late: int = 0

    def figures(self) -> dict[str, Any]:
        total = sum(self.found_counts)
        below = np.cumsum(self.found_counts)
        bounds_ms = [*(bound * 1e3 for bound in CANCELLATION_BOUNDS_S), float("inf")]
        return {
            "left": len(self.gone),
            "gone_ms": {
                **{f"p{percent}": round(float(np.percentile(self.gone, percent)) * 1e3, 1) for percent in (50, 90, 99)},
                "max": round(max(self.gone) * 1e3, 1),
            },
            "found": total,
            "found_to_gone_ms": {
                "mean": round(self.found_sum / max(1, total) * 1e3, 2),
                "p99_below": bounds_ms[int(np.searchsorted(below, 0.99 * total))],
            },
            "late": self.late,
        }


def main() -> int:
    options = _parse_arguments()
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="minisgl-cancellation-") as folder:
        flags = ["--runner", "null", "--null-runner-rate", str(options.rate), "--exit-timeout", "5"]
        with Served(*flags, *options.server, log=Path(folder) / "log") as served:
            words = command_line(served.core()).split()
            with CoreWatch(Path(words[words.index("--socket-dir") + 1])) as watch:
                for way in options.way:
                    seen = Seen()
                    for _ in range(options.rounds):
                        _round(served, watch, way, options.streams, options.leave, options.spacing / 1000, seen)
                    report[way] = seen.figures()
                    print(f"{way:>18}  {report[way]}", flush=True)
    if options.json:
        print(json.dumps(report))
    return 1 if any(figures["late"] for figures in report.values()) else 0


def _round(
    served: Served, watch: CoreWatch, way: str, num_streams: int, num_leave: int, spacing_s: float, seen: Seen
) -> None:
    crowd = Crowd(served)
    try:
        crowd.pump(lambda: watch.last().values["pages_leased"] == 0 if watch.seen else False)
        leaves = _start_leavers(crowd, way, num_leave)
        stays = crowd.connect()
        for _ in range(num_streams - num_leave):
            crowd.start_grpc(stays, grpc_request())
        crowd.pump(crowd.all_started)
        steady = time.monotonic() + STEADY_S
        crowd.pump(lambda: time.monotonic() > steady)
        before = watch.last()
        first = len(watch.seen)
        left: list[float] = []
        for leave in leaves:
            left += [time.monotonic()] * (num_leave // len(leaves))
            leave()
            if spacing_s:
                due = time.monotonic() + spacing_s
                crowd.pump(lambda: time.monotonic() > due)
        crowd.pump(lambda: _num_gone(watch.last()) >= _num_gone(before) + num_leave)
        _note(seen, left, before, watch.seen[first:], num_leave)
    finally:
        crowd.close_all()


def _start_leavers(crowd: Crowd, way: str, count: int) -> list[Callable[[], None]]:
    """What each of them does to leave."""

    def closes(one: Connection | socket.socket) -> Callable[[], None]:
        return lambda: crowd.close(one)

    def cancels(one: Exchange) -> Callable[[], None]:
        return lambda: connection.cancel(one)

    if way == "http_disconnect":
        return [closes(crowd.start_http(http_request())) for _ in range(count)]
    connection = crowd.connect()
    exchanges = [crowd.start_grpc(connection, grpc_request()) for _ in range(count)]
    return [closes(connection)] if way == "grpc_disconnect" else [cancels(one) for one in exchanges]


def _note(seen: Seen, left: Sequence[float], before: Stats, samples: Sequence[tuple[float, Stats]], count: int) -> None:
    """The k-th to leave is compared with the k-th that was gone, which says the same of all of them together."""
    moments = np.array([moment for moment, _ in samples])
    totals = np.array([_num_gone(stats) - _num_gone(before) for _, stats in samples])
    gone = moments[np.searchsorted(totals, np.arange(1, count + 1))]
    seen.gone += (gone - np.sort(left)).tolist()
    last, first = samples[-1][1].histograms["cancellation_seconds"], before.histograms["cancellation_seconds"]
    counts = zip(seen.found_counts, last.counts, first.counts, strict=True)
    seen.found_counts = [have + now - then for have, now, then in counts]
    seen.found_sum += last.sum - first.sum
    seen.late += int(samples[-1][1].values["total_cancelled_late"] - before.values["total_cancelled_late"])


def _num_gone(stats: Stats) -> int:
    """Cancelled sequences whose pages have returned."""
    return sum(stats.histograms["cancellation_seconds"].counts)


def grpc_request() -> bytes:
    message = service_pb2.ModelInferRequest(model_name="ensemble")
    text = message.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
    text.contents.bytes_contents.append(b"Tell me a long story.")
    message.inputs.add(name="max_tokens", datatype="INT32", shape=[1, 1]).contents.int_contents.append(ENDLESS)
    for name in ("stream", "ignore_eos"):
        message.inputs.add(name=name, datatype="BOOL", shape=[1, 1]).contents.bool_contents.append(True)
    return bytes(message.SerializeToString())


def http_request() -> bytes:
    body = {"text_input": "Tell me a long story.", "max_tokens": ENDLESS, "stream": True, "ignore_eos": True}
    return json.dumps(body).encode()


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--leave", type=int, default=32, help="how many of them leave [%(default)s]")
    parser.add_argument("--rate", type=float, default=200.0, help="tokens a second of each stream [%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="of each way to leave [%(default)s]")
    parser.add_argument("--spacing", type=float, default=0.0, help="ms between two that leave [%(default)s]")
    parser.add_argument("--way", nargs="+", choices=WAYS, default=WAYS, help="[all]")
    parser.add_argument("--json", action="store_true", help="the report as one JSON object on the last line")
    parser.add_argument("--server", nargs=argparse.REMAINDER, default=[], help="further options of scripts/serve.sh")
    options = parser.parse_args()
    if not 0 < options.leave <= options.streams or options.rate <= 0 or options.rounds < 1 or options.spacing < 0:
        parser.error("--leave: allowed: 1 to --streams; --rate and --rounds: above 0; --spacing: 0 or more")
    return options


if __name__ == "__main__":
    sys.exit(main())
