"""Messages over a stream socket: whole and in order, however the bytes are cut, and never waiting."""

from __future__ import annotations

import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl_backend.ipc.frames import FrameSocket


def pair() -> tuple[FrameSocket, FrameSocket]:
    left, right = socket.socketpair()
    return FrameSocket(left), FrameSocket(right)


@given(st.lists(st.binary(max_size=300), max_size=20), st.lists(st.integers(1, 64), min_size=1))
def test_messages_come_whole_however_their_bytes_are_cut(messages: list[bytes], cuts: list[int]) -> None:
    left, right = socket.socketpair()
    receiver = FrameSocket(right)
    data = b"".join(struct.pack("<I", len(message)) + message for message in messages)
    received: list[bytes] = []
    turn = 0
    while data:
        size = cuts[turn % len(cuts)]
        turn += 1
        left.sendall(data[:size])
        data = data[size:]
        received += receiver.receive()
    assert received == messages
    assert not receiver.ended
    left.close()
    assert (receiver.receive(), receiver.ended) == ([], True)
    receiver.close()


def test_a_message_larger_than_the_socket_waits_for_its_reader() -> None:
    sender, receiver = pair()
    message = bytes(range(256)) * 10_000
    sender.send(message)
    assert not sender.flush()
    received: list[bytes] = []
    while not received:
        received = receiver.receive()
        done = sender.flush()
    assert received == [message]
    assert done
    sender.send(b"next")
    assert receiver.receive() == [b"next"]
    sender.close()
    receiver.close()


def test_what_was_said_before_the_end_is_heard() -> None:
    sender, receiver = pair()
    sender.send(b"last words")
    sender.close()
    assert receiver.receive() == [b"last words"]
    assert (receiver.receive(), receiver.ended) == ([], True)
    receiver.close()


def test_a_sender_is_told_that_its_reader_left() -> None:
    sender, receiver = pair()
    receiver.close()
    with pytest.raises(OSError, match="pipe"):
        sender.send(b"hello")
    sender.close()
