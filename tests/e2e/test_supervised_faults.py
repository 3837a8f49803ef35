"""What dies or hangs under scripts/serve.sh: who waits is told, readiness is true, it comes back, nothing is left.

One server for all tests, without a model: 30 tokens a second for each stream.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.served import Served, Traces, fetch
from client import Client, ClientError, Unavailable
from minisgl_backend.errors import ConfigError
from minisgl_backend.host.triton_server import find_triton_server
from tests.e2e.wire import DEATH

pytestmark = pytest.mark.e2e

SECRET = "xyzzy plugh"  # a prompt that no log may hold
BACK_SECONDS = 100.0  # an idle machine needs five to ten
NOTICED_SECONDS = 15.0  # an idle machine needs a tenth of one
EXIT_SECONDS = 12  # of these, four fifths are for what can be finished


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    try:
        find_triton_server()
    except ConfigError as error:
        pytest.skip(str(error))
    log = tmp_path_factory.mktemp("served") / "log"
    with Served("--runner", "null", "--null-runner-rate", "30", "--exit-timeout", str(EXIT_SECONDS), log=log) as server:
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    served.wait(served.ready, BACK_SECONDS)
    with Client(served.grpc, timeout=90.0) as found:
        yield found


class Waiting:
    """A stream that is being read on a thread of its own."""

    def __init__(self, client: Client, max_tokens: int) -> None:
        self.text, self.error, self.ended = "", None, 0.0
        self._stream = client.stream(SECRET, max_tokens=max_tokens, ignore_eos=True)
        self.text = next(self._stream).text
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            for chunk in self._stream:
                self.text += chunk.text
        except ClientError as error:
            self.error: ClientError | None = error
        self.ended = time.monotonic()

    def join(self) -> None:
        self._thread.join(120.0)
        assert not self._thread.is_alive(), "a stream hangs"


class Deaths:
    """What the supervisor has said of deaths, from now on."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._before = self._said()

    def noticed(self) -> bool:
        """Not ready or, where it is ready again before anybody has asked, one more death in the log."""
        return not self._served.ready() or self._said() > self._before

    def _said(self) -> int:
        return len(re.findall(DEATH, self._served.read_log()))


def works(client: Client) -> bool:
    return len(client.generate("Hello", max_tokens=20, ignore_eos=True).text) > 20


def test_a_killed_core(served: Served, client: Client) -> None:
    # It is soon back: on a slow machine, before anybody has asked what it is like without one.
    assert any(kill_core(served, client) for _ in range(5)), "neither readiness nor a new request tells of its death"


def kill_core(served: Served, client: Client) -> bool:
    """Whether readiness and then a new request told of its death once all who waited were told."""
    streams = [Waiting(client, 3000) for _ in range(8)]
    os.kill(served.core(), signal.SIGKILL)
    killed = time.monotonic()
    for stream in streams:
        stream.join()
        assert isinstance(stream.error, Unavailable)
        assert "starts again by itself" in str(stream.error)
    told = max(stream.ended for stream in streams) - killed
    telling = "engine" in str(served.readiness().get("reason")) and is_refused(client)
    served.wait(served.ready, BACK_SECONDS)
    print(f"all told after {told:.2f} s, serving again after {time.monotonic() - killed:.1f} s")
    assert works(client), "ready means that the next request is served"
    served.wait(lambda: served.value("minisgl_requests_running") == 0)
    return telling


def is_refused(client: Client) -> bool:
    """Whether a new request hears that there is no engine."""
    try:
        client.generate("Hello", max_tokens=1)
    except Unavailable as error:
        return "engine" in str(error)
    return False


def test_a_stopped_core_counts_as_dead(served: Served, client: Client) -> None:
    stream = Waiting(client, 3000)
    os.kill(served.core(), signal.SIGSTOP)
    stream.join()
    assert isinstance(stream.error, Unavailable)
    served.wait(served.ready, BACK_SECONDS)
    assert works(client)


def test_a_killed_tokenizer_is_replaced_beside_running_streams(served: Served, client: Client) -> None:
    stream = Waiting(client, 150)
    expected = client.generate(SECRET, max_tokens=150, ignore_eos=True).text
    stream.join()
    stream = Waiting(client, 150)
    core, deaths = served.core(), Deaths(served)
    os.kill(served.stubs("tokenizer")[0], signal.SIGKILL)
    served.wait(deaths.noticed, NOTICED_SECONDS)
    served.wait(served.ready, BACK_SECONDS)
    assert works(client)
    assert served.core() == core
    stream.join()
    assert (stream.error, stream.text) == (None, expected)


def test_a_killed_detokenizer_is_replaced(served: Served, client: Client) -> None:
    streams = [Waiting(client, 3000) for _ in range(32)]
    core, deaths = served.core(), Deaths(served)
    os.kill(served.stubs("detokenizer")[0], signal.SIGKILL)
    killed = time.monotonic()
    served.wait(deaths.noticed, NOTICED_SECONDS)
    for stream in streams:
        stream.join()
        assert isinstance(stream.error, Unavailable)
    told = max(stream.ended for stream in streams) - killed
    assert told < 16, "at once, not one stream a second"
    served.wait(served.ready, BACK_SECONDS)
    print(f"all told after {told:.2f} s, serving again after {time.monotonic() - killed:.1f} s")
    assert works(client)
    if served.core() != core:  # tritonserver itself died of the reload (seen twice), and was started again
        said = served.read_log()
        explained = "the server died" in said or "reloading detokenizer failed" in said
        assert explained, f"the server was restarted:\n{said[-4000:]}"
    served.wait(lambda: served.value("minisgl_kv_pages", state="leased") == 0, 60.0)


def test_a_killed_engine_front_restarts_the_server(served: Served, client: Client) -> None:
    streams = [Waiting(client, 3000) for _ in range(4)]
    traces, deaths = Traces(served), Deaths(served)
    os.kill(served.stubs("engine")[0], signal.SIGKILL)
    for stream in streams:
        stream.join()
        assert stream.error is not None
    served.wait(deaths.noticed, NOTICED_SECONDS)
    served.wait(served.ready, BACK_SECONDS)
    assert works(client)
    served.wait(lambda: not traces.left())


def test_the_sockets_are_private(served: Served, client: Client) -> None:
    assert works(client)
    words = Path(f"/proc/{served.core()}/cmdline").read_bytes().decode().split("\0")
    directory = Path(words[words.index("--socket-dir") + 1])
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert directory.stat().st_uid == os.getuid()


def test_models_cannot_be_loaded_from_outside(served: Served, client: Client) -> None:
    for verb in ("load", "unload"):
        status, _ = fetch(f"http://{served.http}/v2/repository/models/engine/{verb}", {})
        assert status in (400, 403)
    assert works(client)


# The last test of the file: it ends the server.
def test_sigterm_ends_all_within_the_exit_timeout_and_leaves_nothing(served: Served, client: Client) -> None:
    served.wait(lambda: served.value("minisgl_kv_pages", state="total") > 0)
    traces = Traces(served)
    short, long = Waiting(client, 60), Waiting(client, 4000)
    served.process.send_signal(signal.SIGTERM)
    short.join()
    assert short.error is None, "what can be finished in time is finished"
    long.join()
    assert isinstance(long.error, Unavailable)
    assert "shutting down" in str(long.error)
    assert served.process.wait(60.0) == 0
    assert traces.left() == []
    log = served.read_log()
    assert SECRET not in log
    assert not re.search(r"Traceback", log)
