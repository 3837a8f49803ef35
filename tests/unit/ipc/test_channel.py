"""Sockets between fronts, detokenizer and core, in one process."""

from __future__ import annotations

import fcntl
import logging
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import zmq

from minisgl_backend.errors import ConfigError, EngineDeadError
from minisgl_backend.ipc import channel
from minisgl_backend.ipc.channel import (
    CoreChannel,
    FrontChannel,
    live_socket_directories,
    merge_outputs,
    socket_directory,
    split_by_front,
)
from minisgl_backend.ipc.messages import (
    Command,
    GetStats,
    Hello,
    Outputs,
    Rejected,
    Stats,
    Submit,
    uid_of,
)
from minisgl_backend.ipc.private import make_private
from minisgl_backend.process.status_files import ask_to_drain, drain_deadline
from minisgl_backend.step import SequenceDetail
from tests.fakes import make_request


def outputs(*records: tuple[int, int, int], details: dict[int, SequenceDetail] | None = None) -> Outputs:
    uids, tokens, reasons = zip(*records, strict=True)
    return Outputs(
        uids=np.array(uids, dtype=np.int64).tobytes(),
        token_ids=np.array(tokens, dtype=np.int32).tobytes(),
        reasons=bytes(reasons),
        details=details or {},
    )


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.term()


@pytest.fixture
def core(tmp_path: Path) -> Iterator[CoreChannel]:
    channel = CoreChannel(tmp_path)
    yield channel
    channel.close()


def attach(core: CoreChannel, front: FrontChannel, index: int) -> None:
    assert front.greet(index, 5000)
    commands: list[Command] = []
    wait_for(lambda: bool(commands.extend(core.receive(0)) or commands))
    assert commands == [Hello(front=index, pid=os.getpid())]


def test_commands_and_events_arrive_in_order(core: CoreChannel, context: zmq.Context, tmp_path: Path) -> None:
    front = FrontChannel(context, tmp_path)
    attach(core, front, 2)
    requests = [make_request(uid_of(2, index), [1, 2, 3], max_tokens=5) for index in range(20)]
    for request in requests:
        front.send(Submit(request=request))
    commands: list[Command] = []
    wait_for(lambda: bool(commands.extend(core.receive(0)) or len(commands) == 20))
    assert commands == [Submit(request=request) for request in requests]
    sent = [Rejected(uid=1, kind="CapacityError", message="full"), outputs((5, 1, 0)), Stats(values={"a": 1.0})]
    for event in sent:
        core.send(2, event)
    events: list[object] = []
    wait_for(lambda: bool(events.extend(front.receive()) or len(events) == 3))
    assert events == sent
    front.close()


def test_records_of_a_slow_front_merge_and_nothing_is_lost(
    core: CoreChannel, context: zmq.Context, tmp_path: Path
) -> None:
    front = FrontChannel(context, tmp_path)
    attach(core, front, 0)
    count, padding = 4000, 200
    for step in range(count):
        detail = {0: SequenceDetail(cached_tokens=step)} if step % 100 == 0 else None
        core.send(0, outputs(*[(step, step, 0)] * padding, details=detail))
    assert core.has_backlog
    core.send(0, Rejected(uid=9, kind="CapacityError", message="full"))
    uids: list[int] = []
    details: list[int | None] = []
    rejected, records = 0, 0

    def drain() -> bool:
        nonlocal rejected, records
        core.flush()
        for event in front.receive():
            if isinstance(event, Rejected):
                assert len(uids) == count * padding, "events keep their order"
                rejected += 1
                continue
            assert isinstance(event, Outputs)
            records += 1
            details.extend(event.details[place].cached_tokens for place in sorted(event.details))
            uids.extend(np.frombuffer(event.uids, dtype=np.int64).tolist())
        return rejected == 1

    wait_for(drain)
    assert uids == [step for step in range(count) for _ in range(padding)]
    assert details == list(range(0, count, 100))
    assert records < count
    assert not core.has_backlog
    front.close()


def test_a_front_that_is_gone_is_noticed_and_does_not_disturb_others(
    core: CoreChannel, context: zmq.Context, tmp_path: Path
) -> None:
    staying, leaving = FrontChannel(context, tmp_path), FrontChannel(context, tmp_path)
    attach(core, staying, 0)
    attach(core, leaving, 1)
    leaving.close()
    lost: list[int] = []

    def send() -> bool:
        core.send(1, outputs((1, 1, 0)))
        lost.extend(core.take_lost())
        return bool(lost)

    wait_for(send)
    assert lost == [1]
    core.send(1, outputs((1, 1, 0)))
    assert core.take_lost() == []
    core.send(0, outputs((7, 7, 0)))
    events: list[object] = []
    wait_for(lambda: bool(events.extend(staying.receive()) or events))
    assert events == [outputs((7, 7, 0))]
    staying.close()


def test_a_front_that_comes_again_takes_the_place_of_its_earlier_connection(
    core: CoreChannel, context: zmq.Context, tmp_path: Path
) -> None:
    earlier, later = FrontChannel(context, tmp_path), FrontChannel(context, tmp_path)
    attach(core, earlier, 3)
    attach(core, later, 3)
    wait_for(lambda: earlier.receive() == [] and earlier.ended)
    earlier.close()
    core.send(3, outputs((1, 1, 0)))
    assert later.receive() == [outputs((1, 1, 0))]
    assert core.receive(0) == []
    assert core.is_attached(3)
    assert core.take_lost() == [], "its sequences are those of the later one"
    later.close()


