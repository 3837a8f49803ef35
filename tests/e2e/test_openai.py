"""The OpenAI-compatible endpoint before the demo model, asked by OpenAI's own client and by plain HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from benchmarks.served import free_ports
from tests.e2e.openai_stack import Endpoint, fetch, running_endpoint
from tests.e2e.wire import Server
from tests.page.browser import chromium

pytestmark = pytest.mark.e2e

QUESTION_AND_ANSWER = ["What is 17 + 25?", "17 + 25 = 42."]
QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]
COUNT = [{"role": "user", "content": "Count from 1 to 9."}]
COUNTED = "1, 2, 3, 4, 5, 6, 7, 8, 9"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "celsius": {"type": "boolean"}},
            "required": ["city", "celsius"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client(endpoint: Endpoint) -> openai.OpenAI:
    return endpoint.client()


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=QUESTION, max_tokens=32, temperature=0)
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason, choice.message.role) == ("17 + 25 = 42.", "stop", "assistant")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert (answer.model, answer.object) == ("demo", "chat.completion")


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_streamed_chat(client: openai.OpenAI, include_usage: bool) -> None:
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if include_usage else {}
    chunks = list(
        client.chat.completions.create(
            model="demo", messages=COUNT, max_tokens=64, temperature=0, stream=True, **options
        )
    )
    if include_usage:
        last = chunks.pop()
        assert (last.choices, last.usage.completion_tokens) == ([], 18)
    assert all(chunk.usage is None for chunk in chunks)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == COUNTED
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_choices_stop_seed_and_length(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "demo",
        "messages": QUESTION,
        "n": 3,
        "seed": 5,
        "temperature": 2.0,
        "max_tokens": 8,
    }
    first = [c.message.content for c in client.chat.completions.create(**options).choices]
    assert first == [c.message.content for c in client.chat.completions.create(**options).choices]
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**options, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == first
    cut = client.chat.completions.create(model="demo", messages=COUNT, temperature=0, stop=[", 4", "zzz"])
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("1, 2, 3", "stop")
    short = client.chat.completions.create(model="demo", messages=COUNT, temperature=0, max_completion_tokens=3)
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 3)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_chat(client: openai.OpenAI, stream: bool) -> None:
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "temperature": 0, "max_tokens": 5}
    answer: Any = client.chat.completions.create(model="demo", messages=COUNT, stream=stream, **options)
    if stream:
        chunks = list(answer)
        content = [entry for chunk in chunks for entry in chunk.choices[0].logprobs.content]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        content, text = answer.choices[0].logprobs.content, answer.choices[0].message.content
    assert "".join(entry.token for entry in content) == text
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == text
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob <= 0


def test_completions(client: openai.OpenAI) -> None:
    prompt = "<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    answer = client.completions.create(model="demo", prompt=[prompt, "hi"], n=2, max_tokens=16, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == answer.choices[1].text == "1 + 2 = 3."
    texts = [""] * 4
    chunks = client.completions.create(
        model="demo",
        prompt=[prompt, "hi"],
        n=2,
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in answer.choices]


def test_echo_and_its_log_probabilities(endpoint: Endpoint, client: openai.OpenAI) -> None:
    """As an evaluation harness measures the likelihood of a text: token ids in, nothing generated."""
    ids = endpoint.post("/tokenize", {"prompt": "What is 1"})[1]["tokens"]
    for prompt in ("What is 1", ids):
        answer = client.completions.create(model="demo", prompt=prompt, echo=True, logprobs=2, max_tokens=0)
        choice = answer.choices[0]
        assert (choice.text, answer.usage.completion_tokens) == ("What is 1", 0)
        assert "".join(choice.logprobs.tokens) == choice.text
        assert choice.logprobs.text_offset[:2] == [0, len(choice.logprobs.tokens[0])]
        assert choice.logprobs.token_logprobs[0] is None
        assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
    echoed = client.completions.create(model="demo", prompt=ids, echo=True, max_tokens=2, stream=True)
    assert "".join(chunk.choices[0].text for chunk in echoed).startswith("What is 1")


def test_constrained_answers(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = client.chat.completions.create(model="demo", messages=QUESTION, response_format=form, max_tokens=64)
    assert set(json.loads(answer.choices[0].message.content)) == {"a", "b"}
    extras: Any
    for extras, allowed in (
        ({"guided_choice": ["yes", "no"]}, ("yes", "no")),
        ({"guided_regex": "(ab){3}"}, ("ababab",)),
        ({"structured_outputs": {"grammar": 'root ::= "x" | "y"'}}, ("x", "y")),
        ({"guided_json": '{"enum": ["only"]}'}, ('"only"',)),
    ):
        answer = client.chat.completions.create(model="demo", messages=QUESTION, extra_body=extras, max_tokens=32)
        assert answer.choices[0].message.content in allowed


class Sum(BaseModel):
    """What the client makes a schema of, and an answer into."""

    a: int
    is_even: bool


def test_the_clients_own_helpers(client: openai.OpenAI) -> None:
    asked: Any = {"model": "demo", "messages": QUESTION, "response_format": Sum, "max_tokens": 100, "temperature": 0}
    assert isinstance(client.chat.completions.parse(**asked).choices[0].message.parsed, Sum)
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Sum)
    assert {"content.delta", "content.done"} <= kinds


def test_options_beyond_openai_do_what_they_say(endpoint: Endpoint, client: openai.OpenAI) -> None:
    def ids(text: str) -> list[int]:
        return list(endpoint.post("/tokenize", {"prompt": text})[1]["tokens"])

    def count(**options: Any) -> tuple[str, str, int]:
        """(content, finish reason, tokens) of an answer that would be COUNTED."""
        extras = {name: options.pop(name) for name in list(options) if name in BEYOND}
        given: dict[str, Any] = {"temperature": 0, "max_tokens": 40, **options}
        answer = client.chat.completions.create(model="demo", messages=COUNT, extra_body=extras, **given)
        choice = answer.choices[0]
        return choice.message.content or "", choice.finish_reason, answer.usage.completion_tokens

    assert count() == (COUNTED, "stop", 18)
    for sharp in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}):
        assert count(temperature=5.0, **sharp)[0] == COUNTED
    assert count(ignore_eos=True)[1:] == ("length", 40)
    assert count(min_tokens=30)[2] >= 30
    (comma, three) = ids(", 3")
    assert count(stop_token_ids=[three])[:2] == ("1, 2, ", "stop")
    assert count(stop=[", 4"], include_stop_str_in_output=True)[0] == "1, 2, 3, 4"
    assert count(logit_bias={str(comma): -100})[0] != COUNTED
    assert count(logit_bias={str(comma): 100}, max_tokens=3)[0] == ", , , "
    assert "3" not in count(bad_words=["3"])[0]
    repeating: Any = {"model": "demo", "prompt": "1, 2, 1, 2,", "max_tokens": 20, "temperature": 0}
    plain = client.completions.create(**repeating).choices[0].text
    penalties: tuple[Any, ...] = ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0})
    for penalty in (*penalties, {"extra_body": {"repetition_penalty": 2.0}}):
        assert client.completions.create(**repeating, **penalty).choices[0].text != plain
    assert count(priority=1)[0] == COUNTED
    begun = [*COUNT, {"role": "assistant", "content": "1, 2, 3"}]
    extras = {"continue_final_message": True, "add_generation_prompt": False, "echo": True}
    given: Any = {"model": "demo", "messages": begun, "temperature": 0, "extra_body": extras}
    assert client.chat.completions.create(**given).choices[0].message.content == COUNTED
    chunks = client.chat.completions.create(**given, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == COUNTED


BEYOND = (
    *("top_k", "min_p", "ignore_eos", "min_tokens", "stop_token_ids", "include_stop_str_in_output", "bad_words"),
    "priority",
)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_tools_that_a_grammar_enforces(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    options: Any = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 200}
    answer: Any = client.chat.completions.create(model="demo", messages=QUESTION, stream=stream, **options)
    if stream:
        chunks = list(answer)
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        name = "".join(call.function.name or "" for call in calls)
        arguments = "".join(call.function.arguments or "" for call in calls)
        reason = chunks[-1].choices[0].finish_reason
    else:
        (call,) = answer.choices[0].message.tool_calls
        assert re.fullmatch(r"[A-Za-z0-9]{9}", call.id)
        name, arguments, reason = call.function.name, call.function.arguments, answer.choices[0].finish_reason
    assert name == "weather"
    assert set(json.loads(arguments)) == {"city", "celsius"}
    assert reason == ("tool_calls" if choice == "required" else "stop")


def test_templates_and_prefixes(endpoint: Endpoint, client: openai.OpenAI) -> None:
    begun = [*COUNT, {"role": "assistant", "content": "1, 2, 3"}]
    extras = {"continue_final_message": True, "add_generation_prompt": False}
    answer = client.chat.completions.create(model="demo", messages=begun, temperature=0, extra_body=extras)
    assert answer.choices[0].message.content == COUNTED.removeprefix("1, 2, 3")
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]}]
    assert client.chat.completions.create(model="demo", messages=parts, temperature=0).choices[0].message.content == (
        "17 + 25 = 42."
    )
    counted = endpoint.post("/tokenize", {"messages": QUESTION})[1]
    told = client.chat.completions.create(model="demo", messages=QUESTION, max_tokens=1)
    assert told.usage.prompt_tokens == counted["count"]


def test_asyncio(endpoint: Endpoint) -> None:
    async def ask() -> list[str]:
        async with endpoint.async_client() as client:
            answers = [
                client.chat.completions.create(
                    model="demo", messages=[{"role": "user", "content": f"What is {n} + 1?"}], temperature=0
                )
                for n in range(10, 30)
            ]
            texts = [answer.choices[0].message.content or "" for answer in await asyncio.gather(*answers)]
            stream = await client.chat.completions.create(model="demo", messages=COUNT, temperature=0, stream=True)
            return [*texts, "".join([chunk.choices[0].delta.content or "" async for chunk in stream])]

    assert asyncio.run(ask()) == [*(f"{n} + 1 = {n + 1}." for n in range(10, 30)), COUNTED]


def test_streams_through_both_workers(endpoint: Endpoint, client: openai.OpenAI) -> None:
    def connections() -> list[int]:
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in endpoint.processes.process_ids]

    before = connections()
    assert len(before) == 2
    asked: Any = {"model": "demo", "messages": COUNT, "temperature": 0, "stream": True}
    streams = []
    for _ in range(64):  # who takes a connection is chance
        with_own_connection = endpoint.client()
        streams.append(with_own_connection.chat.completions.create(**asked, max_tokens=64))
        if len(streams) >= 8 and all(now > then for now, then in zip(connections(), before, strict=True)):
            break
    assert all(now > then for now, then in zip(connections(), before, strict=True)), "one worker took them all"
    for stream in streams:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == COUNTED


def test_errors(endpoint: Endpoint, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="demo", messages=QUESTION, temperature=101)
    assert (wrong.value.param, wrong.value.type) == ("temperature", "invalid_request_error")
    assert wrong.value.request_id
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="demo", messages=QUESTION, temperature=101, stream=True)
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt", messages=QUESTION)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="demo", prompt="x " * 5000)
    assert long.value.code == "context_length_exceeded"
    assert endpoint.post("/v1/nowhere", {})[0] == 404
    assert endpoint.get("/v1/chat/completions")[0] == 405
    for body in (b"", b"{", b"[]", b"1", b"\xff", b'{"messages"', b'{"a":' * 5000):
        status, answer = endpoint.post("/v1/chat/completions", body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), body[:20]


def test_the_other_paths(endpoint: Endpoint, client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert client.models.retrieve("demo").id == model.id == "demo"
    assert endpoint.get("/health") == (200, {"ready": True, "reason": ""})
    assert "minisgl_engine_up 1" in endpoint.get("/metrics")[1]
    assert set(endpoint.get("/version")[1]) == {"version"}
    text = "Grüße, 世界"
    tokens = endpoint.post("/tokenize", {"prompt": text, "return_token_strs": True})[1]
    assert len(tokens["tokens"]) == len(tokens["token_strs"]) == tokens["count"]
    assert endpoint.post("/detokenize", {"tokens": tokens["tokens"]}) == (200, {"prompt": text})
    status, error = endpoint.post("/detokenize", {"tokens": [10**6]})
    assert (status, error["error"]["param"]) == (400, "tokens")


def test_a_body_that_is_too_long_is_not_read(server: Server) -> None:
    with running_endpoint(server, max_body_bytes=1000) as small:
        status, answer = small.post("/v1/completions", {"prompt": "x" * 2000})
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        chunks = iter([b'{"prompt": "', *(b"x" * 100 for _ in range(20)), b'"}'])
        request = urllib.request.Request(f"{small.url}/v1/completions", chunks, {"Content-Type": "application/json"})
        status, answer = fetch(request)
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        assert small.post("/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200


def test_keys_names_origins_and_certificates(server: Server, tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate", tmp_path / "key"
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    options = {
        "api_keys": ("sesame", "open"),
        "served_model_names": ("first", "second"),
        "allowed_origins": ("https://app.example",),
        "ssl_certfile": str(certificate),
        "ssl_keyfile": str(key),
    }
    with running_endpoint(server, **options) as guarded:
        context = ssl.create_default_context(cafile=str(certificate))
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )

        def refusal(**headers: str) -> str:
            with pytest.raises(urllib.error.HTTPError) as caught:
                opener.open(urllib.request.Request(guarded.url + "/v1/models", headers=headers), timeout=60)
            with caught.value as error:
                return str(json.load(error)["error"]["message"])

        def ask(path: str, **headers: str) -> tuple[int, dict[str, str]]:
            try:
                with opener.open(urllib.request.Request(guarded.url + path, headers=headers), timeout=60) as reply:
                    reply.read()
                    return reply.status, {name.lower(): value for name, value in reply.headers.items()}
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, {}

        assert guarded.url.startswith("https://")
        assert ask("/v1/models")[0] == ask("/v1/models", Authorization="Bearer wrong")[0] == 401
        assert refusal() == "this server needs an API key; allowed: Authorization: Bearer KEY"
        wrong = "the API key is none of this server's; allowed: Authorization: Bearer KEY"
        assert refusal(Authorization="Bearer wrong") == wrong
        assert [ask(path)[0] for path in ("/health", "/", "/page/chat.js")] == [200, 200, 200]
        for name in ("first", "second"):
            assert ask(f"/v1/models/{name}", Authorization="Bearer open")[0] == 200
        assert ask("/v1/models/demo", Authorization="Bearer sesame")[0] == 404
        allowed = ask("/health", Origin="https://app.example")[1]
        assert allowed["access-control-allow-origin"] == "https://app.example"
        assert "access-control-allow-origin" not in ask("/health", Origin="https://other.example")[1]


def test_request_ids_are_passed_on(endpoint: Endpoint) -> None:
    body = json.dumps({"messages": QUESTION, "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json", "X-Request-Id": "mine-1", "traceparent": "00-" + "a" * 32 + "-01"}
    request = urllib.request.Request(f"{endpoint.url}/v1/chat/completions", body, headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as reply:
        assert reply.headers["x-request-id"] == "mine-1"
        assert json.load(reply)["id"] == "chatcmpl-mine-1"


def test_curl(endpoint: Endpoint) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    body = json.dumps({"messages": COUNT, "temperature": 0, "stream": True})
    command = ["curl", "-sN", "--noproxy", "*", f"{endpoint.url}/v1/chat/completions", "-d", body]
    done = subprocess.run(
        [*command, "-H", "Content-Type: application/json"], capture_output=True, text=True, check=True
    )
    lines = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line]
    assert lines.pop() == "[DONE]"
    assert "".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines) == COUNTED


def test_the_command_beside_a_server_elsewhere(server: Server) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "client", "openai", "--url", f"127.0.0.1:{server.grpc}", "--port", str(port)]
    process = subprocess.Popen([*command, "--served-model-name", "mine"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert f"http://127.0.0.1:{port}/v1" in process.stderr.readline()
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(model="mine", messages=QUESTION, temperature=0)
        assert answer.choices[0].message.content == "17 + 25 = 42."
    finally:
        process.terminate()
        assert process.wait(60) == 0
    taken = [*command[:-1], str(server.grpc)]
    done = subprocess.run(taken, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"--port is {server.grpc}" in " ".join(done.stderr.split())


def test_the_page_in_a_browser(endpoint: Endpoint, tmp_path: Path) -> None:
    with chromium(tmp_path, f"{endpoint.url}/") as page:
        page.open(1280, 800)
        page.press("What is 17 + 25?")
        page.wait(lambda: page.all(".turn > small") and page.text(".turn > small"))
        assert [page.text(f".turn .{name}") for name in ("user", "answer", "error")] == [*QUESTION_AND_ANSWER, ""]
        assert page.text("#model") == "demo"
        assert page.text("#value-kv") != "-"


def test_the_page_needs_nothing_from_other_hosts(endpoint: Endpoint) -> None:
    request = urllib.request.Request(f"{endpoint.url}/")
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as reply:
        policy, page = reply.headers["Content-Security-Policy"], reply.read().decode()
    assert "default-src 'none'" in policy
    assert "http" not in policy
    files = re.findall(r"""(?:src|href)=["'](?!data:)([^"']*)""", page)
    assert "page/chat.js" in files
    assert not [name for name in files if endpoint.get(f"/{name}")[0] != 200]
    assert "https://" not in page
