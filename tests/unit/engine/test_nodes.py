"""Where the nodes of a model meet node 0: who is let in, what is refused, who has left."""

from __future__ import annotations

import dataclasses
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import minisgl_backend
from benchmarks.served import free_ports
from minisgl_backend.config import EngineConfig
from minisgl_backend.engine import nodes as nodes_module
from minisgl_backend.engine.nodes import Nodes
from minisgl_backend.environment import Environment
from minisgl_backend.errors import ConfigError, EngineDeadError
from minisgl_backend.ipc.node_link import (
    NOT_READY,
    READY,
    Accepted,
    Join,
    Link,
    Refused,
    Reply,
    Request,
    Store,
    connect,
    read_message,
    send_message,
)
from minisgl_backend.models.folder import find_model_dir, fingerprint

SECRET = b"a secret of the nodes"
DEMO = find_model_dir("demo")


class Meeting:
    """Nodes on a free port, and connections to them."""

    def __init__(self, store_port: int = 1) -> None:
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        self.config = EngineConfig(tp=4, nodes=2, rendezvous=self.address)
        self.nodes = Nodes(self.config, Environment.read({}), DEMO, store_port, SECRET)
        self._connections: list[socket.socket] = []

    def join(self, **changed: Any) -> Join:
        """That of node 1, as it should be but for what is `changed`."""
        options = dataclasses.asdict(self.config)
        as_it_is = {"version": minisgl_backend.__version__, "node_rank": 1, "options": options}
        return Join(**{**as_it_is, "files": fingerprint(DEMO), **changed})

    def ask(self, request: Request) -> socket.socket:
        connection = connect(self.address, SECRET)
        connection.settimeout(10)
        self._connections.append(connection)
        send_message(connection, request)
        return connection

    def reply_to(self, request: Request) -> Any:
        return read_message(self.ask(request), Reply)

    def meet(self) -> tuple[socket.socket, Accepted]:
        """Node 1 joins."""
        connection = self.ask(self.join())
        self.nodes.gather()
        return connection, read_message(connection, Reply)

    def close(self) -> None:
        self.nodes.close()
        for connection in self._connections:
            connection.close()


@pytest.fixture
def make_meeting() -> Iterator[Callable[..., Meeting]]:
    meetings: list[Meeting] = []

    def make(store_port: int = 1) -> Meeting:
        meetings.append(Meeting(store_port))
        return meetings[-1]

    yield make
    for meeting in meetings:
        meeting.close()


@pytest.fixture
def meeting(make_meeting: Callable[..., Meeting]) -> Meeting:
    return make_meeting()


def test_a_group_meets(meeting: Meeting) -> None:
    control, accepted = meeting.meet()
    assert EngineConfig(**accepted.options) == meeting.config
    for rank in (3, 2):  # in whatever order
        assert meeting.reply_to(Link(group=accepted.group, rank=rank)) == Accepted()
    links = meeting.nodes.links()
    assert len(links) == 2
    assert meeting.nodes.look() is None
    assert control.recv(1) == NOT_READY
    meeting.nodes.note_ready()
    time.sleep(nodes_module.PING_S)
    assert meeting.nodes.look() is None
    assert control.recv(1) == READY
    control.close()
    assert meeting.nodes.look() == "node 1 of 2 left or is lost; its log says more"
    for link in links:
        link.close()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"version": "0.0.1"}, f"version is 0.0.1; allowed: {minisgl_backend.__version__}, as on node 0"),
        ({"node_rank": 0}, "--node-rank is 0; allowed next to node 0: 1 to 1"),
        ({"node_rank": 2}, "--node-rank is 2; allowed next to node 0: 1 to 1"),
        ({"files": {"config.json": "x"}}, "model is another one than on node 0: config.json differs"),
        ({"files": {**fingerprint(DEMO), "more.safetensors": "x"}}, "more.safetensors differs"),
    ],
)
def test_a_node_that_does_not_fit_is_told_why(meeting: Meeting, changed: dict[str, Any], reason: str) -> None:
    reply = meeting.reply_to(meeting.join(**changed))
    assert isinstance(reply, Refused)
    assert reply.final
    assert reason in reply.reason


def test_other_options_are_refused_by_name(meeting: Meeting) -> None:
    for name, value, said in (("tp", 8, "tp is 8; allowed: 4"), ("page_size", 16, "page_size is 16; allowed: unset")):
        options = {**dataclasses.asdict(meeting.config), name: value}
        reply = meeting.reply_to(meeting.join(options=options))
        assert reply == Refused(reason=f"{said}, as on node 0", final=True)
    elsewhere = {**dataclasses.asdict(meeting.config), "model": "/another/folder"}
    meeting.ask(meeting.join(options=elsewhere))
    meeting.nodes.gather()