def test_a_front_learns_of_the_end_of_the_core(context: zmq.Context, tmp_path: Path) -> None:
    core = CoreChannel(tmp_path)
    front = FrontChannel(context, tmp_path)
    attach(core, front, 0)
    core.close()
    wait_for(lambda: front.receive() == [] and front.ended)

    def refused() -> bool:
        try:
            front.send(Submit(request=make_request(1, [1])))
        except EngineDeadError:
            return True
        return False

    wait_for(refused)
    front.close()


def test_malformed_commands_are_counted_and_skipped(core: CoreChannel, context: zmq.Context, tmp_path: Path) -> None:
    socket = context.socket(zmq.PUSH)
    socket.connect(f"ipc://{tmp_path / 'commands-0'}")
    for payload in (b"", b"\xc1", b"\x80", b"\x81\xa4type\xa5Bogus"):
        socket.send(payload)
    wait_for(lambda: core.receive(0) == [] and core.num_malformed == 4)
    socket.close(linger=0)


def test_merge_keeps_order_and_details() -> None:
    first = outputs((1, 10, 0), (2, 20, 1), details={1: SequenceDetail(cached_tokens=4)})
    second = outputs((1, 11, 2), details={0: SequenceDetail(error="x")})
    merged = merge_outputs([first, second])
    assert merged == outputs(
        (1, 10, 0),
        (2, 20, 1),
        (1, 11, 2),
        details={1: SequenceDetail(cached_tokens=4), 2: SequenceDetail(error="x")},
    )


def test_split_by_front() -> None:
    assert split_by_front(np.array([], dtype=np.int64)) == []
    uids = np.array([uid_of(1, 5), uid_of(0, 6), uid_of(1, 7)], dtype=np.int64)
    assert [(front, uids[entries].tolist()) for front, entries in split_by_front(uids)] == [
        (0, [uid_of(0, 6)]),
        (1, [uid_of(1, 5), uid_of(1, 7)]),
    ]


def test_the_directory_is_private_and_shared_by_one_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = Path(tempfile.mkdtemp(dir="/tmp"))  # socket paths must be short
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    stale = base / f"minisgl-{os.getuid()}-{2**22 + 12345}-abc"
    stale.mkdir()
    (stale / "events").touch()
    directory = socket_directory(tmp_path / "repository")
    assert directory.stat().st_mode & 0o777 == 0o700
    assert directory == socket_directory(tmp_path / "x" / ".." / "repository", os.getppid())
    assert directory != socket_directory(tmp_path / "another")
    assert directory != socket_directory(tmp_path / "repository", os.getpid())
    assert not stale.exists()
    shutil.rmtree(base)


def test_a_directory_in_use_stays_though_its_server_cannot_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a container with process ids of its own, which shares the folder."""
    base = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    other = base / f"minisgl-{os.getuid()}-{2**22 + 12345}-7-abc"
    other.mkdir()
    (other / "events-0").touch()
    with open(other / "lock-0", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        socket_directory(tmp_path / "repository")
        assert (other / "events-0").exists()
    socket_directory(tmp_path / "repository")
    assert not other.exists()
    shutil.rmtree(base)


def test_a_server_with_the_process_id_of_one_before_finds_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that was killed while it drained and starts again: the same ids, and the same /tmp."""
    base = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    before = socket_directory(tmp_path / "repository")
    ask_to_drain(before, 0.0)
    monkeypatch.setattr(channel, "_start_ticks", lambda pid: 123456789, raising=False)
    directory = socket_directory(tmp_path / "repository")
    assert drain_deadline(directory) is None
    assert not before.exists()
    assert live_socket_directories() == {os.getppid(): directory}
    shutil.rmtree(base)


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="only the user"):
        make_private(tmp_path / "open")
    (tmp_path / "target").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="only the user"):
        make_private(tmp_path / "link")


def test_a_socket_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="longer than"):
        CoreChannel(tmp_path / ("x" * 100))


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_without_file_descriptors_a_core_waits_before_it_accepts_again(
    core: CoreChannel, context: zmq.Context, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection that cannot be taken keeps the listener readable: an idle core would turn without a pause."""
    with closing(FrontChannel(context, tmp_path)) as front:
        wait_for(lambda: bool(front._commands.poll(10, zmq.POLLOUT)))
        front.send(GetStats(front=0))  # zmq has its connection
        wait_for(lambda: bool(core.receive(10)))
        with caplog.at_level(logging.WARNING), no_descriptor_left():
            assert front.greet(0, 5000)
            turns, end = 0, time.monotonic() + 0.35
            while time.monotonic() < end:
                turns += 1
                assert core.receive(100) == []
        assert 2 <= turns <= 20
        assert len([record for record in caplog.records if "Too many open files" in record.message]) == 1
        commands: list[Command] = []
        wait_for(lambda: bool(commands.extend(core.receive(-1)) or commands))
        assert commands == [Hello(front=0, pid=os.getpid())]
