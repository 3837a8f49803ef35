"""Clients that leave: their sequences go, their pages come back, others keep their tokens."""

from __future__ import annotations

import pytest

from tests.e2e.wire import GrpcStream, Server, all_pages_are_back, batched

pytestmark = pytest.mark.e2e

COUNTS = ("minisgl_time_to_first_token_seconds_count", "minisgl_inter_token_seconds_count")
ENDLESS = {"text_input": "Tell me a long story.", "max_tokens": 4000, "ignore_eos": True}


def running(count: int, found: dict[str, float]) -> bool:
    return found["minisgl_requests_running"] == count


def pages_are_free(found: dict[str, float]) -> bool:
    return running(0, found) and found['minisgl_kv_pages{state="leased"}'] == 0


def latency_counts(server: Server) -> list[float]:
    """Of first tokens and of the others, once all that have been sent are counted."""
    server.wait_for(pages_are_free)
    found = server.settled_metrics()
    return [found[name] for name in COUNTS]


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
    before = null_server.settled_metrics()
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
    names = ("minisgl_requests_cancelled_total", "minisgl_cancellation_seconds_count")

    def counted(found: dict[str, float]) -> bool:
        return pages_are_free(found) and all(found[name] - before[name] >= 8 for name in names)

    after = null_server.metrics_when(counted)
    assert [after[name] - before[name] for name in names] == [8, 8]


def test_every_page_is_accounted_for(null_server: Server) -> None:
    before = null_server.metrics()
    null_server.text(**{**ENDLESS, "max_tokens": 20})
    name = "minisgl_requests_finished_total"
    null_server.wait_for(lambda found: found[name] > before[name] and running(0, found) and all_pages_are_back(found))


def test_latency_histograms_count_tokens(null_server: Server) -> None:
    before = latency_counts(null_server)
    null_server.events(**{**ENDLESS, "max_tokens": 50})
    null_server.wait_for(lambda found: found[COUNTS[1]] > before[1])
    firsts, others = (after - then for after, then in zip(latency_counts(null_server), before, strict=True))
    assert (firsts, others) == (1, 49)
    found = null_server.metrics()
    name = "minisgl_time_to_first_token_seconds"
    assert found[f'{name}_bucket{{le="+Inf"}}'] == found[f"{name}_count"]
