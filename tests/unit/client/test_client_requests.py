"""Both clients over both protocols against a fake server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
from fake_server import WORDS, Record

from client import (
    AsyncClient,
    Cancelled,
    Client,
    ClientError,
    InvalidRequest,
    ServerError,
    TimedOut,
    Unavailable,
)
from client.metrics import parse_metrics

FULL_TEXT = "".join(WORDS)
WAIT = 10.0  # seconds; generous, nothing here measures time


def test_generate_returns_the_whole_answer(client: Client, record: Record) -> None:
    result = client.generate("Hallo", max_tokens=5, request_id="abc")
    assert result.text == FULL_TEXT
    assert result.finish_reason == "stop"
    assert (result.num_input_tokens, result.num_output_tokens) == (4, len(WORDS))
    assert result.request_id == "abc"
    assert record.requests[0]["stream"] == [False]


def test_stream_gives_the_pieces_in_order(client: Client) -> None:
    chunks = list(client.stream("Hallo"))
    assert [chunk.text for chunk in chunks] == WORDS
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(WORDS) - 1) + ["stop"]
    assert sum(chunk.num_output_tokens or 0 for chunk in chunks) == len(WORDS)


def test_stream_result_equals_generate(client: Client) -> None:
    stream = client.stream("Hallo")
    first = next(stream)
    assert first.text == WORDS[0]
    streamed, whole = stream.result(), client.generate("Hallo")
    assert (streamed.text, streamed.finish_reason) == (whole.text, whole.finish_reason)
    assert (streamed.num_input_tokens, streamed.num_output_tokens) == (whole.num_input_tokens, whole.num_output_tokens)


def test_every_option_reaches_the_server(client: Client, record: Record) -> None:
    client.generate(
        messages=[{"role": "user", "content": "héllo 🦜"}],
        request_id="id-1",
        priority=2,
        timeout=9.0,
        max_tokens=7,
        min_tokens=1,
        temperature=0,
        top_k=3,
        top_p=0.5,
        min_p=0.25,
        seed=2**64 - 1,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=0.5,
        stop="\n",
        stop_token_ids=[5, 6],
        bad_words=["ä", "b"],
        logit_bias={3: -1.5},
        guided_decoding_guide_type="json_schema",
        guided_decoding_guide={"type": "object"},
        return_perf_metrics=True,
        n=1,
        ignore_eos=True,
        cache_salt="tenant",
        speculative=False,
        skip_special_tokens=False,
        add_special_tokens=False,
        chat_template_kwargs={"enable_thinking": False},
    )
    sent = record.requests[0]
    assert sent["id"] in ("id-1", ["id-1"])
    expected: dict[str, list[Any]] = {
        "messages": ['[{"role": "user", "content": "héllo 🦜"}]'],
        "max_tokens": [7],
        "temperature": [0.0],
        "top_k": [3],
        "top_p": [0.5],
        "seed": [2**64 - 1],
        "presence_penalty": [-1.0],
        "stop_words": ["\n"],
        "stop_token_ids": [5, 6],
        "bad_words": ["ä", "b"],
        "logit_bias": ['{"3": -1.5}'],
        "guided_decoding_guide_type": ["json_schema"],
        "guided_decoding_guide": ['{"type": "object"}'],
        "return_final_perf_metrics": [True],
        "num_return_sequences": [1],
        "ignore_eos": [True],
        "cache_salt": ["tenant"],
        "speculative": [False],
        "skip_special_tokens": [False],
        "chat_template_kwargs": ['{"enable_thinking": false}'],
        "return_finish_reason": [True],
        "timeout": [9_000_000],
        "priority": [2],
    }
    assert {name: sent[name] for name in expected} == expected


def test_options_that_are_none_are_not_sent(client: Client, record: Record) -> None:
    client.generate("Hallo", seed=None)  # type: ignore[arg-type]
    assert "seed" not in record.requests[0]


@pytest.mark.parametrize("streamed", [True, False])
def test_several_sequences(client: Client, streamed: bool) -> None:
    result = client.stream("Hallo", n=2).result() if streamed else client.generate("Hallo", n=2)
    assert result.texts == [FULL_TEXT, FULL_TEXT]
    assert [choice.index for choice in result.choices] == [0, 1]
    assert result.num_output_tokens == 2 * len(WORDS)
    if streamed:
        assert [choice.finish_reason for choice in result.choices] == ["stop", "length"]


def test_logprobs_are_joined(client: Client) -> None:
    result = client.stream("Hallo", logprobs=0).result()
    assert result.logprobs is not None
    assert [next(iter(record)) for record in result.logprobs] == [str(position) for position in range(len(WORDS))]


def test_a_lone_final_flag_ends_the_stream(grpc_url: str) -> None:
    with Client(grpc_url) as client:
        assert "".join(chunk.text for chunk in client.stream("lone final")) == FULL_TEXT


def test_a_stream_without_its_final_response_is_an_error(grpc_url: str) -> None:
    with Client(grpc_url) as client, pytest.raises(ServerError, match="before the final response"):
        client.stream("no final").result()


def test_a_stream_that_ends_without_its_finish_reason_is_an_error(http_url: str) -> None:
    async def ask() -> None:
        async with AsyncClient(http_url) as client:
            await client.stream("no final").result()

    with Client(http_url) as client, pytest.raises(ServerError, match="ended before the answer was complete"):
        client.stream("no final").result()
    with pytest.raises(ServerError, match="ended before the answer was complete"):
        asyncio.run(ask())


@pytest.mark.parametrize(
    ("prompt", "error", "status", "message"),
    [
        ("invalid", InvalidRequest, "INVALID_ARGUMENT", "top_p is 7; allowed: above 0 and at most 1"),
        ("busy", Unavailable, "UNAVAILABLE", "the queue is full"),
        ("cancelled", Cancelled, "CANCELLED", "request was cancelled"),
    ],
)
@pytest.mark.parametrize("streamed", [True, False])
def test_errors_are_typed(
    client: Client, prompt: str, error: type[ClientError], status: str, message: str, streamed: bool
) -> None:
    with pytest.raises(error) as caught:
        client.stream(prompt, request_id="r").result() if streamed else client.generate(prompt, request_id="r")
    assert caught.value.message == message
    assert caught.value.status == status
    assert caught.value.request_id == "r"


def test_an_error_after_some_text(client: Client) -> None:
    stream = client.stream("break")
    assert next(stream).text == "half "
    with pytest.raises(ServerError, match=r"^the step failed$"):
        next(stream)
    assert list(stream) == []


@pytest.mark.parametrize(
    ("prompt", "error"),
    [("invalid", InvalidRequest), ("busy", Unavailable), ("cancelled", Cancelled), ("break", ServerError)],
)
def test_errors_inside_the_stream(errors_in_band: Any, prompt: str, error: type[ClientError]) -> None:
    with Client(errors_in_band.url) as client, pytest.raises(error) as caught:
        client.stream(prompt).result()
    assert "ensemble" not in caught.value.message


def test_unknown_model_over_http(http_url: str) -> None:
    with Client(http_url, model="other") as client:
        assert not client.is_ready()
        for ask in (client.generate, lambda prompt: client.stream(prompt).result()):
            with pytest.raises(InvalidRequest, match="unknown model"):
                ask("Hallo")


@pytest.mark.parametrize("scheme", ["grpc", "http"])
@pytest.mark.parametrize("streamed", [True, False])
def test_nobody_listens(scheme: str, streamed: bool) -> None:
    with Client(f"{scheme}://127.0.0.1:1") as client, pytest.raises(Unavailable):
        client.stream("Hallo").result() if streamed else client.generate("Hallo")


def test_timeout(client: Client) -> None:
    with pytest.raises(TimedOut):
        client.generate("silence", timeout=0.2)
    with pytest.raises(TimedOut):
        client.stream("forever", timeout=0.2).result()


def test_break_cancels(client: Client, record: Record) -> None:
    for chunk in client.stream("forever"):
        if chunk.text == "3 ":
            break
    assert record.cancelled.wait(WAIT)


def test_close_from_another_thread(client: Client, record: Record) -> None:
    stream = client.stream("forever")
    next(stream)
    timer = threading.Timer(0.1, stream.close)
    timer.start()
    with pytest.raises(Cancelled):
        for _ in stream:
            pass
    assert record.cancelled.wait(WAIT)
    with pytest.raises(Cancelled):
        stream.result()
    timer.join()


def test_leaving_the_with_cancels(client: Client, record: Record) -> None:
    with client.stream("forever") as stream:
        next(stream)
    assert record.cancelled.wait(WAIT)


def test_a_complete_stream_is_not_cancelled(client: Client, record: Record) -> None:
    with client.stream("Hallo") as stream:
        stream.result()
    client.generate("Hallo")
    assert not record.cancelled.is_set()


def test_threads_share_a_client(client: Client) -> None:
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(client.stream("Hallo").result().text)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [FULL_TEXT] * 16


def test_health_and_metrics(client: Client, http_url: str) -> None:
    assert client.is_live()
    assert client.is_ready()
    client.wait_ready(1.0)
    with Client(metrics_url=f"{http_url}/metrics") as other:
        metrics = other.metrics()
    assert metrics.value("nv_inference_request_success") == 10
    assert metrics.value("nv_inference_request_success", model="engine") == 3
    assert metrics.value("minisgl_pages_leased") == 15
    assert metrics.value("absent") is None
    assert next(metrics.select("odd")).labels == {"text": 'a "b", c\\d'}


def test_metrics_of_other_programs_are_tolerated() -> None:
    page = """# HELP nothing\n# TYPE a counter\na 1\n# TYPE b histogram\nb_bucket{le="+Inf",} 2 1395066363000\nb_sum\t3
    <html>\n{} 4\nc 5 # {trace="x"} .5\nd{x="y 6\ne{x="a\\nb}"} -Inf\nf HUGE\n# TYPE g\nh{i="ü"} 7\nb_count 8"""
    samples = parse_metrics(page.replace("HUGE", "9" * 400)).samples
    values = {sample.name: sample.value for sample in samples}
    del values["c"]  # has an exemplar
    assert values == {"a": 1, "b_bucket": 2, "b_sum": 3, "e": float("-inf"), "h": 7, "b_count": 8}
    labels = [sample.labels for sample in samples if sample.labels]
    assert labels == [{"le": "+Inf"}, {"x": "a\nb}"}, {"i": "ü"}]


