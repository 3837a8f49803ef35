"""Confirmations from detokenizer to fronts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl_backend.engine.handled import MOST_UNTOLD, HandledReceiver, HandledSender
from minisgl_backend.engine.messages import CANCELLED, uid_of


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[HandledSender]:
    sender = HandledSender(tmp_path)
    yield sender
    sender.close()


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[HandledReceiver]:
    receiver = HandledReceiver(tmp_path, 0)
    yield receiver
    receiver.close()


def pairs(receiver: HandledReceiver) -> list[tuple[int, int]]:
    uids, numbers, _ = receiver.receive()
    return list(zip(uids.tolist(), numbers.tolist(), strict=True))


def test_each_front_hears_of_its_own_in_order(sender: HandledSender, receiver: HandledReceiver, tmp_path: Path) -> None:
    other = HandledReceiver(tmp_path, 3)
    sender.send([uid_of(3, 1), uid_of(0, 2), uid_of(3, 4)], [10, 20, 30])
    sender.send([uid_of(3, 1)], [11])
    assert pairs(receiver) == [(uid_of(0, 2), 20)]
    assert pairs(other) == [(uid_of(3, 1), 10), (uid_of(3, 4), 30), (uid_of(3, 1), 11)]
    assert pairs(receiver) == []
    other.close()


def test_the_moment_of_a_finding_comes_with_it(sender: HandledSender, receiver: HandledReceiver) -> None:
    sender.send([1], [10], 5.0)  # nobody has left
    assert receiver.receive()[2] == 0.0
    sender.send([1, 1], [11, CANCELLED], 6.0)
    assert receiver.receive()[2] == 6.0


def test_what_finds_no_room_comes_later_and_in_order(sender: HandledSender, receiver: HandledReceiver) -> None:
    count = 0
    while not sender.has_untold:  # the front does not read
        count += 1
        sender.send([1], [count])
    assert 1 < count < 100_000
    sender.send([1, 1], [count + 1, CANCELLED], 7.0)
    assert pairs(receiver) == [(1, number) for number in range(1, count)]
    sender.send([1], [count + 2])
    uids, numbers, found_at = receiver.receive()
    assert (numbers.tolist(), found_at) == ([count, count + 1, CANCELLED, count + 2], 7.0)
    assert set(uids.tolist()) == {1}
    assert not sender.has_untold


def test_what_waits_for_a_front_is_bounded(sender: HandledSender, receiver: HandledReceiver) -> None:
    while not sender.has_untold:
        sender.send([1], [0])
    sender.send([1] * 2 * MOST_UNTOLD, range(2 * MOST_UNTOLD))
    pairs(receiver)
    sender.send([1], [-5])
    assert [number for _, number in pairs(receiver)] == [*range(MOST_UNTOLD, 2 * MOST_UNTOLD), -5]
    assert not sender.has_untold


def test_a_front_that_is_not_there_or_has_gone_holds_nothing_up(sender: HandledSender, tmp_path: Path) -> None:
    sender.send([uid_of(9, 1)], [1])
    assert not sender.has_untold
    gone = HandledReceiver(tmp_path, 9)
    gone.close()
    sender.send([uid_of(9, 1)], [2])
    assert not sender.has_untold
    again = HandledReceiver(tmp_path, 9)  # in place of the file that the other one left
    sender.send([uid_of(9, 1)], [3])
    assert pairs(again) == [(uid_of(9, 1), 3)]
    again.close()


def test_malformed_datagrams_are_skipped(sender: HandledSender, receiver: HandledReceiver, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for payload in (b"", b"\xc1", b"\x80", b"x" * 1000):
            stranger.sendto(payload, str(tmp_path / "front-0"))
    sender.send([1], [1])
    assert pairs(receiver) == [(1, 1)]
