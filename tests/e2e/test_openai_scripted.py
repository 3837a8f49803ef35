"""Tool calls, thoughts, full queues, leaving clients and deaths: a model that says what tests want."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from minisgl_backend.process.processes import descendants, process_table
from minisgl_backend.text.tokenizer import Tokenizer
from tests.e2e.conftest import ROOT
from tests.e2e.openai_stack import Endpoint, running_endpoint, scripted_server
from tests.e2e.wire import PATIENCE_SECONDS, Server, idle

pytestmark = pytest.mark.e2e

CALLS = [("weather", {"city": 'Köln "am" Rhein', "days": [1, {"a": "}"}]}), ("time", {})]
HERMES = "Let me look.\n" + "\n".join(
    f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in CALLS
)
LLAMA = "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in CALLS)
THOUGHTS = "<think>\nTwo and two, that is four.\n</think>\n\nIt is 4."
OPENED = "Two and two, that is four.\n</think>\n\nIt is 4."
FOREVER = "and so on "
CODER = "Let me look.\n" + "\n".join(
    f"<tool_call>\n<function={name}>\n"
    + "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    + "</function>\n</tool_call>"
    for name, arguments in CALLS
)
BOTH = "<think>\nI have to look.\n</think>\n\n" + HERMES
ODD = (
    "<think></think>",
    "<think>\nThoughts that never end <tool_call>",
    "a < b </think> and <tool_call>no JSON</tool_call> after",
    '<tool_call>{"name": "time", "arguments": {"a": "\\u00e9 世界',
    '<tool_call>{"arguments": {"a": 1}, "name": "time"}</tool_call> and more',
    '<tool_call>{"name": "time", "arguments": {}}}</tool_call>\n<tool_call>{"name": "weather"}</tool_call>',
)
SCRIPTS = (HERMES, LLAMA, CODER, THOUGHTS, OPENED, BOTH, *ODD, FOREVER)
CUT = {"hermes": BOTH, "llama3_json": LLAMA, "qwen3_coder": CODER}  # parser -> the script that is cut
TOOLS: Any = [{"type": "function", "function": {"name": name}} for name, _ in CALLS]
MESSAGES: Any = [{"role": "user", "content": "hello"}]
RUNNING, WAITING = 4, 2
DEMO = ROOT / "model_repository" / "engine" / "demo_model"
# In the manner of Qwen3's: tools, thoughts that later turns leave out, a switch that opens them, one system message.
TEMPLATE = """
{%- if tools %}
{{- '<|im_start|>system\n<tool_call>{"name": ..., "arguments": ...}</tool_call>\n' + tools | tojson + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('a system message comes first') }}{%- endif %}
{{- '<|im_start|>' + message.role + '\n' + message.content.split('</think>')[-1] + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if thinking or reasoning_effort == 'high' %}{{- '<think>\n' }}{%- endif %}
{%- endif %}
"""


def thinking_model(folder: Path) -> str:
    """The demo model's folder with a template that knows tools and thoughts."""
    shutil.copytree(DEMO, folder / "model")
    file = folder / "model" / "tokenizer_config.json"
    config = {**json.loads(file.read_text(encoding="utf-8")), "chat_template": TEMPLATE}
    file.write_text(json.dumps(config), encoding="utf-8")
    return str(folder / "model")


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    folder = tmp_path_factory.mktemp("scripted")
    options = {
        "model": thinking_model(folder),
        "null_runner_rate": "200",
        "max_running_requests": str(RUNNING),
        "max_waiting_requests": str(WAITING),
    }
    with (
        scripted_server(folder, SCRIPTS, options) as server,
        running_endpoint(server, served_model_names=("demo",)) as found,
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
    single = message_of(endpoint.client(), HERMES, stream=stream, tools=TOOLS, parallel_tool_calls=False)
    assert [(name, json.loads(arguments)) for name, arguments in single["calls"]] == CALLS[:1]
    assert (single["content"], single["reason"]) == ("Let me look.", "tool_calls")
    untouched = message_of(endpoint.client(), HERMES, stream=stream, tools=TOOLS, tool_choice="none")
    assert (untouched["content"], untouched["reason"]) == (HERMES, "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_within_a_call(endpoint: Endpoint, stream: bool) -> None:
    found = message_of(endpoint.client(), HERMES, stream=stream, tools=TOOLS, stop=["Rhein"])
    assert (found["content"], found["calls"], found["reason"]) == (HERMES[: HERMES.index("Rhein")], [], "stop")
    found = message_of(endpoint.client(), HERMES, stream=stream, tools=TOOLS, stop=["</tool_call>\n"])
    assert [(name, json.loads(arguments)) for name, arguments in found["calls"]] == CALLS[:1]
    assert (found["content"], found["reason"]) == ("Let me look.", "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_of_llama_and_thoughts_that_the_prompt_opened(endpoint: Endpoint, stream: bool) -> None:
    parsers = {"tool_call_parser": "llama3_json", "reasoning_parser": "deepseek_r1"}
    with running_endpoint(endpoint.server, served_model_names=("demo",), **parsers) as other:
        opened = message_of(other.client(), OPENED, stream=stream)
        assert (opened["thoughts"], opened["content"]) == ("Two and two, that is four.", "It is 4.")
        options = {"extra_body": {"separate_reasoning": False}}
        found = message_of(other.client(), LLAMA, stream=stream, tools=TOOLS, **options)
        assert [(name, json.loads(arguments)) for name, arguments in found["calls"]] == CALLS
        assert (found["content"], found["reason"]) == ("", "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_in_tags(endpoint: Endpoint, stream: bool) -> None:
    properties = {"city": {"type": "string"}, "days": {"type": "array"}}
    tool = {"name": "weather", "parameters": {"type": "object", "properties": properties}}
    tools = [{"type": "function", "function": tool}, TOOLS[1]]
    with running_endpoint(endpoint.server, served_model_names=("demo",), tool_call_parser="qwen3_coder") as other:
        found = message_of(other.client(), CODER, stream=stream, tools=tools)
    assert [(name, json.loads(arguments)) for name, arguments in found["calls"]] == CALLS
    assert (found["content"], found["reason"]) == ("Let me look.", "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts(endpoint: Endpoint, stream: bool) -> None:
    found = message_of(endpoint.client(), THOUGHTS, stream=stream)
    assert (found["thoughts"], found["content"]) == ("Two and two, that is four.", "It is 4.")
    assert found["reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_template_that_opens_the_thoughts_when_it_is_told_to(endpoint: Endpoint, stream: bool) -> None:
    options = {"extra_body": {"chat_template_kwargs": {"thinking": True}}}
    found = message_of(endpoint.client(), OPENED, stream=stream, **options)
    assert (found["thoughts"], found["content"]) == ("Two and two, that is four.", "It is 4.")
    found = message_of(endpoint.client(), OPENED, stream=stream, reasoning_effort="high")
    assert (found["thoughts"], found["content"]) == ("Two and two, that is four.", "It is 4.")
    found = message_of(endpoint.client(), OPENED, stream=stream)
    assert (found["thoughts"], found["content"]) == ("", OPENED)
    bare = {"add_generation_prompt": False, **options["extra_body"]}
    found = message_of(endpoint.client(), OPENED, stream=stream, extra_body=bare)
    assert (found["thoughts"], found["content"]) == ("", OPENED)
    options["extra_body"]["include_reasoning"] = False  # type: ignore[assignment]
    found = message_of(endpoint.client(), OPENED, stream=stream, **options)
    assert (found["thoughts"], found["content"]) == ("", "It is 4.")


def test_thoughts_and_calls_as_items(endpoint: Endpoint) -> None:
    """/v1/responses, at once and by its events."""
    tools: Any = [{"type": "function", "name": name} for name, _ in CALLS]
    asked: Any = {"model": "demo", "input": "hello", "tools": tools, "extra_body": {"seed": SCRIPTS.index(BOTH)}}
    whole = endpoint.client().responses.create(**asked)
    *events, last = endpoint.client().responses.create(**asked, stream=True)
    for answer in (whole, last.response):
        thoughts, text, *calls = answer.output
        assert (thoughts.type, thoughts.content[0].text) == ("reasoning", "I have to look.")
        assert (text.type, text.content[0].text) == ("message", "Let me look.")
        assert [(call.name, json.loads(call.arguments)) for call in calls] == CALLS
        assert answer.status == "completed"
        assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == "I have to look."
    done = [event.item.type for event in events if event.type == "response.output_item.done"]
    assert done == ["reasoning", "message", "function_call", "function_call"]


def joined(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The chunks of a stream as the message that they make."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for line in lines:
        (choice,) = line["choices"]
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or ():
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append(dict(call["function"]))
            else:
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        message["reason"] = choice["finish_reason"]
    return message


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_streams_are_what_comes_at_once_wherever_it_is_cut(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Scripts of which each character is a token or more: streamed, at once, and ended behind every 24th of them;
    with --full behind each. tests/unit/openai/test_parsers.py cuts at every place.
    """
    every = 1 if pytestconfig.getoption("--full", default=False) else 24
    tokenizer = Tokenizer(DEMO)
    scripts = [[int(token) for character in text for token in tokenizer.encode(character)] for text in SCRIPTS]
    options = {"null_runner_rate": "2000", "model": thinking_model(tmp_path)}

    async def compare(client: openai.AsyncOpenAI, room: asyncio.Semaphore, number: int, limit: int) -> None:
        values: Any = {"messages": MESSAGES, "model": "demo", "seed": number, "tools": TOOLS, "max_tokens": limit}
        async with room:
            answer = await client.chat.completions.create(**values)
            stream = await client.chat.completions.create(**values, stream=True)
            streamed = joined([chunk.model_dump() async for chunk in stream])
        choice = answer.model_dump()["choices"][0]
        message = choice["message"]
        calls = [call["function"] for call in message["tool_calls"] or ()]
        content = message["content"] or ""
        if streamed["tool_calls"] and not is_json(streamed["tool_calls"][-1]["arguments"]):
            # A call that was cut, or damaged, is content; a stream has told its beginning as a call.
            assert content.startswith(streamed["content"])
            assert "<tool_call>" in content or '{"name"' in content
            streamed = {**streamed, "content": content, "tool_calls": streamed["tool_calls"][:-1]}
        assert streamed == {
            "content": content,
            "reasoning_content": message.get("reasoning_content") or "",
            "tool_calls": calls,
            "reason": choice["finish_reason"],
        }

    async def compare_all(endpoint: Endpoint, cut: int) -> None:
        room = asyncio.Semaphore(16)
        cases = [(number, 1000) for number in range(len(SCRIPTS) - 1)]
        cases += [(cut, limit) for limit in range(1, len(scripts[cut]), every)]
        async with endpoint.async_client() as client:
            await asyncio.gather(*(compare(client, room, number, limit) for number, limit in cases))

    with scripted_server(tmp_path, scripts, options) as server:
        for parser, text in CUT.items():
            with running_endpoint(server, served_model_names=("demo",), tool_call_parser=parser) as endpoint:
                asyncio.run(compare_all(endpoint, SCRIPTS.index(text)))


def test_more_requests_than_a_worker_takes(endpoint: Endpoint) -> None:
    with running_endpoint(endpoint.server, served_model_names=("demo",), max_requests=1) as small:
        with (
            all_leave(endpoint.server, 1),
            small.client().chat.completions.create(model="demo", messages=MESSAGES, stream=True) as stream,
        ):
            next(iter(stream))
            with pytest.raises(openai.RateLimitError) as full:
                small.client().completions.create(model="demo", prompt="x")
        assert (full.value.code, full.value.response.headers["retry-after"]) == ("queue_full", "1")
        assert small.client().completions.create(model="demo", prompt="x", max_tokens=1).choices


@contextlib.contextmanager
def all_leave(server: Server, count: int) -> Iterator[None]:
    """Behind the block, until the server has counted so many clients that left within it."""
    name = "minisgl_requests_cancelled_total"
    before = server.settled_metrics()[name]
    yield
    server.wait_for(lambda found: found[name] == before + count and idle(found))


def ask_and_hang_on(endpoint: Endpoint) -> socket.socket:
    """A connection with a request for one whole answer, which is not read."""
    body = json.dumps({"messages": MESSAGES}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    connection = socket.create_connection(("127.0.0.1", endpoint.processes.port))
    connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    return connection


def test_clients_that_leave(endpoint: Endpoint) -> None:
    """While they read a stream, while they wait for an answer, and by ending their connection."""
    with all_leave(endpoint.server, 1):
        stream = endpoint.client().chat.completions.create(model="demo", messages=MESSAGES, stream=True)
        for _, _chunk in zip(range(3), stream, strict=False):
            pass
        stream.close()
    with all_leave(endpoint.server, 1), ask_and_hang_on(endpoint):
        endpoint.server.wait_for(lambda found: found["minisgl_requests_running"] == 1)


def test_a_full_queue_is_429_with_a_time_to_come_back(endpoint: Endpoint) -> None:
    client, server = endpoint.client(), endpoint.server
    with all_leave(server, RUNNING + WAITING):
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
        for options in ({}, {"stream": True}):
            with pytest.raises(openai.RateLimitError):
                client.responses.create(model="demo", input="hello", background=True, extra_body=options)
        for stream in streams:
            stream.close()
        for connection in sockets:
            connection.close()


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
    response = client.responses.create(model="demo", input="hello", stream=True)
    next(iter(stream))
    next(iter(response))
    core = [
        process.pid
        for process in descendants(server.process_id, process_table())
        if b"minisgl_backend.engine.process" in _command_line(process.pid)
    ]
    os.kill(core[0], signal.SIGSTOP)  # so that it is not back before the others were asked
    os.kill(core[0], signal.SIGKILL)
    with pytest.raises(openai.APIError, match="died"):
        list(stream)
    (*_, failed) = list(response)
    assert (failed.type, failed.response.status) == ("response.failed", "failed")
    assert "died" in failed.response.error.message
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
