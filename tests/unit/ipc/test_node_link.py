"""Connections between nodes: nobody gets in without the secret, and what comes is bounded."""

from __future__ import annotations

import errno
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from minisgl_backend.errors import ConfigError
from minisgl_backend.ipc import node_link
from minisgl_backend.ipc.node_link import (
    GREETING,
    LOST_MS,
    NONCE_BYTES,
    Accepted,
    Link,
    Refused,
    Reply,
    Request,
    accept_until,
    connect,
    greet_as_listener,
    has_ended,
    own_address,
    read_message,
    send_message,
    shut,
    split_address,
    tie,
    watch_closely,
)

SECRET = b"a secret of the nodes"


@contextmanager
def listening(work: Callable[[socket.socket], object]) -> Iterator[str]:
    """The address of a listener that does `work` with each connection."""

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                work(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def test_those_who_know_the_secret_talk() -> None:
    def answer(connection: socket.socket) -> None:
        assert greet_as_listener(connection, SECRET)
        link = read_message(connection, Request)
        send_message(connection, Accepted(group=link.group) if link.rank == 1 else Refused(reason="no", final=True))

    with listening(answer) as address:
        for rank, expected in ((1, Accepted(group="g")), (2, Refused(reason="no", final=True))):
            with connect(address, SECRET) as connection:
                send_message(connection, Link(group="g", rank=rank))
                assert read_message(connection, Reply) == expected


def test_another_secret_is_refused_on_both_sides() -> None:
    known = []
    greets = listening(lambda connection: known.append(greet_as_listener(connection, SECRET)))
    with greets as address, pytest.raises(ConfigError, match="the rendezvous secret is not that of node 0"):
        connect(address, b"another secret of nodes")
    assert known == [False]


def test_a_listener_that_only_claims_to_know_the_secret_is_refused() -> None:
    def claim(connection: socket.socket) -> None:
        connection.sendall(GREETING + bytes(NONCE_BYTES))
        answer = connection.recv(1024)
        connection.sendall(b"+" + answer[NONCE_BYTES:])  # what the node has sent, reflected

    with listening(claim) as address, pytest.raises(ConfigError, match="secret is not that of node 0"):
        connect(address, SECRET)


def test_something_else_that_listens_is_refused() -> None:
    says_something = listening(lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n"))
    with says_something as address, pytest.raises(ConfigError, match="something else than node 0"):
        connect(address, SECRET)


def test_a_listener_that_does_not_greet_in_time_may_do_so_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_link, "GREET_S", 0.2)
    waits_for_its_client = listening(lambda connection: connection.recv(1))
    with waits_for_its_client as address, pytest.raises(TimeoutError, match="did not greet"):
        connect(address, SECRET)


def test_who_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_link, "GREET_S", 0.1)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TimeoutError):
        greet_as_listener(ours, SECRET)


@pytest.mark.parametrize("data", [struct.pack("<I", 1 << 30), struct.pack("<I", 3) + b"abc"])
def test_what_is_no_message_ends_a_connection(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        with pytest.raises(ConnectionError):
            read_message(ours, Request)


def test_a_connection_hears_soon_of_a_machine_that_is_gone() -> None:
    greets = listening(lambda connection: greet_as_listener(connection, SECRET))
    with greets as address, connect(address, SECRET) as connection:
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        watch_closely(connection)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == LOST_MS
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_an_end_is_seen_without_reading() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        assert not has_ended(ours)
        theirs.send(b"x")
        assert not has_ended(ours)
        assert ours.recv(1) == b"x"
        theirs.close()
        assert has_ended(ours)


def test_tied_connections_are_one() -> None:
    (left, left_relay), (right_relay, right) = socket.socketpair(), socket.socketpair()
    tie(left_relay, right_relay)
    left.settimeout(10)
    right.settimeout(10)
    with left, right:
        left.sendall(b"there")
        assert right.recv(10) == b"there"
        right.sendall(b"back")
        assert left.recv(10) == b"back"
        left.close()
        assert right.recv(10) == b""


def test_connections_are_closed_where_no_thread_can_tie_them(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, []

    def start_one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    (left, left_relay), (right_relay, right) = socket.socketpair(), socket.socketpair()
    left.settimeout(10)
    right.settimeout(10)
    with left, right:
        with pytest.raises(RuntimeError):
            tie(left_relay, right_relay)
        assert left.recv(10) == right.recv(10) == b""
    started[0].join(10)
    assert not started[0].is_alive()
    assert left_relay.fileno() == right_relay.fileno() == -1


def test_a_listener_outlives_errors_and_ends_at_once(caplog: pytest.LogCaptureFixture) -> None:
    class Listener(socket.socket):
        fails = 3

        def accept(self) -> tuple[socket.socket, Any]:
            if self.fails:
                self.fails -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    def accept() -> None:
        for connection, _ in accept_until(listener, ended):
            connection.close()

    ended = threading.Event()
    listener = Listener()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    for _ in range(2):
        with socket.create_connection(listener.getsockname(), timeout=10) as connection:
            assert connection.recv(1) == b""
    assert [record.message for record in caplog.records if "Too many" in record.message][1:] == []  # said once
    time.sleep(0.1)  # it waits for the next one
    ended.set()
    shut(listener)
    thread.join(10)
    assert not thread.is_alive()


def test_addresses() -> None:
    assert split_address("node0:29600") == ("node0", 29600)
    assert split_address("[::1]:29600") == ("::1", 29600)
    assert own_address("localhost:29600", 0)[1] == 29600
    assert own_address("127.0.0.1:29600", 0) == ("127.0.0.1", 29600)
    with pytest.raises(ConfigError, match=r"rendezvous is 'no.such.host.invalid:1'"):
        own_address("no.such.host.invalid:1", 0)


def test_a_name_that_a_machine_has_for_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*addresses: str) -> None:
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 1)) for one in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)

    resolve("127.0.1.1")
    with pytest.raises(ConfigError, match=r"rendezvous is 'node0:1', which is 127\.0\.1\.1 here"):
        own_address("node0:1", 0)
    resolve("127.0.1.1", "10.0.0.1")
    assert own_address("node0:1", 0) == ("10.0.0.1", 1)
