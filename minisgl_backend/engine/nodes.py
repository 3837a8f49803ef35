"""Rank 0's side of a model over several nodes: where the other nodes join, and the connections that they open.

All use one port, `rendezvous`, and every peer must first prove that it knows the secret (`ipc/node_link.py`). A node
joins with its options, which must equal node 0's. Once all have joined, each is told to start its ranks and opens a
connection for each of them, which carries plans there and heartbeats back, as socket pairs do on this machine. The
ranks' rendezvous store listens on the loopback address only; other nodes reach it through connections of the same kind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

import minisgl_backend
from minisgl_backend.config import EngineConfig
from minisgl_backend.environment import Environment
from minisgl_backend.errors import ConfigError, EngineDeadError
from minisgl_backend.ipc.node_link import (
    GREET_S,
    NOT_READY,
    READY,
    Accepted,
    Join,
    Link,
    Refused,
    Request,
    accept_until,
    greet_as_listener,
    has_ended,
    own_address,
    read_message,
    send_message,
    shut,
    tie,
    watch_closely,
)
from minisgl_backend.models.folder import fingerprint

log = logging.getLogger(__name__)

PING_S = 0.4
MOST_GREETED = 32  # connections that have not said yet what they are for
RESOLVE_S = 60.0
LINKS_S = 60.0  # from the last node's joining to its connections
SAY_S = 30.0
WARN_S = 60.0  # between two warnings about one host
MOST_WARNED = 64  # hosts within that time; further ones are not logged


class Nodes:
    """Listens from construction until `close`."""

    def __init__(
        self, config: EngineConfig, environment: Environment, model_dir: Path, store_port: int, secret: bytes
    ) -> None:
        """`store_port`: port of the ranks' rendezvous store on the loopback address. Raises ConfigError."""
        assert config.rendezvous is not None, "EngineConfig sees to it"
        self._config = config
        self._environment = environment
        self._files = fingerprint(model_dir)
        self._store_port = store_port
        self._secret = secret
        self._group = secrets.token_hex(16)
        self._changed = threading.Condition()
        self._started = False
        self._nodes: dict[int, socket.socket] = {}  # by node_rank; a node counts as alive as long as its connection
        self._links: dict[int, socket.socket] = {}  # by rank
        self._greeted = threading.BoundedSemaphore(MOST_GREETED)
        self._warned: dict[str, float] = {}  # by host: time of the last warning
        self._closed = threading.Event()
        self._ping = NOT_READY
        self._pinged = 0.0
        host, port = own_address(config.rendezvous, RESOLVE_S)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=MOST_GREETED)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(
                f"rendezvous is {config.rendezvous!r}, where node 0 cannot listen ({reason}); allowed: an address of "
                "node 0 and a free port"
            ) from None
        self.address = host  # this machine's, as the other nodes see it
        threading.Thread(target=self._accept, name="nodes", daemon=True).start()

    def gather(self) -> None:
        """Waits, without a limit, until every node has joined, and lets them start.

        Raises EngineDeadError if one leaves at that moment.
        """
        said = float("-inf")
        with self._changed:
            while missing := self._missing():
                if time.monotonic() - said > SAY_S:
                    said = time.monotonic()
                    log.info("waiting at %s for node %s", self._config.rendezvous, " and ".join(map(str, missing)))
                self._changed.wait(PING_S)
            self._started = True
            nodes = dict(self._nodes)
        accepted = Accepted(
            group=self._group,
            options=dataclasses.asdict(self._config),
            environment=dataclasses.asdict(self._environment),
        )
        for node_rank, connection in nodes.items():
            try:
                send_message(connection, accepted)
            except OSError as error:
                raise EngineDeadError(f"node {node_rank} left as the group met: {error}") from error
        log.info("all %d nodes have come", self._config.nodes)

    def _missing(self) -> list[int]:
        for node_rank, connection in list(self._nodes.items()):
            if has_ended(connection):
                log.warning("node %d has left", node_rank)
                self._nodes.pop(node_rank).close()
        return [node_rank for node_rank in range(1, self._config.nodes) if node_rank not in self._nodes]

    def links(self) -> list[socket.socket]:
        """The connections to the ranks of the other nodes, in rank order; the caller closes them.

        Raises EngineDeadError if they do not come.
        """
        ranks = range(self._config.ranks_per_node, self._config.tp)
        deadline = time.monotonic() + LINKS_S
        with self._changed:
            while len(self._links) < len(ranks):
                lost = self.look()
                if lost is not None or time.monotonic() > deadline:
                    missing = next(rank for rank in ranks if rank not in self._links)
                    raise EngineDeadError(lost or f"no connection to tensor-parallel rank {missing} came")
                self._changed.wait(PING_S)
            return [self._links[rank] for rank in ranks]

    @property
    def connections(self) -> list[socket.socket]:
        """One to each node; readable when `look` has something to report."""
        return list(self._nodes.values())

    def note_ready(self) -> None:
        """The whole group is ready."""
        self._ping = READY

    def look(self) -> str | None:
        """Returns which node has left or is lost; to be called every PING_S or more often. A node counts as lost when
        it does not take what is sent to it."""
        now = time.monotonic()
        pings = now - self._pinged >= PING_S
        if pings:
            self._pinged = now
        for node_rank, connection in self._nodes.items():
            if pings:
                with contextlib.suppress(OSError):  # `look` checks it in a moment
                    connection.send(self._ping, socket.MSG_DONTWAIT)
            if has_ended(connection):
                return f"node {node_rank} of {self._config.nodes} left or is lost; its log says more"
        return None

    def close(self) -> None:
        """Leaves the other nodes, which end their ranks and wait for the next group."""
        self._closed.set()
        # Sending to a machine that is gone would otherwise block for minutes.
        for connection in (self._listener, *self._nodes.values(), *self._links.values()):
            shut(connection)

    def _accept(self) -> None:
        for connection, address in accept_until(self._listener, self._closed):
            if not self._greeted.acquire(blocking=False):
                connection.close()  # a node asks again
                continue
            thread = threading.Thread(target=self._greet, args=(connection, address[0]), name="greet", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                log.warning("a connection of %s could not be taken: %s", address[0], error)
                self._greeted.release()
                connection.close()

    def _greet(self, connection: socket.socket, host: str) -> None:
        kept = False
        try:
            if greet_as_listener(connection, self._secret):
                kept = self._obey(read_message(connection, Request), connection, host)
            elif self._warns_of(host):
                log.warning("%s connected to the rendezvous without knowing the secret", host)
        except (OSError, RuntimeError) as error:
            log.debug("a connection of %s came to nothing: %s", host, error)
        finally:
            self._greeted.release()
            if not kept:
                connection.close()

    def _warns_of(self, host: str) -> bool:
        now = time.monotonic()
        with self._changed:
            self._warned = {one: at for one, at in self._warned.items() if now - at < WARN_S}
            if host in self._warned or len(self._warned) >= MOST_WARNED:
                return False
            self._warned[host] = now
            return True

    def _obey(self, request: Request, connection: socket.socket, host: str) -> bool:
        """Returns whether the connection stays open."""
        if isinstance(request, Join):
            refused = self._join(request, connection, host)
        elif request.group != self._group:
            refused = Refused(reason="this is another group", final=False)
        elif isinstance(request, Link):
            refused = self._link(request, connection)
        else:
            send_message(connection, Accepted())
            tie(connection, socket.create_connection(("127.0.0.1", self._store_port), timeout=GREET_S))
            return True
        if refused is not None:
            send_message(connection, refused)
        return refused is None

    def _join(self, join: Join, connection: socket.socket, host: str) -> Refused | None:
        problem = self._mismatch(join)
        if problem is not None:
            log.error("node %d (%s) is refused: %s", join.node_rank, host, problem)
            return Refused(reason=problem, final=True)
        with self._changed:
            if self._started:
                return Refused(reason="the group runs", final=False)
            before = self._nodes.get(join.node_rank)
            if before is not None and not has_ended(before):
                return Refused(reason=f"a node with --node-rank {join.node_rank} has come already", final=False)
            if before is not None:
                before.close()
            connection.settimeout(None)
            watch_closely(connection)
            self._nodes[join.node_rank] = connection
            self._changed.notify_all()
        log.info("node %d has come from %s", join.node_rank, host)
        return None

    def _mismatch(self, join: Join) -> str | None:
        """Why a node does not fit the group, as one line."""
        config = self._config
        if join.version != minisgl_backend.__version__:
            return f"version is {join.version}; allowed: {minisgl_backend.__version__}, as on node 0"
        ours = dataclasses.asdict(config)
        for name, value in ours.items():
            # The model's folder may differ between nodes; its content must not.
            if name != "model" and join.options.get(name) != value:
                return f"{name} is {_shown(join.options.get(name))}; allowed: {_shown(value)}, as on node 0"
        if not 1 <= join.node_rank < config.nodes:
            return f"--node-rank is {join.node_rank}; allowed next to node 0: 1 to {config.nodes - 1}"
        for name in sorted({*self._files, *join.files}):
            if config.dummy_weights and name != "config.json":
                continue
            if self._files.get(name) != join.files.get(name):
                return f"model is another one than on node 0: {name} differs; allowed: the same files"
        return None

    def _link(self, link: Link, connection: socket.socket) -> Refused | None:
        with self._changed:
            if not self._config.ranks_per_node <= link.rank < self._config.tp or link.rank in self._links:
                return Refused(reason=f"rank {link.rank} is none, or is there already", final=False)
            send_message(connection, Accepted())
            connection.settimeout(None)
            self._links[link.rank] = connection
            self._changed.notify_all()
        return None


def _shown(value: Any) -> str:
    return "unset" if value is None else repr(value)
