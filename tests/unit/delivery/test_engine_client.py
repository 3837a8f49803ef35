"""An engine client and a core that the test plays: what happens where the client itself fails."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minisgl_backend.config import EngineConfig
from minisgl_backend.delivery import core_link, engine_client
from minisgl_backend.delivery.core_link import Pauses
from minisgl_backend.delivery.engine_client import CORE_DIED, CORE_UNHEARD, EngineClient, Listener
from minisgl_backend.errors import EngineDeadError
from minisgl_backend.ipc.channel import CoreChannel, FrontChannel
from minisgl_backend.ipc.messages import Abort, Command, Hello, Outputs, Rejected, Submit, Welcome
from minisgl_backend.process import status_files
from minisgl_backend.process.status_files import fronts_without_core
from minisgl_backend.request import FinishReason, Request, SamplingParams
from tests.unit.delivery.fake_engine import WELCOME


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


class Core:
    """One engine core, whose lock this process holds: no client starts a process. Greets those who come."""

    def __init__(self, socket_dir: Path, number: int = 0) -> None:
        self._lock = os.open(socket_dir / f"lock-{number}", os.O_RDWR | os.O_CREAT)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.commands: list[Command] = []
        self._channel = CoreChannel(socket_dir, number)
        self._ending = threading.Event()
        self._errands: list[Callable[[CoreChannel], None]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.is_set():
            for command in self._channel.receive(5):
                self.commands.append(command)
                if isinstance(command, Hello):
                    self._channel.send(command.front, WELCOME)
            while self._errands:
                self._errands.pop(0)(self._channel)
        self._channel.close()

    def do(self, errand: Callable[[CoreChannel], None]) -> None:
        self._errands.append(errand)

    def give(self, uid: int, token: int, reason: int) -> None:
        record = Outputs(
            uids=np.array([uid], dtype="<i8").tobytes(),
            token_ids=np.array([token], dtype="<i4").tobytes(),
            reasons=bytes([reason]),
        )
        self.do(lambda channel: channel.send(0, record))

    def heard_of(self, uid: int) -> bool:
        return any(isinstance(command, Submit) and command.request.uid == uid for command in list(self.commands))

    def end(self) -> None:
        self._ending.set()
        self._thread.join()
        os.close(self._lock)


class Heard(Listener):
    """An EngineClient and what it says."""

    def __init__(self, socket_dir: Path, dp: int = 1) -> None:
        self.ended: dict[int, int] = {}
        self.lost: dict[int, str] = {}
        self.num_ups = 0
        self.client = EngineClient(EngineConfig(dp=dp), self, front=0, socket_dir=socket_dir)

    def on_down(self, uids: list[int], reason: str) -> None:
        self.lost.update(dict.fromkeys(uids, reason))

    def on_up(self, welcome: Welcome) -> None:
        self.num_ups += 1

    def on_outputs(self, outputs: Outputs) -> None:
        uids = np.frombuffer(outputs.uids, dtype="<i8").tolist()
        self.ended.update((uid, reason) for uid, reason in zip(uids, outputs.reasons, strict=True) if reason)

    def on_rejected(self, rejected: Rejected) -> None:
        raise AssertionError(rejected)

    def submit(self) -> int:
        uid = self.client.new_uid()
        self.client.submit(Request(uid=uid, token_ids=bytes(12), params=SamplingParams()))
        return uid


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="minisgl-test-", dir="/tmp"))  # socket paths must be short
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def core(socket_dir: Path) -> Iterator[Core]:
    found = Core(socket_dir)
    yield found
    found.end()


@pytest.fixture
def heard(socket_dir: Path, core: Core) -> Iterator[Heard]:
    found = Heard(socket_dir)
    found.client.start(20)
    yield found
    found.client.close()


def serves(heard: Heard, core: Core) -> None:
    """The next request is answered."""
    uid = heard.submit()
    wait_for(lambda: core.heard_of(uid))
    core.give(uid, 7, int(FinishReason.LENGTH))
    wait_for(lambda: uid in heard.ended)


class Broken:
    """A function that fails the first few times."""

    def __init__(self, works: Callable[..., Any], times: int = 1, error: Exception | None = None) -> None:
        self._works = works
        self._left = times
        self._error = error or OSError(errno.EMFILE, "Too many open files")

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self._left > 0:
            self._left -= 1
            raise self._error
        return self._works(*arguments, **options)

    @property
    def is_mended(self) -> bool:
        return self._left == 0


def test_a_front_that_failed_tells_its_clients_and_begins_anew(
    heard: Heard, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = heard.submit()
    wait_for(lambda: core.heard_of(uid))
    monkeypatch.setattr(heard.client.credits, "expire", Broken(heard.client.credits.expire))
    wait_for(lambda: heard.lost)
    assert heard.lost == {uid: CORE_UNHEARD}
    wait_for(lambda: heard.num_ups == 2)
    wait_for(lambda: heard.client.welcomes[0] is not None)
    serves(heard, core)


def test_a_front_whose_socket_cannot_be_made_again_keeps_trying(
    heard: Heard, core: Core, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full_disk = OSError(errno.ENOSPC, "No space left on device")
    receiver = Broken(engine_client.AckReceiver, times=3, error=full_disk)
    monkeypatch.setattr(engine_client, "AckReceiver", receiver)
    monkeypatch.setattr(core_link, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(heard.client.credits, "expire", Broken(heard.client.credits.expire))
    wait_for(lambda: receiver.is_mended and heard.client.welcomes[0] is not None)
    serves(heard, core)
    assert len([entry for entry in caplog.records if "cannot receive" in entry.message]) == 2, "one for each problem"


def test_a_front_that_cannot_receive_does_not_start(socket_dir: Path, core: Core) -> None:
    (socket_dir / "front-0").mkdir()  # where its socket belongs
    heard = Heard(socket_dir)
    with pytest.raises(EngineDeadError, match="the front cannot receive: "):
        heard.client.start(20)
    heard.client.close()


def test_what_a_core_says_may_be_no_message(heard: Heard, core: Core) -> None:
    uid = heard.submit()
    wait_for(lambda: core.heard_of(uid))
    core.do(lambda channel: channel._fronts[0].send(b"\xc1"))
    wait_for(lambda: heard.lost)
    assert heard.lost == {uid: CORE_UNHEARD}
    wait_for(lambda: heard.client.welcomes[0] is not None)
    serves(heard, core)


def test_a_core_that_is_never_understood_is_greeted_more_and_more_seldom(
    heard: Heard, core: Core, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each Hello ends all that the core had to do for this front."""

    def num_hellos() -> int:
        return len([command for command in list(core.commands) if isinstance(command, Hello)])

    uid = heard.submit()
    wait_for(lambda: core.heard_of(uid))
    with monkeypatch.context() as broken:
        broken.setattr(FrontChannel, "receive", Broken(list, times=1000, error=ValueError("no message")))
        began = time.monotonic()
        core.give(uid, 7, 0)
        wait_for(lambda: num_hellos() == 4)
        assert time.monotonic() - began > 0.1 + 0.2 + 0.4 - 0.05
    wait_for(lambda: heard.client.welcomes[0] is not None)
    serves(heard, core)
    assert len([entry for entry in caplog.records if "cannot be heard" in entry.message]) == 1


