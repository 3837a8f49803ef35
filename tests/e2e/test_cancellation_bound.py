"""64 streams, half of them cancelled in each way a client has: each is gone, with its pages, within the bound.

The bound is two steps and 50 ms from the moment at which the server finds that the client has left. The engine counts
who stays longer (`minisgl_requests_cancelled_late_total`), in steps as long as they were, and this count is judged;
the page /metrics follows in its own time. The other half must bring its whole text.

A machine that is busy elsewhere, or stops a process for 50 ms, only ever adds to these times. So the best of some
attempts counts. One bad attempt may be such a stop that the test's own thread did not feel; two are not. Where the
machine was late for that thread in nearly all of them, nothing can be said.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from client import Client, TextStream
from tests.e2e.wire import Server, all_pages_are_back

pytestmark = pytest.mark.e2e

STREAMS = 64
SEEN_SECONDS = 5.0  # from leaving to the page; an idle machine needs half a second, and the streams would run for 20
HOPELESS_SECONDS = 60.0
ATTEMPTS = 10
BAD_ATTEMPTS = 2  # that the machine does not excuse
STALL_SECONDS = 0.02  # a machine on which a thread is called this late does not keep 50 ms either
LONG, SHORT = 4000, 300
PROMPT = "Tell me a long story."


@dataclass(frozen=True)
class Attempt:
    """What half of the streams' leaving looked like."""

    late: float  # sequences that stayed too long after they were found
    seconds: float  # until the page showed all of them gone
    stall: float  # seconds that the machine was late for this process

    @property
    def good(self) -> bool:
        return not self.late and self.seconds < SEEN_SECONDS

    @property
    def bad(self) -> bool:
        return not self.good and self.stall <= STALL_SECONDS


class Yardstick:
    """Measures how late the machine calls a thread that sleeps. Use it as a context."""

    def __init__(self) -> None:
        self.stall = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Yardstick:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stopping.is_set():
            due = max(due + 0.005, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            self.stall = max(self.stall, time.monotonic() - due)


@pytest.fixture
def client(null_server: Server) -> Iterator[Client]:
    with Client(f"127.0.0.1:{null_server.grpc}", timeout=120.0) as found:
        yield found


def started(client: Client, count: int, max_tokens: int) -> list[TextStream]:
    """Streams of which the first piece has come."""
    streams = [client.stream(PROMPT, max_tokens=max_tokens, ignore_eos=True) for _ in range(count)]
    for stream in streams:
        next(stream)
    return streams


def leave_by_grpc_cancel(server: Server, stack: contextlib.ExitStack) -> Callable[[], None]:
    client = stack.enter_context(Client(f"127.0.0.1:{server.grpc}", timeout=120.0))
    streams = started(client, STREAMS // 2, LONG)

    def leave() -> None:
        for stream in streams:
            stream.close()

    return leave


def leave_by_grpc_disconnect(server: Server, stack: contextlib.ExitStack) -> Callable[[], None]:
    client = stack.enter_context(Client(f"127.0.0.1:{server.grpc}", timeout=120.0))
    streams = started(client, STREAMS // 2, LONG)

    def leave() -> None:
        client.close()
        assert streams

    return leave


def leave_by_http_disconnect(server: Server, stack: contextlib.ExitStack) -> Callable[[], None]:
    connections: list[socket.socket] = [
        stack.enter_context(server.open_stream(text_input=PROMPT, max_tokens=LONG, ignore_eos=True))
        for _ in range(STREAMS // 2)
    ]

    def leave() -> None:
        for connection in connections:
            connection.close()

    return leave


@pytest.mark.parametrize("beside", [0, STREAMS // 2], ids=["alone", "beside others"])
@pytest.mark.parametrize("way", [leave_by_grpc_cancel, leave_by_grpc_disconnect, leave_by_http_disconnect])
def test_half_of_64_streams_leave(
    null_server: Server,
    client: Client,
    way: Callable[[Server, contextlib.ExitStack], Callable[[], None]],
    beside: int,
) -> None:
    expected = client.generate(PROMPT, max_tokens=SHORT, ignore_eos=True).text
    attempts: list[Attempt] = []
    for _ in range(ATTEMPTS):
        attempts.append(half_leave(null_server, client, way, beside, expected))
        print(f"{way.__name__}, {beside} beside: {attempts[-1]}")
        if attempts[-1].good:
            return
        assert sum(attempt.bad for attempt in attempts) < BAD_ATTEMPTS, attempts
    pytest.skip(f"the machine was too busy to tell: {attempts}")


def half_leave(
    server: Server,
    client: Client,
    way: Callable[[Server, contextlib.ExitStack], Callable[[], None]],
    beside: int,
    expected: str,
) -> Attempt:
    """Checks texts, counts and pages whatever the machine does; what depends on its speed is returned."""
    server.wait_for(lambda found: found["minisgl_requests_running"] == 0)
    before = server.metrics()

    def change(found: dict[str, float], name: str) -> float:
        return found[name] - before.get(name, 0.0)

    with contextlib.ExitStack() as stack:
        leave = way(server, stack)
        others = started(client, beside, SHORT)
        with Yardstick() as yardstick:
            leave()
            seconds = server.wait_for(
                lambda found: change(found, "minisgl_cancellation_seconds_count") == STREAMS // 2, HOPELESS_SECONDS
            )
        for stream in others:
            assert stream.result().text == expected
    found = server.metrics_when(all_pages_are_back)
    assert change(found, "minisgl_requests_cancelled_total") == STREAMS // 2
    assert change(found, "minisgl_cancellation_seconds_count") == STREAMS // 2
    return Attempt(change(found, "minisgl_requests_cancelled_late_total"), seconds, yardstick.stall)
