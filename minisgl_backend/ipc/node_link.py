"""TCP connections between the nodes of one model, opened by a node to node 0, with a shared secret.

Each side proves that it knows the secret, by an HMAC of fresh random numbers, before anything else is read. After that
nothing is encrypted or authenticated: the network between the nodes must be trusted, as the collectives' own traffic
requires, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from minisgl_backend.errors import ConfigError

log = logging.getLogger(__name__)

GREETING = b"minisgl node 1\n"  # the number is the protocol's version
NONCE_BYTES = 32
DIGEST = hashlib.sha256
DIGEST_BYTES = DIGEST().digest_size
MOST_BYTES = 1 << 20  # per message
GREET_S = 5.0  # for each step of the handshake
ACCEPT_AGAIN_S = 0.1  # after an error other than the listener's end
# A machine that is gone does not answer. The kernels answer each other, so a busy process does not count as gone.
LOST_MS = 1000  # unacknowledged data for that long ends a closely watched connection
LOST_PROBES = 3  # one a second, on other connections while nothing is sent

_LENGTH = struct.Struct("<I")
_KNOWN, _UNKNOWN = b"+", b"-"

# Sent regularly by node 0 on the connection that a node joined with, while the group starts and serves.
NOT_READY, READY = b".", b"+"


class Join(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A node asks to join the group; the reply comes when all nodes have asked."""

    version: str
    node_rank: int
    options: dict[str, Any]  # its EngineConfig
    files: dict[str, str]  # `models.folder.fingerprint` of its model


