"""Acknowledgements from detokenizer to fronts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl_backend.ipc.acks import MAX_UNSENT, AckReceiver, AckSender
from minisgl_backend.ipc.messages import CANCELLED, uid_of


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[AckSender]:
    sender = AckSender(tmp_path)
    yield sender
    sender.close()


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[AckReceiver]:
    receiver = AckReceiver(tmp_path, 0)
    yield receiver
    receiver.close()


def pairs(receiver: AckReceiver) -> list[tuple[int, int]]:
    uids, numbers, _ = receiver.receive()
    return list(zip(uids.tolist(), numbers.tolist(), strict=True))


def send(sender: AckSender, *pairs: tuple[int, int]) -> bool:
    for uid, number in pairs:
        sender.note(uid, number)
    return sender.flush()


def test_each_front_hears_of_its_own_in_order(sender: AckSender, receiver: AckReceiver, tmp_path: Path) -> None:
    other = AckReceiver(tmp_path, 3)
    assert send(sender, (uid_of(3, 1), 10), (uid_of(0, 2), 20), (uid_of(3, 4), 30))
    assert send(sender, (uid_of(3, 1), 11))
    assert pairs(receiver) == [(uid_of(0, 2), 20)]
    assert pairs(other) == [(uid_of(3, 1), 10), (uid_of(3, 4), 30), (uid_of(3, 1), 11)]
    assert pairs(receiver) == []
    other.close()


def test_the_moment_of_the_first_finding_comes_with_it(sender: AckSender, receiver: AckReceiver) -> None:
    send(sender, (1, 10))
    assert receiver.receive()[2] == 0.0
    sender.note(1, 11)
    sender.note_gone(1, 6.0)
    sender.note_gone(2, 7.0)
    assert len(sender) == 3
    assert pairs(receiver) == [], "nothing goes out by itself"
    sender.flush()
    uids, numbers, found_at = receiver.receive()
    assert (uids.tolist(), numbers.tolist(), found_at) == ([1, 1, 2], [11, CANCELLED, CANCELLED], 6.0)


def test_what_finds_no_room_comes_later_and_in_order(sender: AckSender, receiver: AckReceiver) -> None:
    count = 1
    while send(sender, (1, count)):  # the front does not read
        count += 1
    assert 1 < count < 100_000
    sender.note(1, count + 1)
    sender.note_gone(1, 7.0)
    assert not sender.flush()
    assert pairs(receiver) == [(1, number) for number in range(1, count)]
    assert send(sender, (1, count + 2))
    uids, numbers, found_at = receiver.receive()
    assert (numbers.tolist(), found_at) == ([count, count + 1, CANCELLED, count + 2], 7.0)
    assert set(uids.tolist()) == {1}
    assert len(sender) == 0


def test_what_waits_for_a_front_is_bounded_and_says_all_that_counts(sender: AckSender, receiver: AckReceiver) -> None:
    while send(sender, (1, 0)):
        pass
    sender.note_gone(2, 7.0)
    sender.note(2, 1)  # of a sibling's chunk that came with it
    assert not send(sender, *((uid, number) for number in range(1, MAX_UNSENT) for uid in (1, 3)))
    pairs(receiver)
    assert send(sender, (1, MAX_UNSENT))
    assert pairs(receiver) == [(1, MAX_UNSENT - 1), (2, CANCELLED), (3, MAX_UNSENT - 1), (1, MAX_UNSENT)]


def test_streams_beyond_any_number_do_not_fill_memory(sender: AckSender, receiver: AckReceiver) -> None:
    while send(sender, (1, 0)):
        pass
    assert not send(sender, *((uid, 1) for uid in range(2 * MAX_UNSENT)))
    assert len(sender) == MAX_UNSENT


def test_a_front_that_is_not_there_or_has_gone_holds_nothing_up(sender: AckSender, tmp_path: Path) -> None:
    assert send(sender, (uid_of(9, 1), 1))
    gone = AckReceiver(tmp_path, 9)
    gone.close()
    assert send(sender, (uid_of(9, 1), 2))
    again = AckReceiver(tmp_path, 9)  # in place of the file that the other one left
    assert send(sender, (uid_of(9, 1), 3))
    assert pairs(again) == [(uid_of(9, 1), 3)]
    again.close()


def test_malformed_datagrams_are_skipped(sender: AckSender, receiver: AckReceiver, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for payload in (b"", b"\xc1", b"\x80", b"x" * 1000):
            stranger.sendto(payload, str(tmp_path / "front-0"))
    send(sender, (1, 1))
    assert pairs(receiver) == [(1, 1)]
