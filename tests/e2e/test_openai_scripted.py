"""Tool calls, thoughts, full queues, leaving clients and deaths: a model that says what tests want."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from minisgl_backend.host.processes import descendants, process_table
from tests.e2e.openai_stack import Endpoint, running_endpoint, scripted_server
from tests.e2e.wire import PATIENCE_SECONDS

pytestmark = pytest.mark.e2e

CALLS = [("weather", {"city": 'Köln "am" Rhein', "days": [1, {"a": "}"}]}), ("time", {})]
HERMES = "Let me look.\n" + "\n".join(
    f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in CALLS
)
LLAMA = "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in CALLS)
THOUGHTS = "<think>\nTwo and two, that is four.\n</think>\n\nIt is 4."
OPENED = "Two and two, that is four.\n</think>\n\nIt is 4."
FOREVER = "and so on "
SCRIPTS = (HERMES, LLAMA, THOUGHTS, OPENED, FOREVER)
TOOLS: Any = [{"type": "function", "function": {"name": name}} for name, _ in CALLS]
MESSAGES: Any = [{"role": "user", "content": "hello"}]
RUNNING, WAITING = 4, 2


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    options = {
        "null_runner_rate": "200",
        "max_running_requests": str(RUNNING),
        "max_waiting_requests": str(WAITING),
    }
    folder = tmp_path_factory.mktemp("scripted")
    with (
        scripted_server(folder, SCRIPTS, options) as server,
        running_endpoint(server, tool_call_parser="hermes", reasoning_parser="qwen3") as found,
    ):
        yield found


def message_of(client: openai.OpenAI, script: str, *, stream: bool, **options: Any) -> dict[str, Any]:
    """What the model's script becomes; of a stream, the deltas joined."""
    given: Any = {"model": "demo", "messages": MESSAGES, "seed": SCRIPTS.index(script), **options}
    if not stream:
        choice = client.chat.completions.create(**given).choices[0]
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        thoughts = getattr(choice.message, "reasoning_content", None)
        content = choice.message.content
        return {"content": content or "", "thoughts": thoughts or "", "calls": calls, "reason": choice.finish_reason}
    content, thoughts, reason, found = "", "", None, {}
    for chunk in client.chat.completions.create(**given, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        thoughts += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or ():
            name, arguments = found.get(call.index, ("", ""))
            found[call.index] = (name + (call.function.name or ""), arguments + (call.function.arguments or ""))
        reason = chunk.choices[0].finish_reason or reason
    return {"content": content, "thoughts": thoughts, "calls": list(found.values()), "reason": reason}


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls(endpoint: Endpoint, stream: bool) -> None:
    found = message_of(endpoint.client(), HERMES, stream=stream, tools=TOOLS)
    assert [(name, json.loads(arguments)) for name, arguments in found["calls"]] == CALLS
    assert (found["content"], found["reason"]) == ("Let me look.", "tool_calls")
    untouched = message_of(endpoint.client(), HERMES, stream=stream, tools=TOOLS, tool_choice="none")
    assert (untouched["content"], untouched["reason"]) == (HERMES, "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_of_llama_and_thoughts_that_the_prompt_opened(endpoint: Endpoint, stream: bool) -> None:
    with running_endpoint(endpoint.server, tool_call_parser="llama3_json", reasoning_parser="deepseek_r1") as other:
        opened = message_of(other.client(), OPENED, stream=stream)
        assert (opened["thoughts"], opened["content"]) == ("Two and two, that is four.", "It is 4.")
        options = {"extra_body": {"separate_reasoning": False}}
        found = message_of(other.client(), LLAMA, stream=stream, tools=TOOLS, **options)
        assert [(name, json.loads(arguments)) for name, arguments in found["calls"]] == CALLS
        assert (found["content"], found["reason"]) == ("", "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts(endpoint: Endpoint, stream: bool) -> None:
    found = message_of(endpoint.client(), THOUGHTS, stream=stream)
    assert (found["thoughts"], found["content"]) == ("Two and two, that is four.", "It is 4.")
    assert found["reason"] == "stop"


def idle(metrics: dict[str, float]) -> bool:
    return metrics["minisgl_requests_running"] == 0 == metrics["minisgl_requests_waiting"]


def ask_and_hang_on(endpoint: Endpoint) -> socket.socket:
    """A connection with a request for one whole answer, which is not read."""
    body = json.dumps({"messages": MESSAGES}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    connection = socket.create_connection(("127.0.0.1", endpoint.processes.port))
    connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    return connection


def test_clients_that_leave(endpoint: Endpoint) -> None:
    """While they read a stream, while they wait for an answer, and by ending their connection."""
    server = endpoint.server
    server.wait_for(idle)
    name = "minisgl_requests_cancelled_total"
    before = server.metrics()[name]
    stream = endpoint.client().chat.completions.create(model="demo", messages=MESSAGES, stream=True)
    for _, _chunk in zip(range(3), stream, strict=False):
        pass
    stream.close()
    server.wait_for(lambda found: found[name] == before + 1 and idle(found))
    with ask_and_hang_on(endpoint):
        server.wait_for(lambda found: found["minisgl_requests_running"] == 1)
    server.wait_for(lambda found: found[name] == before + 2 and idle(found))


def test_a_full_queue_is_429_with_a_time_to_come_back(endpoint: Endpoint) -> None:
    client, server = endpoint.client(), endpoint.server
    server.wait_for(idle)
    streams = []
    for _ in range(RUNNING):
        streams.append(client.chat.completions.create(model="demo", messages=MESSAGES, stream=True))
        next(iter(streams[-1]))
    sockets = []
    for number in range(WAITING):
        sockets.append(ask_and_hang_on(endpoint))
        server.wait_for(lambda found, count=number + 1: found["minisgl_requests_waiting"] == count)  # type: ignore[misc]
    with pytest.raises(openai.RateLimitError) as full:
        client.chat.completions.create(model="demo", messages=MESSAGES)
    assert int(full.value.response.headers["retry-after"]) >= 1
    assert full.value.code == "queue_full"
    for stream in streams:
        stream.close()
    for connection in sockets:
        connection.close()
    server.wait_for(idle)


def test_a_worker_that_dies_comes_back(endpoint: Endpoint) -> None:
    with running_endpoint(endpoint.server, workers=2) as two:
        assert two.get("/health")[0] == 200
        (first, *_) = before = two.processes.process_ids
        os.kill(first, signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(two.processes.process_ids) < 2 or first in two.processes.process_ids:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert len(before) == 2
        assert two.get("/health")[0] == 200


def test_a_dead_engine_is_503(endpoint: Endpoint) -> None:
    """Last of this file: what follows waits until it is back."""
    client, server = endpoint.client(), endpoint.server
    stream = client.chat.completions.create(model="demo", messages=MESSAGES, stream=True)
    next(iter(stream))
    core = [
        process.pid
        for process in descendants(server.process_id, process_table())
        if b"minisgl_backend.engine.process" in _command_line(process.pid)
    ]
    os.kill(core[0], signal.SIGSTOP)  # so that it is not back before the others were asked
    os.kill(core[0], signal.SIGKILL)
    with pytest.raises(openai.APIError, match="died"):
        list(stream)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        status, answer = endpoint.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4})
        if status == 200:
            break
        assert (status, answer["error"]["code"]) == (503, "unavailable")
        assert time.monotonic() < deadline
    server.wait_for(lambda found: idle(found) and found["minisgl_engine_up"] == 1)
    while endpoint.get("/health")[0] != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _command_line(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""
