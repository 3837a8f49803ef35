"""`minisgl serve --node-rank K`, K above 0: this machine's ranks of a model that node 0 serves.

Joins node 0, starts the ranks when all nodes have joined, ends them when node 0 or one of them ends, and joins again.
So a group forms again by itself, whichever node is restarted. Needs no tritonserver.
"""

from __future__ import annotations

import dataclasses
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

import minisgl_backend
from minisgl_backend.config import EngineConfig
from minisgl_backend.environment import Environment
from minisgl_backend.errors import ConfigError
from minisgl_backend.host.health import HealthServer
from minisgl_backend.host.options.engine import read_engine_config
from minisgl_backend.host.options.server import Arguments, say
from minisgl_backend.ipc.node_link import (
    READY,
    Accepted,
    Join,
    Link,
    Refused,
    Reply,
    Request,
    Store,
    accept_until,
    connect,
    has_ended,
    read_message,
    send_message,
    shut,
    tie,
)
from minisgl_backend.models.folder import find_model_dir, fingerprint
from minisgl_backend.process.backoff import Backoff
from minisgl_backend.process.node_options import read_secret
from minisgl_backend.process.ports import free_port_error
from minisgl_backend.process.spawn import start_child
from minisgl_backend.process.stop_signals import on_stop_signals

LOOK_S = 0.1
RETRY_S = 0.5
ASK_AGAIN_S = 5.0  # within a group: node 0 accepts a limited number of connections at once
SAY_AFTER_S = 2.0
BACKOFF_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0)
STABLE_AFTER_S = 10.0  # a group that served this long resets the back-off
ORDERLY_END = 0  # a rank's exit status: node 0 has closed its connection
WRONG_OPTIONS = 2  # a rank's exit status, and this program's
NODE_0_ENDED = "node 0 has ended the group or is lost; meeting again"
HOST = "127.0.0.1"


class _NotNow(Exception):
    """Node 0 does not accept this node now; the reason."""


@dataclass(frozen=True)
class Node:
    """The state that does not change from one group to the next."""

    config: EngineConfig
    environment: Environment
    rank: int  # this node's rank among the nodes
    secret: bytes
    model_dir: Path

    def __post_init__(self) -> None:
        if not 1 <= self.rank < self.config.nodes:
            allowed = f"0 to {self.config.nodes - 1}" if self.config.nodes > 1 else "0, or more with --nodes above 1"
            raise ConfigError(f"--node-rank is {self.rank}; allowed with nodes {self.config.nodes}: {allowed}")

    @property
    def rendezvous(self) -> str:
        assert self.config.rendezvous is not None, "EngineConfig sees to it"
        return self.config.rendezvous

    def ask(self, request: Request) -> socket.socket:
        """A connection to node 0 on which `request` was sent. Raises OSError, and ConfigError like `connect`."""
        connection = connect(self.rendezvous, self.secret)
        try:
            send_message(connection, request)
        except BaseException:
            connection.close()
            raise
        return connection


