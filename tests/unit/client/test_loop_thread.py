"""The thread of a client for threads: when it ends, and what it cannot do."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable

import pytest
from fake_server import Record

from client import Client, ClientError

WAIT = 10.0


def loops() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "minisgl-client"}


@pytest.mark.parametrize("close", [Client.close, lambda client: None])
def test_the_thread_ends_with_the_last_stream(url: str, record: Record, close: Callable[[Client], None]) -> None:
    before = loops()
    client = Client(url)
    stream = client.stream("forever")
    next(stream)
    (thread,) = loops() - before
    close(client)
    del client
    gc.collect()
    assert thread.is_alive()
    del stream
    gc.collect()
    thread.join(WAIT)
    assert not thread.is_alive()
    assert record.cancelled.wait(WAIT)


def test_a_closed_client_answers_nothing(url: str) -> None:
    client = Client(url)
    client.close()
    client.close()
    with pytest.raises(ClientError, match="this client is closed"):
        client.generate("Hallo")


def test_a_client_does_not_survive_a_fork(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Client(url) as client:
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 0)
            with pytest.raises(ClientError, match="make one in each process"):
                client.is_live()
        assert client.is_live()


def test_a_request_is_sent_before_its_answer_is_read(url: str, record: Record) -> None:
    with Client(url) as client:
        stream = client.stream("Hallo")
        deadline = time.monotonic() + WAIT
        while not record.requests and time.monotonic() < deadline:
            time.sleep(0.01)
        assert record.requests
        assert stream.result().text
