"""What the supervisor tells fronts: drain before the server stops, and end streams whose detokenizer has died."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from minisgl_backend.config import EngineConfig
from minisgl_backend.delivery.frontend import EngineFront
from minisgl_backend.host.drain import LAST_CHUNK_SECONDS, drain
from minisgl_backend.host.drain import main as drain_command
from minisgl_backend.ipc.channel import live_socket_directories, socket_directory
from minisgl_backend.ipc.wire import Chunk, EngineRequest, OutputOptions
from minisgl_backend.process.status_files import (
    ask_to_drain,
    fronts_not_drained,
    fronts_without_core,
    note_lost,
    up_mark,
)
from minisgl_backend.request import FinishReason, SamplingParams
from minisgl_backend.text.vocabulary import Vocabulary
from tests.unit.delivery.fake_engine import FakeEngine, Recorder, anything

LETTERS = Vocabulary(
    lambda ids, skip: bytes(ids).decode("utf-8", "replace"),
    [bytes([i]) for i in range(256)],
    frozenset(),
    byte_exact=True,
)


@pytest.fixture
def front(tmp_path: Path) -> Iterator[EngineFront]:
    (tmp_path / "front-0").touch()  # stands for its socket
    found = EngineFront(EngineConfig(), LETTERS, front=0, socket_dir=tmp_path, probe=anything, make_client=FakeEngine)
    found.start()
    yield found
    found.close()


def ask(
    front: EngineFront,
    ids: tuple[int, ...] = (1, 2),
    *,
    stream: bool = False,
    confirmed: bool = False,
    **params: object,
) -> Recorder:
    sender = Recorder()
    spec = EngineRequest(params=SamplingParams(**params), options=OutputOptions(stream=stream))  # type: ignore[arg-type]
    front.submit(sender, np.array(ids, dtype=np.int32), spec, confirmed=confirmed)
    return sender


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def refused(front: EngineFront) -> bool:
    sender = ask(front)
    return sender.ended and sender.error == ("UNAVAILABLE", "the server is shutting down")


def test_what_runs_is_finished_and_nothing_new_begins(front: EngineFront, tmp_path: Path) -> None:
    running = ask(front)
    uid = front.client.requests[0].uid
    ask_to_drain(tmp_path, time.monotonic() + 600)
    wait_for(lambda: refused(front))
    for request in front.client.requests[1:]:  # those that came before the front had heard of it
        front.client.give((request.uid, 65, int(FinishReason.LENGTH)))
    assert fronts_not_drained(tmp_path) == 1
    front.client.give((uid, 65, int(FinishReason.LENGTH)))
    running.wait_end()
    assert running.error is None
    wait_for(lambda: fronts_not_drained(tmp_path) == 0)


def test_a_request_that_comes_while_the_last_stream_is_looked_for_is_refused(
    front: EngineFront, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was let in before, and nobody waits for it."""
    new_uid = front.client.new_uid

    def late(count: int) -> int:
        ask_to_drain(tmp_path, time.monotonic() + 600)
        wait_for(lambda: fronts_not_drained(tmp_path) == 0)
        return new_uid(count)

    monkeypatch.setattr(front.client, "new_uid", late)
    sender = ask(front)
    sender.wait_end()
    assert sender.error == ("UNAVAILABLE", "the server is shutting down")


def test_what_does_not_end_in_time_is_ended(front: EngineFront, tmp_path: Path) -> None:
    running = ask(front)
    ask_to_drain(tmp_path, time.monotonic())
    running.wait_end()
    assert running.error == ("UNAVAILABLE", "the server is shutting down")
    wait_for(lambda: fronts_not_drained(tmp_path) == 0)