class NodeSupervisor:
    """Runs on the main thread, which its ranks are tied to."""

    def __init__(
        self, node: Node, say: Callable[[str], None], start_timeout_s: float = 0.0, exit_timeout_s: float = 0.0
    ) -> None:
        """`say` is called with an occasional line for people. `start_timeout_s`: for the first group to form; 0: no
        limit. `exit_timeout_s`: how long node 0 may take, after `stop`, to end the group. Raises ConfigError."""
        self._node = node
        self._files = fingerprint(node.model_dir)
        self._say = say
        self._start_timeout_s = start_timeout_s
        self._exit_timeout_s = exit_timeout_s
        self._stop = threading.Event()
        self._abandon = threading.Event()
        self._said = ""
        self._not_ready: str | None = "waiting for node 0"
        self._was_ready = False  # an earlier or this group was ready, so the options can be served

    def not_ready_reason(self) -> str | None:
        """None while the whole group is ready; for any thread."""
        return self._not_ready

    def stop(self) -> None:
        """Ends `run`; for any thread. While the group serves, `run` continues until node 0 has ended it, which may
        include finishing its answers; a second call ends that, too."""
        if self._stop.is_set():
            self._abandon.set()
        self._stop.set()

    def run(self) -> int:
        """Runs until `stop`. Returns the exit code: 0; 1 if the nodes did not meet in time; 2 if this node's options do
        not fit the group."""
        deadline = time.monotonic() + (self._start_timeout_s or float("inf"))
        backoff = Backoff(BACKOFF_S, STABLE_AFTER_S)
        while not self._stop.is_set():
            try:
                group = self._meet(deadline)
                if group is None:
                    break
                deadline, started_at = float("inf"), time.monotonic()
                with group:
                    over = self._watch(group)
                    self._say_once("stopped" if self._stop.is_set() else over)
            except ConfigError as error:
                self._say(f"error: {error}")
                return WRONG_OPTIONS
            except (_NotNow, OSError) as reason:
                self._say_once(f"waiting for node 0 at {self._node.rendezvous}: {reason}")
                if time.monotonic() > deadline:
                    self._say(f"error: the nodes had not met after {self._start_timeout_s:g} s (--start-timeout)")
                    return 1
                self._stop.wait(RETRY_S)
                continue
            finally:
                self._not_ready = "waiting for node 0"
            self._stop.wait(backoff.next(time.monotonic() - started_at))
        return 0

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._say(text)

    def _meet(self, deadline: float) -> _Group | None:
        """This node's part of the next group, once all nodes have joined; None if `stop` was called before. `deadline`:
        by time.monotonic().


        Raises ConfigError if this node can never be part of it, OSError or _NotNow if it cannot now.
        """
        node = self._node
        join = Join(
            version=minisgl_backend.__version__,
            node_rank=node.rank,
            options=dataclasses.asdict(node.config),
            files=self._files,
        )
        connection = node.ask(join)
        try:
            came_at = time.monotonic()
            while not select.select([connection], [], [], LOOK_S)[0]:
                if self._stop.is_set():
                    connection.close()
                    return None
                if time.monotonic() > deadline:
                    raise _NotNow("it waits for other nodes")
                if time.monotonic() - came_at > SAY_AFTER_S:
                    self._say_once(f"node {node.rank} waits with node 0 for the other nodes")
            return _Group(node, connection, _accepted(connection))
        except BaseException:
            connection.close()
            raise

    def _watch(self, group: _Group) -> str:
        """Returns why the group has ended. Raises ConfigError if a rank refused its options."""
        self._say_once(f"node {self._node.rank} of {self._node.config.nodes} is part of a group")
        self._not_ready = "the group starts"
        ready, stop_by = False, float("inf")
        while not self._abandon.is_set() and time.monotonic() < stop_by:
            if self._stop.is_set() and stop_by == float("inf"):
                if not ready:
                    break
                stop_by = time.monotonic() + self._exit_timeout_s
                self._not_ready = "stopping"
                self._say_once(f"stopping when node 0 has, within {self._exit_timeout_s:g} s; Ctrl-C again stops now")
            if select.select([group.connection], [], [], LOOK_S)[0]:
                said = _receive(group.connection)
                if not said:
                    return NODE_0_ENDED
                if said.endswith(READY) and not ready:
                    ready, self._was_ready, self._not_ready = True, True, None
            if (ended := group.ended_rank()) is not None:
                rank, status = ended
                if status == ORDERLY_END:
                    return NODE_0_ENDED
                if status == WRONG_OPTIONS:
                    if not self._was_ready:
                        raise ConfigError(f"rank {rank} cannot be served with these options; its log says why")
                    return f"rank {rank} could not be served; its log says why; meeting again"
                return f"rank {rank} ended (status {status}); meeting again"
        return "stopped"


