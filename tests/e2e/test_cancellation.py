"""Clients that leave: their sequences go, their pages come back, others keep their tokens."""

from __future__ import annotations

import time

import pytest

from tests.e2e.wire import GrpcStream, Server, batched

pytestmark = pytest.mark.e2e

ENDLESS = {"text_input": "Tell me a long story.", "max_tokens": 4000, "ignore_eos": True}


def running(count: int, found: dict[str, float]) -> bool:
    return found["minisgl_requests_running"] == count


def pages_are_free(found: dict[str, float]) -> bool:
    return running(0, found) and found['minisgl_kv_pages{state="leased"}'] == 0


def test_a_cancelled_grpc_stream(null_server: Server) -> None:
    with GrpcStream(null_server) as stream:
        stream.send(batched(**ENDLESS, stream=True))
        for _ in range(5):
            assert not stream.receive().error
        null_server.wait_for(lambda found: running(1, found))
    assert null_server.wait_for(pages_are_free) < 30


def test_a_closed_http_connection(null_server: Server) -> None:
    connection = null_server.open_stream(**ENDLESS)
    null_server.wait_for(lambda found: running(1, found))
    connection.close()
    assert null_server.wait_for(pages_are_free) < 30


def test_half_of_many_streams(null_server: Server) -> None:
    before = null_server.metrics()
    stays = [GrpcStream(null_server) for _ in range(4)]
    leaves = [GrpcStream(null_server) for _ in range(4)]
    for stream in (*stays, *leaves):
        stream.__enter__()
        tokens = 400 if stream in stays else 4000
        stream.send(batched(**{**ENDLESS, "max_tokens": tokens}, stream=True, return_num_output_tokens=True))
        assert not stream.receive().error
    sockets = [null_server.open_stream(**ENDLESS) for _ in range(4)]
    for stream in leaves:
        stream.__exit__()
    for connection in sockets:
        connection.close()
    for stream in stays:
        chunks = list(stream.answers())
        assert not any(chunk.error for chunk in chunks)
        stream.__exit__()
    null_server.wait_for(pages_are_free)
    after = null_server.metrics()
    for name in ("minisgl_requests_cancelled_total", "minisgl_cancellation_seconds_count"):
        assert after[name] - before[name] == 8


def test_every_page_is_accounted_for(null_server: Server) -> None:
    null_server.text(**{**ENDLESS, "max_tokens": 20})
    null_server.wait_for(pages_are_free)
    found = null_server.metrics()
    pages = {state: found[f'minisgl_kv_pages{{state="{state}"}}'] for state in ("free", "cached", "leased", "total")}
    assert pages["free"] + pages["cached"] + pages["leased"] == pages["total"] > 0


def test_latency_histograms_count_tokens(null_server: Server) -> None:
    null_server.wait_for(pages_are_free)
    time.sleep(2.5)  # counts of the streams before are on their way
    before = null_server.metrics()
    null_server.events(**{**ENDLESS, "max_tokens": 50})

    def arrived(found: dict[str, float]) -> bool:
        name = "minisgl_inter_token_seconds_count"
        return found[name] - before[name] == 49

    null_server.wait_for(arrived)
    after = null_server.metrics()
    name = "minisgl_time_to_first_token_seconds"
    assert after[f"{name}_count"] - before[f"{name}_count"] == 1
    assert after[f'{name}_bucket{{le="+Inf"}}'] == after[f"{name}_count"]
