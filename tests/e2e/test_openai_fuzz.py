"""Random JSON at every field of what generates: answered, or refused in its API's shape by name; no deaths."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from minisgl_backend.openai.requests.anthropic import CountTokensRequest, MessagesRequest
from minisgl_backend.openai.requests.chat import ChatRequest
from minisgl_backend.openai.requests.completions import CompletionRequest
from minisgl_backend.openai.requests.decisions import DecisionRequest
from minisgl_backend.openai.requests.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from minisgl_backend.openai.requests.responses import ResponsesRequest
from minisgl_backend.openai.requests.tei import TeiEmbedRequest, TeiRerankRequest
from tests.e2e.openai_stack import Endpoint
from tests.e2e.wire import assert_same_processes, lasting_processes

pytestmark = pytest.mark.e2e

RANDOM_SECONDS = 5.0
VALUES_A_FIELD, MORE_VALUES_A_FIELD = 8, 16  # more with --full
MESSAGES = [{"role": "user", "content": "What is 1 + 2?"}]
QUESTIONS = [{"type": "predicate", "instructions": "Is it a sum?"}]
PATHS: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": MESSAGES, "max_tokens": 4}),
    "/v1/completions": (CompletionRequest, {"prompt": "What", "max_tokens": 4}),
    "/v1/messages": (MessagesRequest, {"messages": MESSAGES, "max_tokens": 4}),
    "/v1/messages/count_tokens": (CountTokensRequest, {"messages": MESSAGES}),
    "/v1/responses": (ResponsesRequest, {"input": "What is 1 + 2?", "max_output_tokens": 4}),
    "/v1/embeddings": (EmbeddingRequest, {"input": ["What", "is"]}),
    "/v1/rerank": (RerankRequest, {"query": "What", "documents": ["is"]}),
    "/rerank": (TeiRerankRequest, {"query": "What", "texts": ["is"]}),
    "/embed": (TeiEmbedRequest, {"inputs": "What"}),
    "/v1/decisions": (DecisionRequest, {"input": "What is 1 + 2?", "questions": QUESTIONS}),
    "/v1/score": (ScoreRequest, {"text_1": "What", "text_2": ["is", "x"]}),
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
VALUES: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        0.5,
        -0.5,
        1e308,
        2**31,
        2**63,
        2**64,
        10**30,
        "",
        "x",
        "auto",
        "\x00",
        "é" * 300,
    ),
    *([], [1], [[]], ["x"], [None], [-1], [2**40], [{}], {}, {"x": 1}, {"1": 2}, {"1": "y"}, {"1": 1e300}),
    *({"type": "json_object"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": {}}}),
    *({"type": "json_schema", "json_schema": {"schema": {"$ref": "#/none"}}}, {"type": "function"}, [TOOL], [TOOL] * 3),
    *({"type": "function", "function": {"name": "f"}}, {"include_usage": True}, {"json": {"type": "strange"}}),
    *([{"role": "user"}], [{"role": "x", "content": "y"}], [{"role": "user", "content": [{"type": "text"}]}]),
    [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    [{"role": "user", "content": [[[["deep"]]]]}],
    *([{"type": "function_call", "name": "f"}], [{"type": "reasoning", "content": [3]}], [{"type": "item_reference"}]),
    *({"format": {"type": "json_schema", "schema": {}}}, [{"type": "function", "name": "f"}], [{"type": "web_search"}]),
    {"regex": "(" * 50},
    {"grammar": "root ::= "},
    "\ud800",
    "[" * 500,
]


def check(endpoint: Endpoint, path: str, body: dict[str, Any], *, field: str | None = None) -> None:
    """`field`: the only one that can be wrong."""
    status, answer = endpoint.post(path, body)
    shown = json.dumps(body)[:400]
    if status == 200:
        return
    assert 400 <= status < 500, (status, answer, shown)
    error = answer["error"]
    if path.startswith("/v1/messages"):
        assert (answer["type"], set(error)) == ("error", {"message", "type"}), shown
    else:
        assert set(error) == {"message", "type", "param", "code"}, shown
    assert isinstance(error["message"], str), shown
    if field is not None:
        assert field in error["message"] or field in (error.get("param") or ""), (error, shown)


def processes(endpoint: Endpoint) -> set[int]:
    return lasting_processes(endpoint.server) | set(endpoint.processes.process_ids)


@pytest.mark.parametrize("path", PATHS)
def test_each_field(endpoint: Endpoint, path: str, pytestconfig: pytest.Config) -> None:
    count = MORE_VALUES_A_FIELD if pytestconfig.getoption("--full", default=False) else VALUES_A_FIELD
    model, plain = PATHS[path]
    alive = processes(endpoint)
    fields = [field.alias or name for name, field in model.model_fields.items()]
    for field in [*fields, "unknown"]:
        for value in random.Random(field).sample(VALUES, count):
            if field != "stream" or value is not True:  # an endless wait is what would be found, not a wrong stream
                check(endpoint, path, {**plain, field: value}, field=field)
    check(endpoint, path, {})
    assert_same_processes(alive, lambda: processes(endpoint))
    assert endpoint.post(path, plain)[0] == 200


def test_random_bodies(endpoint: Endpoint) -> None:
    chance = random.Random(7)
    alive = processes(endpoint)
    deadline = time.monotonic() + RANDOM_SECONDS
    while time.monotonic() < deadline:
        path = chance.choice(list(PATHS))
        model, plain = PATHS[path]
        body = dict(plain)
        for name in chance.sample(list(model.model_fields), chance.randrange(1, 6)):
            if name != "stream":
                body[name] = random_value(chance, 0)
        check(endpoint, path, body)
    for path in ("/tokenize", "/detokenize"):
        for name in ("prompt", "tokens", "messages", "model", "tools", "chat_template_kwargs", "return_token_strs"):
            for value in VALUES:
                check(
                    endpoint,
                    path,
                    {"prompt": "x", name: value} if path == "/tokenize" else {"tokens": [1], name: value},
                )
    assert_same_processes(alive, lambda: processes(endpoint))


def random_value(chance: random.Random, depth: int) -> Any:
    kind = chance.randrange(6 if depth < 3 else 4)
    if kind == 0:
        return chance.choice(VALUES)
    if kind == 1:
        return chance.choice([chance.randrange(-3, 40), chance.uniform(-3, 3), chance.randrange(-(2**70), 2**70)])
    if kind == 2:
        return "".join(chance.choices('ab{}[]"\\<>|é\n\t 0', k=chance.randrange(12)))
    if kind == 3:
        return chance.choice([True, False, None])
    if kind == 4:
        return [random_value(chance, depth + 1) for _ in range(chance.randrange(4))]
    keys = ["type", "function", "name", "schema", "json", "role", "content", "x", "1"]
    return {chance.choice(keys): random_value(chance, depth + 1) for _ in range(chance.randrange(4))}