def test_a_metrics_port_that_speaks_no_http() -> None:
    def answer() -> None:
        with door.accept()[0] as connection:
            connection.recv(1000)
            connection.sendall(b"SSH-2.0-x\r\n")

    with socket.create_server(("127.0.0.1", 0)) as door:
        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{door.getsockname()[1]}/metrics"
        with Client(metrics_url=url) as client, pytest.raises(Unavailable, match=r"^no metrics from .*: SSH-2\.0-x\Z"):
            client.metrics()


def test_not_ready() -> None:
    with Client("127.0.0.1:1", metrics_url="http://127.0.0.1:1/metrics") as client:
        assert not client.is_live()
        with pytest.raises(Unavailable, match="not ready"):
            client.wait_ready(0.1)
        with pytest.raises(Unavailable, match="no metrics"):
            client.metrics()


def ask_until(url: str, way: str, enough: Callable[[], bool]) -> None:
    """Asks a server whether it is ready, again and again."""

    async def ask() -> None:
        async with AsyncClient(url) as client:
            while not enough():
                await client.is_ready()
                await asyncio.sleep(0.05)

    if way == "loop":
        asyncio.run(ask())
        return
    with Client(url) as client:
        while not enough():
            client.is_ready()
            time.sleep(0.05)


@pytest.mark.parametrize("way", ["threads", "loop"])
def test_a_server_that_comes_up_late_is_tried_often(way: str) -> None:
    """gRPC by itself makes the fifth attempt after 7 s or later, and then fewer and fewer."""
    attempts: list[float] = []

    def refuse() -> None:
        while len(attempts) < 5:
            door.accept()[0].close()
            attempts.append(time.monotonic())

    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(WAIT)
        refusing = threading.Thread(target=refuse)
        refusing.start()
        ask_until(f"127.0.0.1:{door.getsockname()[1]}", way, lambda: not refusing.is_alive())
    assert len(attempts) == 5
    assert attempts[-1] - attempts[0] < 5


