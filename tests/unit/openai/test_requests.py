"""Requests in OpenAI's shapes -> the server's options, and errors that name the field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from minisgl_backend.openai.errors import ApiError, from_message
from minisgl_backend.openai.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from minisgl_backend.openai.requests.anthropic import MessagesRequest
from minisgl_backend.openai.requests.chat import ChatRequest
from minisgl_backend.openai.requests.completions import CompletionRequest
from minisgl_backend.openai.requests.messages import Message
from minisgl_backend.openai.requests.responses import ResponsesRequest
from minisgl_backend.openai.requests.tokenize import DetokenizeRequest
from minisgl_backend.openai.triton import TokenLogprob
from minisgl_backend.openai.validation import from_validation
from minisgl_backend.parsers.table import find_calls, find_reasoning

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "$defs": {"x": {}}}}}
OTHER = {"type": "function", "function": {"name": "g"}}


def chat(**values: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": HELLO, **values})


def completion(**values: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "hello", **values})


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({}, {}),
        ({"temperature": 1, "top_p": 0.5, "seed": 7}, {"temperature": 1.0, "top_p": 0.5, "seed": 7}),
        ({"max_tokens": 5, "max_completion_tokens": 9}, {"max_tokens": 9}),
        ({"stop": "x", "stop_token_ids": [3]}, {"stop": "x", "stop_token_ids": [3]}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 5}, {"logprobs": 5}),
        ({"logprobs": False}, {}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"guided_decoding": {"json_object": True}}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
            {"guided_decoding": {"json": '{"type": "object"}'}},
        ),
        *(
            ({"response_format": form}, {"guided_decoding": {"json": '{"type": "object"}'}})
            for form in (
                {"type": "json_object", "value": {"type": "object"}},  # huggingface_hub
                {"type": "json", "value": {"type": "object"}},
                {"type": "json", "value": '{"type": "object"}'},
                {"type": "json_schema", "value": {"name": "x", "schema": {"type": "object"}}},
                {"type": "json_schema", "value": {"type": "object"}},
                {"type": "json_object", "schema": {"type": "object"}},  # llama.cpp, Together
                {"type": "json_schema", "schema": {"type": "object"}},
                {"type": "json_object", "json_schema": {"name": "x", "schema": {"type": "object"}}},
            )
        ),
        ({"response_format": {"type": "json_object", "schema": {}}}, {"guided_decoding": {"json_object": True}}),
        ({"response_format": {"type": "json_object", "value": None}}, {"guided_decoding": {"json_object": True}}),
        ({"response_format": {"type": "regex", "value": "a+"}}, {"guided_decoding": {"regex": "a+"}}),
        ({"response_format": {"type": "regex", "pattern": "a+"}}, {"guided_decoding": {"regex": "a+"}}),
        (
            {"response_format": {"type": "grammar", "grammar": "root ::= x"}},
            {"guided_decoding": {"grammar": "root ::= x"}},
        ),
        ({"guided_json": {"type": "object"}}, {"guided_decoding": {"json": '{"type": "object"}'}}),
        ({"guided_regex": "a+"}, {"guided_decoding": {"regex": "a+"}}),
        ({"guided_choice": ["a", "b"]}, {"guided_decoding": {"choice": ["a", "b"]}}),
        ({"structured_outputs": {"grammar": "root ::= x"}}, {"guided_decoding": {"grammar": "root ::= x"}}),
        ({"structured_outputs": {"json_object": True}}, {"guided_decoding": {"json_object": True}}),
        ({"structured_outputs": {"json_object": False}}, {}),
        ({"logprobs": False, "top_logprobs": 0}, {}),
        ({"user": "me", "metadata": {"a": 1}, "store": False}, {}),
    ],
)
def test_options(given: dict[str, Any], sent: dict[str, Any]) -> None:
    request = chat(**given)
    request.check()
    assert request.sampling() == sent


def test_completions() -> None:
    assert completion().sampling() == {"max_tokens": 16}
    assert completion(max_tokens=3, logprobs=2).sampling() == {"max_tokens": 3, "logprobs": 2}
    echo = {"max_tokens": 1, "logprobs": 2, "prompt_logprobs": 2}
    assert completion(max_tokens=0, logprobs=2, echo=True).sampling() == echo
    # Each is given all that it asked for.
    both = {"max_tokens": 1, "logprobs": 2, "prompt_logprobs": 5}
    assert completion(max_tokens=0, logprobs=2, prompt_logprobs=5, echo=True).sampling() == both
    assert completion(max_tokens=0, logprobs=2, prompt_logprobs=0, echo=True).sampling() == echo
    wrong = {"max_tokens": 1, "logprobs": 2, "prompt_logprobs": -1}
    assert completion(max_tokens=0, logprobs=2, prompt_logprobs=-1, echo=True).sampling() == wrong
    for prompt, prompts in (("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]])):
        assert completion(prompt=prompt).prompts == prompts


def test_tools() -> None:
    required = chat(tools=[TOOL, OTHER], tool_choice="required")
    schema = json.loads(required.sampling()["guided_decoding"]["json"])
    assert [call["properties"]["name"]["enum"] for call in schema["items"]["anyOf"]] == [["f"], ["g"]]
    ids = [call["properties"]["parameters"]["$id"] for call in schema["items"]["anyOf"]]
    assert ids == ["function:0", "function:1"]  # where the references of each start
    assert "maxItems" not in schema
    assert chat(tools=[TOOL], tool_choice="required", parallel_tool_calls=False).tool_schema()["maxItems"] == 1
    named = chat(tools=[TOOL, OTHER], tool_choice={"type": "function", "function": {"name": "f"}})
    assert named.tool_schema() == TOOL["function"]["parameters"]  # type: ignore[index]
    assert chat(tools=[TOOL]).template_kwargs()["tools"][0]["function"]["name"] == "f"
    assert chat(tools=[TOOL], tool_choice="none").template_kwargs() == {}


def test_messages_as_templates_expect_them() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    message = Message.model_validate({"role": "assistant", "content": None, "tool_calls": calls})
    found = message.for_template(0)
    assert found["content"] == ""
    assert found["tool_calls"] == calls  # whose form the tokenizer chooses
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert Message(role="user", content=parts).for_template(0) == {"role": "user", "content": "a\nb"}


def tool_result(**values: Any) -> MessagesRequest:
    block = {"type": "tool_result", "tool_use_id": "a", "content": "no such file", **values}
    return MessagesRequest.model_validate({"max_tokens": 1, "messages": [{"role": "user", "content": [block]}]})


@pytest.mark.parametrize(
    ("values", "content"),
    [({}, "no such file"), ({"is_error": False}, "no such file"), ({"is_error": True}, "Error: no such file")],
)
def test_a_tool_that_failed_is_said_to_have(values: dict[str, Any], content: str) -> None:
    assert [message.content for message in tool_result(**values).as_chat().messages] == [content]


def test_whether_a_tool_failed_is_true_or_false() -> None:
    with pytest.raises(ApiError, match="is_error is 'yes'; allowed: true, false"):
        tool_result(is_error="yes").as_chat()


def test_what_is_null_is_not_asked_for() -> None:
    """OpenAI's own fields, served or not."""
    nulls = dict.fromkeys(("audio", "prediction", "functions", "function_call", "web_search_options", "top_p", "stop"))
    assert chat(**nulls).sampling() == chat().sampling()
    assert chat(stream=True, stream_options={"include_usage": None, "other": None}).stream_options is not None


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 2**62}, "n"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json"}}, "response_format"),
        ({"response_format": {"type": "regex"}}, "response_format"),
        ({"response_format": {"type": "regex", "value": ""}}, "response_format"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format"),
        ({"response_format": {"type": "json_object", "pattern": "a"}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": {}, "value": {}}}, "response_format"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"max_tokens": 2**40}, "max_tokens"),
    ],
)
def test_what_is_refused_here(values: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        chat(**values).check()
    assert (error.value.status, error.value.param) == (400, param)


def test_a_stream_has_no_place_for_prompt_logprobs() -> None:
    completion(prompt_logprobs=1).check()
    with pytest.raises(ApiError) as error:
        completion(prompt_logprobs=1, stream=True).check()
    assert (error.value.status, error.value.param) == (400, "prompt_logprobs")


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"stop": [1]}, "stop"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": 3}, "tool_choice"),
        ({"temprature": 1}, "temprature"),
        ({"stream_options": {"x": 1}}, "stream_options.x"),
    ],
)
def test_types_are_errors_that_name_the_field(values: dict[str, Any], param: str) -> None:
    with pytest.raises(ValidationError) as error:
        chat(**values)
    found = from_validation([{**one, "loc": ("body", *one["loc"])} for one in error.value.errors()])
    assert (found.status, found.param) == (400, param)
    assert found.message.startswith(param)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"messages": []}, "messages is []; allowed: 1 or more entries"),
        ({"messages": HELLO * 10_001}, "allowed: at most 10000 entries"),
        ({"temperature": "hot"}, "temperature is 'hot'; allowed: a number"),
        ({"max_tokens": 5.5}, "max_tokens is 5.5; allowed: a whole number"),
    ],
)
def test_what_is_allowed_is_said_in_plain_words(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        chat(**values)
    found = from_validation([{**one, "loc": ("body", *one["loc"])} for one in error.value.errors()])
    assert found.message.endswith(message)


@pytest.mark.parametrize(
    ("message", "status", "param"),
    [
        ("in ensemble 'ensemble', temperature is 101.0; allowed: 0 to 100", 400, "temperature"),
        ("max_tokens is 0; allowed: 1 or more", 400, "max_completion_tokens"),
        ("guided_decoding_guide cannot be compiled: x; allowed: y", 400, "guided_regex"),
        ("messages has 9 tokens; this model takes prompts of at most 4: prompt is too long", 400, "messages"),
        ("7 requests are waiting, all that max_waiting_requests allows; try again later", 429, None),
        ("the engine died while it computed this answer; it starts again by itself", 503, None),
        ("the server is shutting down", 503, None),
        ("something else", 500, None),
    ],
)
def test_the_servers_errors(message: str, status: int, param: str | None) -> None:
    error = from_message(message, chat(guided_regex="a", max_completion_tokens=0).names())
    assert (error.status, error.param) == (status, param)
    if param is not None:
        assert error.message.startswith(param)
    assert error.headers == ({"retry-after": "1"} if status == 429 else {})


def test_log_probabilities() -> None:
    a, b, c = (TokenLogprob(-0.5, 1, "a"), TokenLogprob(-1.5, 2, "b"), TokenLogprob(-9.0, 7, "\ufffd", [226, 130]))
    content = chat_logprobs([{"3": c, "1": a, "2": b}], 2)["content"]
    assert content[0]["bytes"] == [226, 130]
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["a", "b"]
    shape = CompletionLogprobs(2)
    first = shape.encode([None, {"1": a, "2": b}], "xyz")
    assert first["tokens"] == ["xyz", "a"]
    assert first["token_logprobs"] == [None, -0.5]
    assert first["text_offset"] == [0, 3]
    assert first["top_logprobs"] == [None, {"a": -0.5, "b": -1.5}]
    assert shape.encode([{"2": b}])["text_offset"] == [4]
    # The prompt's may hold more than is asked for here.
    assert CompletionLogprobs(1).encode([{"3": c, "1": a, "2": b}])["top_logprobs"] == [{"a": -0.5, "\ufffd": -9.0}]
    assert [list(one or ()) for one in prompt_logprobs([{"3": c, "1": a, "2": b}], 1)] == [[], ["3", "1"]]


@pytest.mark.parametrize(
    ("template", "tokens", "form", "thoughts"),
    [
        ('<tool_call>\n{"name": <n>, "arguments": <a>}\n</tool_call>', [], "hermes", False),
        ("<tool_call>\n<function=x>arguments", ["</think>"], "none", True),
        ("<tool_call>\n<function=x>\n<parameter=y>", [], "qwen3_coder", False),
        ('{"name": f, "parameters": d} <|python_tag|>', ["<|python_tag|>"], "llama3_json", False),
        ("{{ messages }}", [], "none", False),
        ("... '</think>' ...", [], "none", True),
    ],
)
def test_formats_are_known_only_where_certain(template: str, tokens: list[str], form: str, thoughts: bool) -> None:
    calls, found = find_calls(template, tokens), find_reasoning(template, tokens)
    assert (calls.name if calls else "none", found is not None) == (form, thoughts)


MANY = 100_000


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (CompletionRequest, {"prompt": [*([1] * MANY), "a"]}),
        (CompletionRequest, {"prompt": [["a"]] * MANY}),
        (ChatRequest, {"stop": [1] * MANY}),
        (ChatRequest, {"guided_choice": [1] * MANY}),
        (ChatRequest, {"structured_outputs": {"choice": [1] * MANY}}),
        (ChatRequest, {"stop_token_ids": ["a"] * MANY}),
        (ChatRequest, {"logit_bias": {str(number): "a" for number in range(MANY)}}),
        (ChatRequest, {"messages": [1] * MANY}),
        (ChatRequest, {"tools": [1] * MANY}),
        (ChatRequest, {"tools": [{"type": "function", "function": {f"x{number}": 1 for number in range(MANY)}}]}),
        (ChatRequest, {"documents": [1] * MANY}),
        (ChatRequest, {"modalities": [1] * MANY}),
        (ChatRequest, {f"x{number}": 1 for number in range(MANY)}),
        (ResponsesRequest, {"input": [1] * MANY}),
        (ResponsesRequest, {"include": [1] * MANY}),
        (DetokenizeRequest, {"tokens": ["a"] * MANY}),
    ],
)
def test_what_is_wrong_a_million_times_is_a_few_errors(kind: Any, values: dict[str, Any]) -> None:
    """Each error is an object: a body of 16 MB had eight million of them and took the endpoint minutes and 10 GB."""
    needed = {ChatRequest: {"messages": HELLO}, CompletionRequest: {"prompt": "x"}, ResponsesRequest: {"input": "x"}}
    with pytest.raises(ValidationError) as wrong:
        kind.model_validate({**needed.get(kind, {}), **values})
    assert wrong.value.error_count() < 10
    error = from_validation(wrong.value.errors())
    assert error.status == 400
    name = next(iter(values))
    assert (error.param or "").startswith("body" if name.startswith("x") else name)
    assert len(error.message) < 700