@pytest.mark.parametrize("started", [False, True])
def test_streams_end_past_a_detokenizer_that_died(front: EngineFront, tmp_path: Path, started: bool) -> None:
    sender = ask(front, stream=True, confirmed=True)
    if started:
        front.client.give((front.client.requests[0].uid, 65, 0))
        sender.wait_chunks(1)
    note_lost(tmp_path, "tokenizer")  # no stream waits for that
    note_lost(tmp_path, "detokenizer")
    sender.wait_end()
    assert sender.error is not None
    assert sender.error[0] == "UNAVAILABLE"
    assert "detokenizer died" in sender.error[1]
    assert len(sender.chunks) == started, "the error itself does not go to the detokenizer"
    later = ask(front, stream=True, confirmed=True)
    front.client.give((front.client.requests[1].uid, 65, int(FinishReason.LENGTH)))
    later.wait_end()
    assert later.error is None


def test_a_probe_that_a_dead_detokenizer_never_answers_holds_nobody_up(tmp_path: Path) -> None:
    stuck, probed = threading.Event(), []

    def probe(chunk: Chunk) -> None:
        probed.append(chunk.number)
        if len(probed) == 1:
            stuck.wait(30.0)

    (tmp_path / "front-0").touch()
    front = EngineFront(EngineConfig(), LETTERS, front=0, socket_dir=tmp_path, probe=probe, make_client=FakeEngine)
    front.start()
    try:
        for _ in range(2):
            sender = ask(front, stream=True, confirmed=True)
            count = len(probed)
            front.client.give((front.client.requests[-1].uid, 65, 0))
            sender.wait_chunks(1)
            wait_for(lambda count=count: len(probed) > count)
            note_lost(tmp_path, "detokenizer")
            sender.wait_end()
    finally:
        stuck.set()
        front.close()


def test_the_hook_returns_when_nothing_runs_any_more(front: EngineFront, tmp_path: Path) -> None:
    running = ask(front)
    start = time.monotonic()
    assert drain([tmp_path], 0.3)
    assert time.monotonic() - start >= 0.3 + LAST_CHUNK_SECONDS, "what ran was ended before its time"
    assert running.error == ("UNAVAILABLE", "the server is shutting down")
    assert refused(front)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder of its own whose name leaves room for a socket's; with a longer one, all servers here would be found."""
    with tempfile.TemporaryDirectory(prefix="d", dir="/tmp") as folder:
        yield Path(folder)


def test_the_hook_finds_the_servers_of_this_user(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    monkeypatch.setattr("minisgl_backend.host.drain.ANSWER_SECONDS", 0.1)  # nobody will answer
    assert drain_command([]) == 1
    assert "no server" in capsys.readouterr().err
    directory = socket_directory("/some/repository", os.getpid())
    assert live_socket_directories() == {os.getpid(): directory}
    assert drain_command([]) == 1, "a server without an engine"
    (directory / "front-0").touch()
    assert drain_command(["--pid", "1"]) == 1
    assert drain_command(["--seconds", "0"]) == 1
    assert "does not answer" in capsys.readouterr().err
    (directory / "front-0.drained").touch()
    assert drain_command(["--seconds", "0"]) == 0


def test_fronts_that_wait_for_a_core_are_counted(tmp_path: Path) -> None:
    assert fronts_without_core(tmp_path) == 0, "no engine, nothing to wait for"
    for number in range(2):
        (tmp_path / f"front-{number}").touch()
    up_mark(tmp_path, 1).touch()
    assert fronts_without_core(tmp_path) == 1


@pytest.mark.parametrize(("ids", "params", "named"), [
    ((), {}, "input_ids"),
    ((1, 300), {}, "input_ids"),
    ((-1,), {}, "input_ids"),
    ((1,), {"n": 10**9}, "n is"),
    ((1,), {"stop_token_ids": (300,)}, "stop_token_ids"),
])  # fmt: skip
def test_a_request_that_would_harm_the_core_never_reaches_it(
    front: EngineFront, ids: tuple[int, ...], params: dict[str, object], named: str
) -> None:
    sender = ask(front, ids, **params)
    assert sender.error is not None
    assert sender.error[0] == "INVALID_ARG"
    assert named in sender.error[1]
    assert front.client.requests == []