@pytest.fixture
def far_url(grpc_url: str) -> Iterator[str]:
    """The server behind a door that lets everything in, after a while."""

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)

    def let_in() -> None:
        with contextlib.suppress(OSError):
            while True:
                client = door.accept()[0]
                time.sleep(0.5)
                server = socket.create_connection(("127.0.0.1", int(grpc_url.rpartition(":")[2])))
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=copy, args=ends, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as door:
        threading.Thread(target=let_in, daemon=True).start()
        yield f"127.0.0.1:{door.getsockname()[1]}"


def test_a_server_that_is_far_is_reached_at_once(far_url: str) -> None:
    async def use() -> None:
        async with AsyncClient(far_url) as client:
            assert await client.is_live()

    with Client(far_url) as client:
        assert client.generate("Hallo").text == FULL_TEXT
    asyncio.run(use())


def test_async_client(url: str, record: Record) -> None:
    async def use() -> None:
        async with AsyncClient(url) as client:
            assert await client.is_live()
            await client.wait_ready(5.0)
            result = await client.generate(messages=[{"role": "user", "content": "Hallo"}])
            assert (result.text, result.finish_reason) == (FULL_TEXT, "stop")
            assert [chunk.text async for chunk in client.stream("Hallo")] == WORDS
            results = await asyncio.gather(*(client.stream("Hallo").result() for _ in range(32)))
            assert [result.text for result in results] == [FULL_TEXT] * 32
            assert not record.cancelled.is_set()

    asyncio.run(use())


