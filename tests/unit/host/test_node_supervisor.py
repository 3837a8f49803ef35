"""A node beside node 0: what ends its part of a group and what does not. Ranks are stand-ins that compute nothing."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.served import free_ports
from minisgl_backend.config import EngineConfig
from minisgl_backend.engine import nodes as nodes_module
from minisgl_backend.engine.nodes import Nodes
from minisgl_backend.environment import Environment
from minisgl_backend.host import node_supervisor as module
from minisgl_backend.host.node_supervisor import NODE_0_ENDED, WRONG_OPTIONS, Node, NodeSupervisor
from minisgl_backend.models.folder import find_model_dir

SECRET = b"a secret of the nodes"
DEMO = find_model_dir("demo")
# Ends as a rank does: with its standard input, or with the status that comes there.
RANK = "import sys; line = sys.stdin.readline(); sys.exit(int(line or 0))"


def wait_for(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come in time"
        time.sleep(0.02)


class Group:
    """Node 0 of a group, which may begin anew, and a node beside it."""

    def __init__(self, nodes: int = 2, start_timeout_s: float = 0.0, exit_timeout_s: float = 30.0) -> None:
        address = f"127.0.0.1:{free_ports(1)[0]}"
        self.config = EngineConfig(tp=nodes, nodes=nodes, rendezvous=address)
        self.environment = Environment.read({})
        self.store = socket.create_server(("127.0.0.1", 0))
        self.node_0 = self.make_node_0()
        self.said: list[str] = []
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.store_ports: list[int] = []
        self.codes: list[int] = []
        node = Node(self.config, self.environment, 1, SECRET, DEMO)
        self.supervisor = NodeSupervisor(node, self.said.append, start_timeout_s, exit_timeout_s)
        self._thread = threading.Thread(target=lambda: self.codes.append(self.supervisor.run()))

    def make_node_0(self) -> Nodes:
        return Nodes(self.config, self.environment, DEMO, self.store.getsockname()[1], SECRET)

    def start_rank(self, _: str, arguments: list[str], **__: Any) -> subprocess.Popen[bytes]:
        self.store_ports.append(int(arguments[arguments.index("--port") + 1]))
        self.ranks.append(subprocess.Popen([sys.executable, "-S", "-c", RANK], stdin=subprocess.PIPE))
        return self.ranks[-1]

    def start(self) -> None:
        self._thread.start()

    def meet(self) -> None:
        self.start()
        self.node_0.gather()
        self.node_0.links()
        wait_for(lambda: self.ranks)

    def serve(self) -> None:
        self.meet()
        self.node_0.note_ready()
        self.ping_until(lambda: self.supervisor.not_ready_reason() is None)

    def ping_until(self, condition: Callable[[], object]) -> None:
        wait_for(lambda: self.node_0.look() is None and condition())

    def ended(self, seconds: float = 10.0) -> int:
        self._thread.join(seconds)
        assert self.codes, "it goes on"
        return self.codes[0]

    def close(self) -> None:
        self.supervisor.stop()
        self.supervisor.stop()
        self.node_0.close()
        self.store.close()
        if self._thread.ident is not None:
            self._thread.join(10)
        assert all(rank.poll() is not None for rank in self.ranks)


@pytest.fixture
def make_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Group]]:
    groups: list[Group] = []

    def make(**settings: Any) -> Group:
        groups.append(Group(**settings))
        monkeypatch.setattr(module, "start_child", groups[-1].start_rank)
        return groups[-1]

    yield make
    for group in groups:
        group.close()


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_nothing_is_left_of_a_group_that_is_over(make_group: Callable[..., Group]) -> None:
    group = make_group()
    group.serve()
    assert len(threads("store-relay")) == 1
    group.node_0.close()
    wait_for(lambda: NODE_0_ENDED in group.said)
    wait_for(lambda: not threads("store-relay"))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", group.store_ports[0]), timeout=5)


def test_a_node_goes_on_until_node_0_has_finished(make_group: Callable[..., Group]) -> None:
    """Whatever stops the nodes may stop them all at once, and node 0 finishes its answers then."""
    group = make_group()
    group.serve()
    group.supervisor.stop()
    group.ping_until(lambda: group.supervisor.not_ready_reason() == "stopping")
    time.sleep(3 * nodes_module.PING_S)
    assert group.node_0.look() is None
    assert group.ranks[0].poll() is None
    group.node_0.close()
    assert group.ended() == 0
    assert group.said[-1] == "stopped"


def test_a_node_does_not_wait_for_ever(make_group: Callable[..., Group]) -> None:
    group = make_group(exit_timeout_s=0.5)
    group.serve()
    began = time.monotonic()
    group.supervisor.stop()
    assert group.ended() == 0
    assert time.monotonic() - began > 0.5


def test_a_second_signal_ends_a_node(make_group: Callable[..., Group]) -> None:
    group = make_group()
    group.serve()
    group.supervisor.stop()
    group.ping_until(lambda: group.supervisor.not_ready_reason() == "stopping")
    group.supervisor.stop()
    assert group.ended() == 0


def test_a_group_that_serves_nobody_yet_is_not_waited_for(make_group: Callable[..., Group]) -> None:
    group = make_group()
    group.meet()
    group.supervisor.stop()
    assert group.ended() == 0


@pytest.mark.parametrize(
    ("status", "said"), [(0, NODE_0_ENDED), (1, "rank 1 ended (status 1); meeting again"), (WRONG_OPTIONS, "error: ")]
)
def test_what_a_ranks_end_means(make_group: Callable[..., Group], status: int, said: str) -> None:
    group = make_group()
    group.meet()
    (rank,) = group.ranks
    assert rank.stdin is not None
    rank.stdin.write(b"%d\n" % status)
    rank.stdin.flush()
    wait_for(lambda: any(text.startswith(said) for text in group.said))
    if status == WRONG_OPTIONS:
        assert group.ended() == WRONG_OPTIONS


def test_a_node_that_has_served_does_not_give_up(make_group: Callable[..., Group]) -> None:
    """What a rank refuses then is not its options: a device that has no room yet, a folder that is away."""
    group = make_group()
    group.serve()
    group.node_0.close()
    group.node_0 = group.make_node_0()
    group.node_0.gather()
    group.node_0.links()
    wait_for(lambda: len(group.ranks) == 2)
    stdin = group.ranks[1].stdin
    assert stdin is not None
    stdin.write(b"%d\n" % WRONG_OPTIONS)
    stdin.flush()
    wait_for(lambda: "rank 1 could not be served; its log says why; meeting again" in group.said)


def test_the_start_timeout_counts_while_other_nodes_are_missing(make_group: Callable[..., Group]) -> None:
    group = make_group(nodes=3, start_timeout_s=1.0)
    group.start()
    assert group.ended() == 1
    assert group.said[-1] == "error: the nodes had not met after 1 s (--start-timeout)"


def test_a_connection_that_node_0_has_no_room_for_comes_again(make_group: Callable[..., Group]) -> None:
    group = make_group()
    greeted = group.node_0._greeted
    group.start()
    wait_for(lambda: group.node_0.connections)
    wait_for(lambda: greeted._value == nodes_module.MOST_GREETED)  # type: ignore[attr-defined]
    for _ in range(nodes_module.MOST_GREETED):
        assert greeted.acquire(blocking=False)
    group.node_0.gather()
    time.sleep(0.5)
    for _ in range(nodes_module.MOST_GREETED):
        greeted.release()
    assert len(group.node_0.links()) == 1
    assert not any("waiting for node 0" in text for text in group.said)


def test_the_relay_outlives_what_fails(make_group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_group()
    group.serve()
    tie, failed = module.tie, []

    def fail_once(one: socket.socket, other: socket.socket) -> None:
        if not failed:
            failed.append(other)
            one.close()
            other.close()
            raise RuntimeError("can't start new thread")
        tie(one, other)

    monkeypatch.setattr(module, "tie", fail_once)
    with socket.create_connection(("127.0.0.1", group.store_ports[0]), timeout=10) as local:
        assert local.recv(1) == b""
    with socket.create_connection(("127.0.0.1", group.store_ports[0]), timeout=10) as local:
        local.sendall(b"key")
        group.store.settimeout(10)
        for _ in range(2):
            remote, _address = group.store.accept()
            with remote:
                if received := remote.recv(3):
                    break
        assert received == b"key"


def test_a_refused_connection_to_the_store_is_closed(
    make_group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make_group()
    group.serve()
    asked: list[socket.socket] = []
    ask = Node.ask

    def note(node: Node, request: Any) -> socket.socket:
        asked.append(ask(node, request))
        return asked[-1]

    monkeypatch.setattr(Node, "ask", note)
    group.node_0.__dict__["_group"] = "another"
    with socket.create_connection(("127.0.0.1", group.store_ports[0]), timeout=10) as local:
        assert local.recv(1) == b""
    assert [connection.fileno() for connection in asked] == [-1]


def test_the_files_of_the_model_must_be_readable(tmp_path: Path) -> None:
    config = EngineConfig(tp=2, nodes=2, rendezvous="127.0.0.1:1")
    node = Node(config, Environment.read({}), 1, SECRET, tmp_path)
    with pytest.raises(module.ConfigError, match=r"config\.json cannot be read: No such file"):
        NodeSupervisor(node, print)