def test_pauses_grow_up_to_a_bound_and_begin_anew_after_a_while_of_health(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(core_link, "time", SimpleNamespace(monotonic=lambda: clock.now))
    pauses = Pauses()

    def fail(text: str, after_s: float) -> tuple[float, bool]:
        clock.now += after_s
        is_news = pauses.note(OSError(text))
        pause_s = pauses.left_s
        clock.now += pause_s
        return pytest.approx(pause_s), is_news

    assert pauses.left_s == 0
    assert [fail("full", 0) for _ in range(6)] == [
        (0.1, True), (0.2, False), (0.4, False), (0.8, False), (1.6, False), (2.0, False)
    ]  # fmt: skip
    assert fail("other", 1.0) == (2.0, True)
    assert fail("other", core_link.HEALTHY_S - 1) == (2.0, False)
    assert fail("other", core_link.HEALTHY_S + 1) == (0.1, True)
    assert fail("other", 0.0) == (0.2, False)


def test_a_core_that_cannot_be_reached_yet_leaves_the_others_alone(
    socket_dir: Path, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = Core(socket_dir, 1)
    heard = Heard(socket_dir, dp=2)
    heard.client.start(20)
    uids = [heard.submit() for _ in range(2)]
    wait_for(lambda: second.heard_of(uids[1]))
    broken = Broken(FrontChannel, times=20)
    monkeypatch.setattr(core_link, "FrontChannel", broken)
    second.end()
    second = Core(socket_dir, 1)
    wait_for(lambda: broken.is_mended and None not in heard.client.welcomes)
    assert heard.lost == {uids[1]: CORE_DIED}
    serves(heard, second)  # which has less to do
    heard.client.close()
    second.end()


def test_an_abort_that_a_busy_core_cannot_take_is_told_later(
    heard: Heard, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its queue of commands is full: it would go on for a client that has left."""
    kept, ended, left = (heard.submit() for _ in range(3))
    wait_for(lambda: core.heard_of(left))
    (link,) = heard.client._links
    with monkeypatch.context() as full:
        full.setattr(link, "send", Broken(link.send, times=1000, error=EngineDeadError("takes no commands")))
        heard.client.abort([ended, left], FinishReason.CANCELLED)
        core.give(ended, 7, int(FinishReason.LENGTH))
        wait_for(lambda: ended in heard.ended)
    wait_for(lambda: Abort(uids=(left,), reason=int(FinishReason.CANCELLED)) in core.commands)
    core.give(left, -1, int(FinishReason.CANCELLED))
    core.give(kept, 7, int(FinishReason.LENGTH))
    wait_for(lambda: len(heard.ended) == 3)
    assert len([command for command in core.commands if isinstance(command, Abort)]) == 1
    assert not heard.client._unsent_aborts


def test_many_aborts_that_a_busy_core_cannot_take_cost_one_try_and_go_together(
    heard: Heard, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, stopped = ([heard.submit() for _ in range(50)] for _ in range(2))
    wait_for(lambda: core.heard_of(stopped[-1]))
    (link,) = heard.client._links
    tell_again, tries = heard.client._tell_again, []

    def full(command: Command) -> None:
        tries[-1] += 1
        raise EngineDeadError("takes no commands")

    with monkeypatch.context() as busy:
        tries.append(0)
        busy.setattr(link, "send", full)
        heard.client.abort(gone, FinishReason.CANCELLED, 5.0)
        heard.client.abort(stopped, FinishReason.STOP)
        busy.setattr(heard.client, "_tell_again", lambda: (tries.append(0), tell_again()))
        wait_for(lambda: len(tries) > 5)
    assert max(tries[2:]) == 1
    wait_for(lambda: len([command for command in core.commands if isinstance(command, Abort)]) == 2)
    assert [command for command in core.commands if isinstance(command, Abort)] == [
        Abort(uids=tuple(gone), reason=int(FinishReason.CANCELLED), found_at=5.0),
        Abort(uids=tuple(stopped), reason=int(FinishReason.STOP)),
    ]
    assert not heard.client._unsent_aborts


def test_the_health_of_a_front_is_told_as_soon_as_it_can_be(
    socket_dir: Path, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_files, "up_mark", lambda folder, front: folder / "missing" / f"front-{front}.up")
    heard = Heard(socket_dir)
    heard.client.start(20)
    serves(heard, core)
    (socket_dir / "missing").mkdir()
    wait_for((socket_dir / "missing" / "front-0.up").exists)
    heard.client.close()
    assert not (socket_dir / "missing" / "front-0.up").exists()


def test_what_a_front_that_was_killed_has_left_says_nothing(socket_dir: Path) -> None:
    for name in ("front-0", "front-0.up"):
        (socket_dir / name).touch()
    lock = os.open(socket_dir / "lock-0", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    heard = Heard(socket_dir)
    with pytest.raises(EngineDeadError):
        heard.client.start(0.2)
    assert fronts_without_core(socket_dir) == 1
    heard.client.close()
    os.close(lock)