class _Group:
    """This node's ranks, from when all nodes have joined until `__exit__`."""

    def __init__(self, node: Node, connection: socket.socket, accepted: Accepted) -> None:
        """Starts the ranks. Raises OSError, _NotNow or ConfigError if node 0 does not accept them."""
        self.connection = connection  # closed when the group ends
        self._node = node
        self._name = accepted.group
        self._store = socket.create_server((HOST, 0))
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}
        self._ended = threading.Event()
        connection.settimeout(None)
        each = node.config.ranks_per_node
        try:
            threading.Thread(target=self._relay, name="store-relay", daemon=True).start()
            for rank in range(node.rank * each, (node.rank + 1) * each):
                self._start_rank(rank, accepted)
        except RuntimeError as error:  # the machine has no thread left
            self.end()
            raise _NotNow(f"this node's part cannot be started: {error}") from error
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> _Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def ended_rank(self) -> tuple[int, int] | None:
        """A rank that has ended, and its exit status."""
        for rank, process in self._ranks.items():
            if process.poll() is not None:
                return rank, process.returncode
        return None

    def end(self) -> None:
        """Ends the ranks at once, since they may wait for others that are gone."""
        self._ended.set()
        shut(self._store)
        self.connection.close()
        for process in self._ranks.values():
            process.kill()
        for process in self._ranks.values():
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    def _start_rank(self, rank: int, accepted: Accepted) -> None:
        options = {**accepted.options, "model": str(self._node.model_dir)}
        environment = {**accepted.environment, "log_level": self._node.environment.log_level}
        with self._ask(Link(group=self._name, rank=rank)) as link:
            link.settimeout(None)
            arguments = ["--rank", str(rank), "--dp-rank", "0", "--link-fd", str(link.fileno())]
            arguments += ["--port", str(self._store.getsockname()[1])]
            arguments += ["--address", str(self.connection.getsockname()[0])]
            arguments += ["--config", msgspec.json.encode(options).decode()]
            arguments += ["--environment", msgspec.json.encode(environment).decode()]
            fds = (link.fileno(),)
            try:
                self._ranks[rank] = start_child("minisgl_backend.engine.follower", arguments, fds=fds, tied=True)
            except OSError as error:  # no memory or process left
                raise _NotNow(f"rank {rank} cannot be started here: {error}") from error

    def _ask(self, request: Link | Store) -> socket.socket:
        """A connection that node 0 has accepted for this request. Raises OSError, _NotNow or ConfigError if it does
        not."""
        again_until = time.monotonic() + ASK_AGAIN_S
        while True:
            try:
                return self._ask_once(request)
            except OSError:
                if time.monotonic() > again_until or self._ended.is_set() or has_ended(self.connection):
                    raise
            self._ended.wait(LOOK_S)

    def _ask_once(self, request: Link | Store) -> socket.socket:
        connection = self._node.ask(request)
        try:
            _accepted(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _relay(self) -> None:
        """Forwards the ranks' connections to the rendezvous store, which listens on node 0's loopback address."""
        for local, _ in accept_until(self._store, self._ended):
            try:
                tie(local, self._ask(Store(group=self._name)))
            except (OSError, ConfigError, _NotNow, RuntimeError):
                local.close()  # the rank notices it


def _accepted(connection: socket.socket) -> Accepted:
    """Node 0's acceptance. Raises ConfigError or _NotNow if it refuses."""
    reply: Reply = read_message(connection, Reply)
    if isinstance(reply, Refused):
        raise ConfigError(reply.reason) if reply.final else _NotNow(reply.reason)
    return reply


def _receive(connection: socket.socket) -> bytes:
    """b"" if the connection has ended, in whatever way."""
    try:
        return connection.recv(4096)
    except OSError:
        return b""


def serve_node(arguments: Arguments) -> int:
    """The command for nodes above 0, like that of `host.server_supervisor`. Raises ConfigError."""
    config = read_engine_config(arguments.server.repository, arguments.engine_parameters)
    model_dir = find_model_dir(config.model, trust_remote_code=config.trust_remote_code)
    server = arguments.server
    node = Node(config, Environment.read(), server.node_rank or 0, read_secret(os.environ), model_dir)
    supervisor = NodeSupervisor(node, say, server.start_timeout, server.exit_timeout)
    on_stop_signals(supervisor.stop)
    host, port = server.host, server.health_port
    problem = free_port_error(host, [("--health-port", port)]) if port else None
    if problem is not None:
        raise ConfigError(problem)
    health = HealthServer(host, port, supervisor.not_ready_reason) if port else None
    try:
        return supervisor.run()
    finally:
        if health is not None:
            health.close()