class Link(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From now on the connection carries step plans to one rank, and its heartbeats back."""

    group: str
    rank: int


class Store(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From now on the connection leads to rank 0's rendezvous store."""

    group: str


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The reply to all three. To Join: what to start the ranks with; then a byte now and then."""

    group: str = ""  # a random name that only its members know
    options: dict[str, Any] = {}  # node 0's EngineConfig
    environment: dict[str, Any] = {}  # the environment variables that it read


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The other reply; the connection ends."""

    reason: str
    final: bool  # asking again is useless


Request = Join | Link | Store
Reply = Accepted | Refused


def greet_as_listener(connection: socket.socket, secret: bytes) -> bool:
    """Returns whether the other side knows the secret, and tells it. Raises OSError if it sends nothing or something
    else."""
    connection.settimeout(GREET_S)
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(GREETING + nonce)
    answer = read_exactly(connection, NONCE_BYTES + DIGEST_BYTES)
    theirs, digest = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(digest, _digest(secret, b"node", nonce, theirs)):
        connection.sendall(_UNKNOWN)
        return False
    connection.sendall(_KNOWN + _digest(secret, b"node 0", theirs, nonce))
    set_timeouts(connection)
    return True


def connect(address: str, secret: bytes) -> socket.socket:
    """Opens a connection to node 0 at HOST:PORT.

    Raises OSError if nothing listens there or replies in time, ConfigError if its secret or protocol is a different
    one.
    """
    connection = socket.create_connection(split_address(address), timeout=GREET_S)
    try:
        _greet_listener(connection, address, secret)
        set_timeouts(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _greet_listener(connection: socket.socket, address: str, secret: bytes) -> None:
    try:
        greeting = read_exactly(connection, len(GREETING))
    except TimeoutError:  # a busy node 0, or a program whose clients speak first
        raise TimeoutError(f"who listens there did not greet within {GREET_S:g} s") from None
    if greeting != GREETING:
        raise ConfigError(f"rendezvous is {address!r}, where something else than node 0 listens, or another version")
    theirs = read_exactly(connection, NONCE_BYTES)
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(nonce + _digest(secret, b"node", theirs, nonce))
    if read_exactly(connection, 1) != _KNOWN or not hmac.compare_digest(
        read_exactly(connection, DIGEST_BYTES), _digest(secret, b"node 0", nonce, theirs)
    ):
        raise ConfigError(f"the rendezvous secret is not that of node 0 at {address}")


def _digest(secret: bytes, who: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(secret, b"\0".join((GREETING, who, first, second)), DIGEST).digest()


def split_address(address: str) -> tuple[str, int]:
    """Splits HOST:PORT or [HOST]:PORT."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def set_timeouts(connection: socket.socket) -> None:
    """Sends small messages at once, and reports an error some seconds after the other machine has gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, LOST_PROBES)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def watch_closely(connection: socket.socket) -> None:
    """Reports an error if data stays unacknowledged for LOST_MS. Only where the other side always reads: one that is
    busy while much is sent would count as gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_MS)


def send_message(connection: socket.socket, message: Request | Reply) -> None:
    data = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def read_message(connection: socket.socket, kind: Any) -> Any:
    """Reads one of `kind`, a type or a union of them. Raises OSError if something else came, or nothing in time."""
    (count,) = _LENGTH.unpack(read_exactly(connection, _LENGTH.size))
    if count > MOST_BYTES:
        raise ConnectionError(f"a message of {count} bytes")
    try:
        return msgspec.msgpack.decode(read_exactly(connection, count), type=kind)
    except msgspec.MsgspecError as error:
        raise ConnectionError(f"no message: {error}") from None


def read_exactly(connection: socket.socket, count: int) -> bytes:
    """Raises ConnectionError if the connection ends earlier, TimeoutError if all of it takes longer than the
    connection's timeout."""
    patience = connection.gettimeout()
    end = None if patience is None else time.monotonic() + patience
    data = bytearray()
    while len(data) < count:
        if end is not None:
            connection.settimeout(max(end - time.monotonic(), 1e-3))
        piece = connection.recv(count - len(data))
        if not piece:
            raise ConnectionError("the connection ended")
        data += piece
    connection.settimeout(patience)
    return bytes(data)


def has_ended(connection: socket.socket) -> bool:
    """Whether the other side has closed it or is lost; reads nothing. For a connection without a timeout."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def tie(one: socket.socket, other: socket.socket) -> None:
    """From now on forwards data between the two, on two threads, until either ends; both are then closed.

    Raises RuntimeError if no thread can be started; both are then closed, too.
    """
    for connection in (one, other):
        connection.settimeout(None)
    ends = [threading.Event(), threading.Event()]
    try:
        for index, (source, target) in enumerate(((one, other), (other, one))):
            threading.Thread(
                target=_hand_on, args=(source, target, ends[index], ends[1 - index]), name="relay", daemon=True
            ).start()
    except RuntimeError:
        shut(one)
        shut(other)
        raise


def _hand_on(source: socket.socket, target: socket.socket, ended: threading.Event, others: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for connection in (source, target):
        _wake(connection)
    ended.set()
    if others.is_set():  # the last thread; closing twice does no harm
        source.close()
        target.close()


def accept_until(listener: socket.socket, ended: threading.Event) -> Iterator[tuple[socket.socket, Any]]:
    """Yields each connection and its address, until `ended` is set and the listener is `shut`. Other errors, such as
    too many open files, are logged once until a connection can be accepted again."""
    fails = False
    while not ended.is_set():
        try:
            accepted = listener.accept()
        except OSError as error:
            if not ended.is_set():
                if not fails:
                    log.warning("a connection cannot be taken: %s; it is tried again until it can", error)
                fails = True
                ended.wait(ACCEPT_AGAIN_S)
            continue
        fails = False
        yield accepted


def shut(connection: socket.socket) -> None:
    """Closes it, also a listener. A thread that waits in it continues with an error: `close` alone would not wake
    it."""
    _wake(connection)
    connection.close()


def _wake(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def own_address(rendezvous: str, patience_s: float) -> tuple[str, int]:
    """(IP address, port) at which node 0 listens. Cluster DNS names may appear later than their machines.

    Raises ConfigError if that takes longer than `patience_s`, or if the name's address is a loopback one (127.0.1.1 in
    many an /etc/hosts).
    """
    host, port = split_address(rendezvous)
    end = time.monotonic() + patience_s
    while True:
        try:
            found = [str(one[4][0]) for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
            break
        except OSError as error:
            if time.monotonic() >= end:
                raise ConfigError(f"rendezvous is {rendezvous!r}, whose name is not known: {error.strerror}") from None
        time.sleep(0.5)
    reached = [one for one in found if not ipaddress.ip_address(one.partition("%")[0]).is_loopback]
    if not reached and host != "localhost" and host not in found:
        raise ConfigError(
            f"rendezvous is {rendezvous!r}, which is {found[0]} here and leads nowhere from other machines; allowed: "
            "an IP address of node 0"
        )
    return (reached or found)[0], port
