"""The publisher of KV events: addresses, a subscriber that listens, and what comes first."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest
import zmq

from benchmarks.served import free_ports
from minisgl_backend.cache.changes import PagesRemoved, PagesStored
from minisgl_backend.engine.kv_events import KVEventPublisher, endpoint_of


@pytest.mark.parametrize(
    ("endpoint", "dp_rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://router.default:5557", 1, "tcp://router.default:5558"),
        ("ipc:///run/kv", 2, "ipc:///run/kv-2"),
    ],
)
def test_each_engine_core_has_an_address_of_its_own(endpoint: str, dp_rank: int, expected: str) -> None:
    assert endpoint_of(endpoint, dp_rank) == expected


def test_a_subscriber_may_be_the_one_that_listens() -> None:
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    port = subscriber.bind_to_random_port("tcp://127.0.0.1")
    publisher = KVEventPublisher(f"tcp://127.0.0.1:{port}", topic="kv", page_size=2, dp_rank=0)
    stored = PagesStored([11, 12], None, np.array([1, 2, 3, 4], dtype=np.int32), b"tenant")
    more = PagesStored([13], 12, np.array([5, 6], dtype=np.int32))
    while not subscriber.poll(20):  # what is published before the connection is there goes to nobody
        publisher.publish([stored, more, PagesRemoved([12])])
    topic, _, payload = subscriber.recv_multipart()
    assert topic == b"kv"
    _, events, rank = msgspec.msgpack.decode(payload)
    assert rank == 0
    assert [event for event in events if event != ["AllBlocksCleared"]] == [
        ["BlockStored", [11, 12], None, [1, 2, 3, 4], 2, None, "GPU", None, [["tenant"], None]],
        ["BlockStored", [13], 12, [5, 6], 2, None, "GPU", None, None],
        ["BlockRemoved", [12], "GPU"],
    ]
    publisher.close()
    context.destroy(linger=0)


def test_whether_anybody_listens_stands_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    context = zmq.Context()
    (port,) = free_ports(1)  # a ZeroMQ socket listens on for a while after it was closed
    publisher = KVEventPublisher(f"tcp://127.0.0.1:{port}", page_size=2)
    lost = f"KV events: nobody listens at tcp://127.0.0.1:{port}; they are lost until somebody does"
    assert [record.getMessage().startswith(lost) for record in caplog.records] == [True]
    assert caplog.records[0].levelname == "WARNING"
    subscriber = context.socket(zmq.SUB)
    subscriber.bind(f"tcp://127.0.0.1:{port}")
    deadline = time.monotonic() + 60.0
    while len(caplog.records) < 2:
        assert time.monotonic() < deadline
        publisher.publish([PagesRemoved([1])])
        time.sleep(0.01)
    assert caplog.records[1].getMessage() == f"KV events: a subscriber listens at tcp://127.0.0.1:{port}"
    publisher.close()
    context.destroy(linger=0)


def test_the_first_blocks_come_behind_a_clearing() -> None:
    """Who connects while an engine core starts again has not heard the batch of the start."""
    publisher = KVEventPublisher("tcp://127.0.0.1:9", page_size=2, dp_rank=0)
    sent: list[list[object]] = []
    publisher._send = sent.append  # type: ignore[assignment, method-assign]
    publisher.publish([PagesRemoved([1])])
    publisher._next = 2
    publisher.publish([PagesRemoved([2])])
    assert [[type(event).__name__ for event in batch] for batch in sent] == [
        ["AllBlocksCleared", "BlockRemoved"],
        ["BlockRemoved"],
    ]
    publisher.close()