def named_tools(name: str) -> dict[str, Any]:
    """By API: a request with a tool of that name, checked and made a chat."""
    function: dict[str, Any] = {"name": name, "parameters": {}}
    messages = [{"role": "user", "content": "x"}]
    anthropic: dict[str, Any] = {"messages": messages, "max_tokens": 1, "tools": [{"name": name, "input_schema": {}}]}
    grouped = [{"type": "namespace", "name": "a", "tools": [{"type": "function", **function}]}]
    return {
        "tools[0].function.name": lambda: ChatRequest.model_validate(
            {"messages": messages, "tools": [{"type": "function", "function": function}]}
        ).check(),
        "tools[0].name": lambda: MessagesRequest.model_validate(anthropic).as_chat().check(),
        "tools[0].name ": lambda: (
            ResponsesRequest.model_validate({"input": "x", "tools": [{"type": "function", **function}]}).callable_tools
        ),
        "tools[0].tools[0].name": lambda: (
            ResponsesRequest.model_validate({"input": "x", "tools": grouped}).callable_tools
        ),
    }


@pytest.mark.parametrize("name", ["f", "files/read", "a:b", "my tool", "名前", "a😀", '"\\', "é" * 125])
def test_names_of_tools_hold_any_letters(name: str) -> None:
    for ask in named_tools(name).values():
        ask()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("", "has 0 characters; allowed: 1 to 128"),
        ("a" * 129, "has 129 characters; allowed: 1 to 128"),
        ("a\nb", r"is 'a\nb'; allowed: no control characters"),
        ("a\x7f", r"is 'a\x7f'; allowed: no control characters"),
    ],
)
def test_other_names_of_tools_are_refused(name: str, told: str) -> None:
    for field, ask in named_tools(name).items():
        with pytest.raises(ApiError) as refused:
            ask()
        assert (refused.value.status, refused.value.param) == (400, "tools")
        assert refused.value.message == f"{field.strip()} {told}"
