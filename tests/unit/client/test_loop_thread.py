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


def test_a_forked_process_uses_a_client_over_http_and_is_refused_one_over_grpc(url: str) -> None:
    with Client(url) as client:
        assert client.is_live()
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            try:
                os.write(writing, str(client.is_live()).encode())
            except ClientError as error:
                os.write(writing, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        said = os.read(reading, 1000).decode()
        os.close(reading), os.close(writing)
        assert said == "True" if url.startswith("http") else "make one in each process" in said
        assert client.is_live()


def test_a_request_is_sent_before_its_answer_is_read(url: str, record: Record) -> None:
    with Client(url) as client:
        stream = client.stream("Hallo")
        deadline = time.monotonic() + WAIT
        while not record.requests and time.monotonic() < deadline:
            time.sleep(0.01)
        assert record.requests
        assert stream.result().text