def test_two_nodes_with_one_rank(meeting: Meeting) -> None:
    first = meeting.ask(meeting.join())
    time.sleep(0.2)
    reply = meeting.reply_to(meeting.join())
    assert reply == Refused(reason="a node with --node-rank 1 has come already", final=False)
    first.close()  # one that has gone makes room
    meeting.ask(meeting.join())
    meeting.nodes.gather()


def test_node_0_waits_for_a_node_that_left(meeting: Meeting) -> None:
    met = threading.Event()

    def gather() -> None:
        meeting.nodes.gather()
        met.set()

    meeting.ask(meeting.join(node_rank=1)).close()
    time.sleep(0.2)
    thread = threading.Thread(target=gather, daemon=True)
    thread.start()
    assert not met.wait(0.7)
    meeting.ask(meeting.join())
    assert met.wait(10)


def test_while_a_group_runs_others_are_to_come_later(meeting: Meeting) -> None:
    meeting.meet()
    reply = meeting.reply_to(meeting.join())
    assert reply == Refused(reason="the group runs", final=False)


def test_only_members_of_the_group_get_further(meeting: Meeting) -> None:
    _, accepted = meeting.meet()
    for request in (Link(group="another", rank=2), Store(group="another"), Link(group=accepted.group, rank=1)):
        assert isinstance(meeting.reply_to(request), Refused)
    assert meeting.reply_to(Link(group=accepted.group, rank=2)) == Accepted()
    assert isinstance(meeting.reply_to(Link(group=accepted.group, rank=2)), Refused)


def test_a_node_that_leaves_before_its_ranks_come_ends_the_group(meeting: Meeting) -> None:
    control, _ = meeting.meet()
    control.close()
    with pytest.raises(EngineDeadError, match="node 1 of 2 left"):
        meeting.nodes.links()


def test_the_store_is_reached_through_the_rendezvous(make_meeting: Callable[..., Meeting]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        meeting = make_meeting(store.getsockname()[1])
        _, accepted = meeting.meet()
        remote = meeting.ask(Store(group=accepted.group))
        assert read_message(remote, Reply) == Accepted()
        local, _ = store.accept()
        with local:
            remote.sendall(b"key")
            assert local.recv(10) == b"key"
            local.sendall(b"value")
            assert remote.recv(10) == b"value"


def test_who_does_not_know_the_secret_learns_and_changes_nothing(meeting: Meeting) -> None:
    for _ in range(2 * nodes_module.MOST_GREETED):
        with pytest.raises(ConfigError):
            connect(meeting.address, b"another secret of nodes")
    meeting.meet()


def test_a_wrong_secret_is_told_once_a_minute(meeting: Meeting, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with pytest.raises(ConfigError):
                connect(meeting.address, b"another secret of nodes")
    assert len([one for one in caplog.records if "without knowing the secret" in one.message]) == 1
    many = [f"10.0.0.{number}" for number in range(2 * nodes_module.MOST_WARNED)]
    assert sum(map(meeting.nodes._warns_of, many)) == nodes_module.MOST_WARNED - 1
    now = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes_module.time, "monotonic", lambda: now + nodes_module.WARN_S + 1)
        assert meeting.nodes._warns_of("127.0.0.1")


def test_a_thread_that_cannot_start_costs_one_connection(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    start, failures = threading.Thread.start, [True] * 2 * nodes_module.MOST_GREETED

    def fail_at_first(thread: threading.Thread) -> None:
        if failures and thread.name == "greet":
            failures.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_at_first)
    while failures:
        with pytest.raises(ConnectionError):
            connect(meeting.address, SECRET)
    meeting.meet()


def test_whoever_sends_to_a_node_that_is_gone_hears_of_the_end(meeting: Meeting) -> None:
    _, accepted = meeting.meet()
    for rank in (2, 3):
        meeting.ask(Link(group=accepted.group, rank=rank))
    link, failed = meeting.nodes.links()[0], threading.Event()

    def send() -> None:
        try:
            link.sendall(bytes(1 << 26))  # more than the kernels keep
        except OSError:
            failed.set()

    threading.Thread(target=send, daemon=True).start()
    assert not failed.wait(0.5)
    meeting.nodes.close()
    assert failed.wait(10)


def test_an_address_that_is_not_this_machines() -> None:
    config = EngineConfig(tp=2, nodes=2, rendezvous="192.0.2.1:29600")
    with pytest.raises(ConfigError, match=r"rendezvous is '192.0.2.1:29600', where node 0 cannot listen"):
        Nodes(config, Environment.read({}), DEMO, 1, SECRET)
