"""What clients of other servers send: options that change nothing, other names, tools that this server cannot run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError

from minisgl_backend.openai.errors import ApiError
from minisgl_backend.openai.log_once import LogOnce
from minisgl_backend.openai.logprobs import CompletionLogprobs, said
from minisgl_backend.openai.requests.anthropic import MessagesRequest
from minisgl_backend.openai.requests.chat import ChatRequest
from minisgl_backend.openai.requests.completions import CompletionRequest
from minisgl_backend.openai.requests.pooling import EmbeddingRequest
from minisgl_backend.openai.requests.responses import ResponsesRequest
from minisgl_backend.openai.responses import OutputItems
from minisgl_backend.openai.triton import Delta, TokenLogprob
from minisgl_backend.openai.unknown_fields import IgnoreUnknownFields
from minisgl_backend.openai.validation import from_validation
from minisgl_backend.parsers.parts import Part

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "g"}}]},
}
MCP = {
    "type": "namespace",
    "name": "mcp__files",
    "description": "files",
    "tools": [{"type": "function", "name": "read", "parameters": {"type": "object"}}, {"type": "custom", "name": "x"}],
}


def chat(**values: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "hello"}], **values})


def test_offsets_count_from_the_text_that_the_client_sent() -> None:
    """A token that the tokenizer put before the prompt is none of its characters."""
    a = TokenLogprob(-0.5, 1, "ab")
    assert CompletionLogprobs(0).encode([None, {"1": a}, {"1": a}], "<bos>", 0)["text_offset"] == [0, 0, 2]


def test_tokens_with_one_text_all_have_their_values() -> None:
    own = TokenLogprob(-2.0, 3, "\ufffd", [226])
    others = {"8": TokenLogprob(-0.5, 1, "\ufffd", [240, 159]), "7": TokenLogprob(-1.0, 2, "x")}
    top = CompletionLogprobs(2).encode([{"9": own, **others}])["top_logprobs"]
    assert top == [{"\ufffd": -2.0, "bytes:\\xf0\\x9f": -0.5, "x": -1.0}]


@pytest.mark.parametrize(
    ("tokens", "text", "reason", "kept"),
    [
        (["2", ".", "<|im_end|>"], "2.", "stop", 2),
        (["2", "."], "2.", "length", 2),
        (["<|im_end|>"], "", "stop", 0),
        (["a", " E", "ND"], "a", "stop", 1),  # a stop string
        (["a"], "", None, 1),  # held back for now
    ],
)
def test_what_ended_an_answer_is_none_of_its_tokens(tokens: list[str], text: str, reason: str, kept: int) -> None:
    positions = [{"1": TokenLogprob(-1.0, 1, token)} for token in tokens]
    assert said(Delta(0, text, len(tokens), reason, positions)) == positions[:kept]


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"best_of": 1, "early_stopping": False, "length_penalty": 1.0, "functions": []}, {"best_of": 1}),
        ({"regex": "a+"}, {"guided_decoding": {"regex": "a+"}}),
        ({"ebnf": "root ::= x"}, {"guided_decoding": {"grammar": "root ::= x"}}),
        ({"json_schema": "{}"}, {"guided_decoding": {"json": "{}"}}),
        ({"rid": "a", "spaces_between_special_tokens": True}, {}),
    ],
)
def test_names_of_other_servers(given: dict[str, Any], sent: dict[str, Any]) -> None:
    assert chat(**given).sampling() == sent


@pytest.mark.parametrize("given", [{"length_penalty": 2}, {"early_stopping": True}, {"length_penalty": True}])
def test_what_would_change_something_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as error:
        chat(**given)
    (name,) = given
    assert from_validation(error.value.errors()).message.startswith(f"{name} is {given[name]}; allowed: ")


@pytest.mark.parametrize(
    ("given", "kwargs"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "enabled"}}, {"enable_thinking": True, "thinking": True}),
        ({"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}),
        ({"enable_thinking": True, "chat_template_kwargs": {"thinking": 1}}, {"enable_thinking": True, "thinking": 1}),
    ],
)
def test_switches_of_thoughts(given: dict[str, Any], kwargs: dict[str, Any]) -> None:
    assert chat(**given).switches() == kwargs


def test_some_of_the_tools_are_allowed() -> None:
    request = chat(tools=TOOLS, tool_choice=ALLOWED)
    request.check()
    assert [tool["function"]["name"] for tool in request.template_kwargs()["tools"]] == ["g"]
    assert request.choice == "required"
    with pytest.raises(ApiError, match="tool_choice names 'g'"):
        chat(tools=TOOLS[:1], tool_choice=ALLOWED).check()


def test_unknown_fields_are_named_once_where_they_may_be_there(caplog: pytest.LogCaptureFixture) -> None:
    async def read(scope: Any, receive: Any, send: Any) -> None:
        assert chat(num_ctx=7, stream_options={"odd": 1}, temperature=0.5).temperature == 0.5

    app = IgnoreUnknownFields(read)
    for _ in range(2):
        asyncio.run(app({}, None, None))  # type: ignore[arg-type]
    assert sorted(record.args for record in caplog.records) == [("num_ctx",), ("odd",)]  # type: ignore[type-var]
    with pytest.raises(ValidationError):
        chat(num_ctx=7)


FUNCTION = {"name": "f", "odd": 1}
MESSAGES: Any = {"max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]}
FORM = {"type": "json_object", "odd": 1}
SCHEMA = {"type": "json_schema", "schema": {}, "odd": 1}


@pytest.mark.parametrize(
    ("kind", "values", "named"),
    [
        (ChatRequest, {"response_format": {"type": "json_object", "odd": 1}}, "response_format.odd"),
        (
            ChatRequest,
            {"response_format": {"type": "json_schema", "json_schema": {"odd": 1}}},
            "response_format.json_sch",
        ),
        (ChatRequest, {"structured_outputs": {"odd": 1}}, "structured_outputs.odd"),
        (ChatRequest, {"tools": [{"type": "function", "function": FUNCTION}]}, "tools[0].function.odd"),
        (
            CompletionRequest,
            {"prompt": "x", "response_format": {"type": "json_object", "odd": 1}},
            "response_format.odd",
        ),
        (ResponsesRequest, {"input": "x", "text": {"format": SCHEMA}}, "text.format.odd"),
        (ResponsesRequest, {"input": "x", "tools": [{"type": "function", **FUNCTION}]}, "tools[0].odd"),
        (MessagesRequest, {**MESSAGES, "tools": [FUNCTION]}, "tools[0].odd"),
        (MessagesRequest, {**MESSAGES, "output_config": {"format": SCHEMA}}, "output_config.format.odd"),
    ],
)
def test_formats_and_functions_lose_no_fields(kind: Any, values: dict[str, Any], named: str) -> None:
    """Free JSON would come back in place of what an ignored field asks for."""
    values = {"messages": [{"role": "user", "content": "hello"}], **values} if kind is ChatRequest else values
    message = ""

    async def read(scope: Any, receive: Any, send: Any) -> None:
        nonlocal message
        try:
            request = kind.model_validate({**values, "unknown": 1})
            if kind is ResponsesRequest:
                request.as_chat()
        except ValidationError as error:
            message = from_validation(error.errors()).message
        except ApiError as error:
            message = error.message

    asyncio.run(IgnoreUnknownFields(read)({}, None, None))  # type: ignore[arg-type]
    assert message.startswith(named)
    assert "is unknown" in message


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (CompletionRequest, {"max_completion_tokens": 5}, "max_completion_tokens is unknown; allowed: max_tokens"),
        (CompletionRequest, {"max_output_tokens": 5}, "max_output_tokens is unknown; allowed: max_tokens"),
        (CompletionRequest, {"messages": []}, "messages is unknown; allowed: prompt"),
        (CompletionRequest, {"function_call": "auto"}, "function_call is unknown; allowed: the fields of"),
        (ChatRequest, {"max_output_tokens": 5}, "max_output_tokens is unknown; allowed: max_completion_tokens"),
        (ChatRequest, {"input": "x"}, "input is unknown; allowed: messages"),
        (ChatRequest, {"num_predict": 5}, "num_predict is unknown; allowed: max_tokens"),
        (ResponsesRequest, {"max_tokens": 5}, "max_tokens is unknown; allowed: max_output_tokens"),
        (ResponsesRequest, {"num_predict": 5}, "num_predict is unknown; allowed: max_output_tokens"),
        (ResponsesRequest, {"response_format": {}}, "response_format is unknown; allowed: text.format"),
        (MessagesRequest, {"response_format": {}}, "response_format is unknown; allowed: output_config.format"),
        (MessagesRequest, {"max_completion_tokens": 5}, "max_completion_tokens is unknown; allowed: max_tokens"),
        (MessagesRequest, {"output_config": {"odd": 1}}, "output_config.odd is unknown"),
        (MessagesRequest, {"thinking": {"type": "enabled", "odd": 1}}, "thinking.odd is unknown"),
        (MessagesRequest, {"thinking": {}}, "thinking.type is missing"),
        (EmbeddingRequest, {"max_tokens": 5}, "max_tokens is unknown; allowed: the fields of"),
        (ChatRequest, {"options": {}}, "options is unknown; allowed: its options as fields of the request"),
    ],
)
def test_hints_name_fields_of_the_same_request(kind: Any, values: dict[str, Any], message: str) -> None:
    needed = {CompletionRequest: {"prompt": "x"}, ResponsesRequest: {"input": "x"}, EmbeddingRequest: {"input": "x"}}
    with pytest.raises(ValidationError) as error:
        kind.model_validate({**needed.get(kind, MESSAGES), **values})
    errors = [one for one in error.value.errors() if one["type"] != "missing" or one["loc"][0] in values]
    assert from_validation(errors, kind.model_fields).message.startswith(message)


def test_tools_in_namespaces_can_be_called_and_hosted_ones_are_left_out() -> None:
    tools = [{"type": "function", "name": "f"}, MCP, {"type": "web_search", "search_context_size": "low"}]
    call = {"type": "function_call", "namespace": "mcp__files", "name": "read", "arguments": "{}", "call_id": "c"}
    request = ResponsesRequest.model_validate(
        {"input": [call], "tools": tools, "client_metadata": {"x": "y"}, "truncation": "auto"}
    )
    request.check()
    body = request.as_chat()
    assert [tool["function"]["name"] for tool in body.template_kwargs()["tools"]] == ["f", "mcp__files__read"]
    assert body.messages[0].model_extra["tool_calls"][0]["function"]["name"] == "mcp__files__read"  # type: ignore[index]
    assert request.callable_tools.left_out == ["custom", "web_search"]
    (added, *_) = OutputItems(request.callable_tools.namespaces).add(Part("call", "mcp__files__read", 0))
    assert (added["item"]["namespace"], added["item"]["name"]) == ("mcp__files", "read")


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([{"type": "web_search"}], "tools holds web_search, which this server cannot run"),
        ([{"type": "odd"}], "tools[0].type is 'odd'; allowed: function, namespace"),
        ([{"type": "function", "name": 7}], "tools[0].name is 7; allowed: a string"),
        ([{**MCP, "tools": [{"type": "function"}]}], "tools[0].tools[0].name is missing"),
        ([{**MCP, "tools": [MCP]}], "tools[0].tools[0].type is 'namespace'; allowed: function, namespace"),
    ],
)
def test_tools_that_cannot_be_called(tools: list[Any], message: str) -> None:
    with pytest.raises(ApiError) as error:
        ResponsesRequest.model_validate({"input": "x", "tools": tools}).as_chat()
    assert error.value.message.startswith(message)
    assert error.value.param is not None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"repeat_penalty": 1.1},
            "repeat_penalty is unknown; allowed: repetition_penalty, over all of prompt and answer",
        ),
        ({"functions": [{"name": "f"}]}, "functions is [{'name': 'f'}]; allowed: [], which changes nothing here"),
        ({"num_predict": 5}, "num_predict is unknown; allowed: max_tokens"),
    ],
)
def test_what_goes_by_another_name_here_is_told(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        chat(**given)
    assert from_validation(error.value.errors()).message == message


def test_tools_that_anthropic_runs_are_left_out_with_their_options() -> None:
    hosted = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5, "user_location": {"type": "approximate"}},
        {"type": "mcp_toolset", "mcp_server_name": "x"},
    ]
    custom = {"name": "f", "input_schema": {"type": "object"}, "strict": True}
    messages = [{"role": "user", "content": "hello"}]
    body = MessagesRequest.model_validate({"max_tokens": 1, "messages": messages, "tools": [*hosted, custom]})
    assert body.left_out == ["web_search_20250305", "mcp_toolset"]
    (tool,) = body.as_chat().tools or ()
    assert (tool.function.name, tool.function.strict) == ("f", True)
    for wrong in ({"input_schema": {}}, {"type": "custom", "name": "f", "max_uses": 5}):
        with pytest.raises(ValidationError):
            MessagesRequest.model_validate({"max_tokens": 1, "messages": messages, "tools": [wrong]})


def test_names_are_logged_once_and_up_to_a_limit() -> None:
    names = LogOnce()
    assert names.is_new("a" * 100)
    assert not names.is_new("a" * 100)
    assert sum(names.is_new(str(number)) for number in range(1000)) == 255