@pytest.mark.parametrize(
    ("prompt", "error"), [("invalid", InvalidRequest), ("busy", Unavailable), ("break", ServerError)]
)
def test_async_errors(url: str, prompt: str, error: type[ClientError]) -> None:
    async def use() -> None:
        async with AsyncClient(url) as client:
            with pytest.raises(error):
                await client.stream(prompt).result()

    asyncio.run(use())


def test_async_timeout(url: str) -> None:
    async def use() -> None:
        async with AsyncClient(url, timeout=0.2) as client:
            with pytest.raises(TimedOut):
                await client.generate("silence")
            with pytest.raises(TimedOut):
                await client.stream("forever").result()

    asyncio.run(use())


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_async_nobody_listens(scheme: str) -> None:
    async def use() -> None:
        async with AsyncClient(f"{scheme}://127.0.0.1:1") as client:
            assert not await client.is_ready()
            with pytest.raises(Unavailable):
                await client.generate("Hallo")

    asyncio.run(use())


def test_closing_the_client_ends_its_streams(url: str, record: Record) -> None:
    client = Client(url)
    stream = client.stream("forever")
    next(stream)
    timer = threading.Timer(0.1, client.close)
    timer.start()
    with pytest.raises(Cancelled):
        deque(islice(stream, 1000))
    assert record.cancelled.wait(WAIT)
    timer.join()


@pytest.mark.parametrize("prompt", ["forever", "silence"])
def test_closing_the_async_client_ends_its_streams(url: str, record: Record, prompt: str) -> None:
    async def use() -> None:
        client = AsyncClient(url)
        streams = [client.stream(prompt), client.stream(prompt)]
        readers = [asyncio.ensure_future(stream.result()) for stream in streams]
        while len(record.requests) < len(readers):
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)  # responses come meanwhile
        untouched = client.stream("forever")
        await client.close()
        for reader in readers:
            with pytest.raises(Cancelled):
                await asyncio.wait_for(reader, WAIT)
        with pytest.raises(Cancelled):
            await untouched.result()

    asyncio.run(use())


@pytest.mark.parametrize("way", ["break", "with", "cancel", "task"])
def test_async_cancellation(url: str, record: Record, way: str) -> None:
    async def use() -> None:
        async with AsyncClient(url) as client:
            await _stop(client, record, way)
            assert await asyncio.get_running_loop().run_in_executor(None, record.cancelled.wait, WAIT)

    asyncio.run(use())


async def _stop(client: AsyncClient, record: Record, way: str) -> None:
    if way == "break":
        async for _ in client.stream("forever"):
            break
    elif way == "with":
        async with client.stream("forever") as stream:
            await stream.__anext__()
    elif way == "cancel":
        stream = client.stream("forever")
        await stream.__anext__()
        asyncio.get_running_loop().call_later(0.1, stream.cancel)
        with pytest.raises(Cancelled):
            await stream.result()
    else:
        task = asyncio.ensure_future(client.stream("forever").result())
        # Of a request that has not reached it the server would see no end.
        while not record.requests and not task.done():
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)  # responses come meanwhile
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
