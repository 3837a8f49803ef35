"""KV events for those who ask again: what they get, and what they cannot make it cost."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from minisgl_backend.engine import kv_replay as module
from minisgl_backend.engine.kv_replay import END, KVReplay

FIRST = (0).to_bytes(8, "big")


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/replay"


@pytest.fixture
def replay(context: zmq.Context, address: str) -> Iterator[KVReplay]:
    found = KVReplay(context)
    found.start(address)
    yield found
    found.close(linger_ms=0)


def ask(context: zmq.Context, address: str, first: bytes = FIRST) -> zmq.Socket:
    client = context.socket(zmq.DEALER)
    client.connect(address)
    client.send_multipart([b"", first])
    return client


def numbers(client: zmq.Socket) -> list[int]:
    """Those of an answer."""
    found = []
    while True:
        assert client.poll(20_000), "no answer"
        _, number, payload = client.recv_multipart()
        if number == END:
            assert payload == b""
            return found
        found.append(int.from_bytes(number, "big"))
        assert payload == b"batch %d" % found[-1]


def test_an_answer_is_what_is_kept_from_a_number_on(
    replay: KVReplay, context: zmq.Context, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert numbers(ask(context, address)) == []
    monkeypatch.setattr(module, "KEPT_BATCHES", 100)
    for number in range(130):
        replay.keep(number, b"batch %d" % number)
    assert numbers(ask(context, address)) == list(range(30, 130))
    for first in (29, 30, 31, 61, 129, 130, 1 << 63):
        assert numbers(ask(context, address, first.to_bytes(8, "big"))) == list(range(max(first, 30), 130))


@pytest.mark.parametrize("identity", [b"6c3a1e0e-3f55-4f0e-9c66-0f1f6a5d2b41", b"x" * 255])
def test_who_asks_may_have_an_id_as_long_as_zmq_allows(
    replay: KVReplay, context: zmq.Context, address: str, identity: bytes
) -> None:
    replay.keep(0, b"batch 0")
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.IDENTITY, identity)
    client.connect(address)
    client.send_multipart([b"", FIRST])
    assert client.poll(5000), "cut off while it said who it is"
    assert numbers(client) == [0]


def test_what_is_kept_is_bounded_in_bytes_too(
    replay: KVReplay, context: zmq.Context, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", 100)
    for number in range(100):
        replay.keep(number, b"batch %d" % number)
    assert numbers(ask(context, address)) == list(range(88, 100)), "8 bytes each"


def test_an_answer_ends_though_more_is_published_all_the_time(
    replay: KVReplay, context: zmq.Context, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = itertools.count()
    piece = replay._piece

    def piece_and_more(start: int, stop: int) -> list[tuple[int, bytes]]:
        found = piece(start, stop)
        for _ in range(module.PIECE_BATCHES):
            replay.keep(number := next(endless), b"batch %d" % number)
        return found

    for _ in range(50):
        replay.keep(number := next(endless), b"batch %d" % number)
    monkeypatch.setattr(replay, "_piece", piece_and_more)
    assert numbers(ask(context, address)) == list(range(50))


def test_who_asks_and_does_not_read_costs_little_and_holds_nobody_up_for_long(
    replay: KVReplay, context: zmq.Context, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READER_WAIT_S", 0.1)
    sent = []
    send = replay._send
    monkeypatch.setattr(replay, "_send", lambda *arguments: sent.append(arguments) or send(*arguments))
    for number in range(5000):
        replay.keep(number, b"batch %d" % number)
    idle = context.socket(zmq.DEALER)
    idle.setsockopt(zmq.RCVHWM, 1)
    idle.connect(address)
    for _ in range(20):
        idle.send_multipart([b"", FIRST])
    while not sent:
        time.sleep(0.005)
    assert numbers(ask(context, address)) == list(range(5000)), "the other one is served"
    to_idle = [arguments for arguments in sent if arguments[0] == sent[0][0]]
    assert len(to_idle) < 3000, "of 100,000 that it asked for"


def test_who_leaves_before_the_answer_is_forgotten(
    replay: KVReplay, context: zmq.Context, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5000):
        replay.keep(number, b"batch %d" % number)
    client = ask(context, address)
    assert client.poll(20_000)
    client.close(linger=0)
    assert numbers(ask(context, address)) == list(range(5000))


@pytest.mark.parametrize("request_frames", [[b""], [b"", b"1"], [b"", FIRST, b""], [b"", bytes(1 << 20)]])
def test_what_is_no_request_is_not_answered(
    replay: KVReplay, context: zmq.Context, address: str, request_frames: list[bytes]
) -> None:
    client = context.socket(zmq.DEALER)
    client.connect(address)
    client.send_multipart(request_frames)
    assert numbers(ask(context, address)) == []
    assert not client.poll(50)


def test_answers_take_no_more_than_their_share_of_a_processor(
    replay: KVReplay, context: zmq.Context, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, waited = itertools.count(step=0.002), []
    monkeypatch.setattr(module.time, "thread_time", lambda: next(used))
    monkeypatch.setattr(replay._closing, "wait", waited.append)
    for number in range(3 * module.PIECE_BATCHES):
        replay.keep(number, b"batch %d" % number)
    assert len(numbers(ask(context, address))) == 3 * module.PIECE_BATCHES
    while len(waited) < 4:
        time.sleep(0.005)
    assert waited == [pytest.approx(0.002 * (1 / module.SHARE - 1))] * 4
