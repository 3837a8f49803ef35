"""/v1/responses before the demo model, asked by OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from tests.e2e.openai_stack import Endpoint, running_endpoint
from tests.e2e.wire import PATIENCE_SECONDS, Server

pytestmark = pytest.mark.e2e

COUNT = "Count from 1 to 9."
COUNTED = "1, 2, 3, 4, 5, 6, 7, 8, 9"
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class Weather(BaseModel):
    city: Literal["Rome", "Oslo"]
    sunny: bool


@pytest.fixture(scope="module")
def client(endpoint: Endpoint) -> openai.OpenAI:
    return endpoint.client()


def test_a_text(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="demo", input=COUNT, temperature=0, metadata={"a": "b"})
    assert answer.output_text == COUNTED
    assert (answer.object, answer.status, answer.model, answer.store) == ("response", "completed", "demo", True)
    assert (answer.id[:5], answer.metadata, answer.error) == ("resp_", {"a": "b"}, None)
    (item,) = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert (answer.usage.output_tokens, answer.usage.output_tokens_details.reasoning_tokens) == (18, 0)
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_what_the_cache_supplied_is_told(client: openai.OpenAI) -> None:
    asked: Any = {"model": "demo", "max_tokens": 1}
    text = "Repeat after me: " + " ".join(f"word{n}" for n in range(60))
    first = client.responses.create(model="demo", input=text, max_output_tokens=1)
    again = client.responses.create(model="demo", input=text, max_output_tokens=1)
    cached = again.usage.input_tokens_details.cached_tokens
    assert first.usage.input_tokens_details.cached_tokens < cached < again.usage.input_tokens
    chat = client.chat.completions.create(messages=[{"role": "user", "content": text}], **asked)
    assert chat.usage.prompt_tokens_details.cached_tokens == cached


def test_a_stream(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="demo", input=COUNT, temperature=0, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == COUNTED == events[-4].text
    final: Response = events[-1].response
    assert (final.output_text, final.usage.output_tokens, final.id) == (COUNTED, 18, events[0].response.id)
    assert (events[0].response.output, events[0].response.status) == ([], "in_progress")


def test_the_clients_own_accumulation_of_a_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(model="demo", input=COUNT, text_format=Weather, max_output_tokens=64) as stream:
        texts = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        parsed = stream.get_final_response().output_parsed
    assert isinstance(parsed, Weather)
    assert json.loads(texts[-1]) == parsed.model_dump()


def test_an_answer_that_is_cut_off_is_incomplete(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="demo", input=COUNT, temperature=0, max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.output_text, answer.output[0].status) == (COUNTED[: len(answer.output_text)], "incomplete")
    *_, last = client.responses.create(model="demo", input=COUNT, temperature=0, max_output_tokens=3, stream=True)
    assert (last.type, last.response.output_text) == ("response.incomplete", answer.output_text)


def test_a_schema_from_a_class(client: openai.OpenAI) -> None:
    answer = client.responses.parse(model="demo", input="What is the weather?", text_format=Weather, temperature=1)
    assert isinstance(answer.output_parsed, Weather)
    assert answer.text.format.type == "json_schema"
    plain = client.responses.create(
        model="demo", input="What?", text={"format": {"type": "json_object"}}, max_output_tokens=50
    )
    assert plain.output_text.lstrip().startswith("{")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_functions_there_and_back(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    asked: Any = {"model": "demo", "tools": [TOOL], "parallel_tool_calls": False}
    answer: Any = client.responses.create(input=COUNT, tool_choice=choice, stream=stream, **asked)
    if stream:
        events = list(answer)
        answer = events[-1].response
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert "".join(deltas) == done.arguments == answer.output[0].arguments
    (call,) = answer.output
    assert (call.type, call.name, call.status, answer.status) == ("function_call", "weather", "completed", "completed")
    assert set(json.loads(call.arguments)) == {"city"}
    conversation: Any = [
        {"role": "user", "content": COUNT},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
        {"role": "user", "content": COUNT},
    ]
    again = client.responses.create(input=conversation, tool_choice="none", temperature=0, **asked)
    assert again.output_text == COUNTED


def test_a_conversation_is_what_it_is_in_a_chat(endpoint: Endpoint, client: openai.OpenAI) -> None:
    said = client.responses.create(model="demo", input="Remember: my best friend's name is Emma.", temperature=0)
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Remember: my best friend's name is Emma."}]},
        *[item.model_dump(exclude_none=True) for item in said.output],
        {"role": "user", "content": "What is my best friend's name?"},
    ]
    answer = client.responses.create(model="demo", instructions="Be brief.", input=items, temperature=0)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Remember: my best friend's name is Emma."},
        {"role": "assistant", "content": said.output_text},
        {"role": "user", "content": "What is my best friend's name?"},
    ]
    assert answer.usage.input_tokens == endpoint.post("/tokenize", {"messages": messages})[1]["count"]
    assert "Emma" in answer.output_text


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(client: openai.OpenAI, stream: bool) -> None:
    include: Any = ["message.output_text.logprobs"]
    answer: Any = client.responses.create(
        model="demo", input=COUNT, temperature=0, include=include, top_logprobs=2, stream=stream
    )
    if stream:
        events = list(answer)
        answer = events[-1].response
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        assert "".join(entry.token for event in deltas for entry in event.logprobs) == COUNTED
    entries = answer.output[0].content[0].logprobs
    assert "".join(entry.token for entry in entries) == COUNTED
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


def test_options_beyond_openai(client: openai.OpenAI) -> None:
    extras = {"top_k": 1, "stop": [", 4"], "seed": 1, "structured_outputs": {"regex": "[0-9, ]+"}}
    assert client.responses.create(model="demo", input=COUNT, extra_body=extras).output_text == "1, 2, 3"


def test_asyncio(endpoint: Endpoint) -> None:
    async def ask() -> list[str]:
        async with endpoint.async_client() as client:
            whole = client.responses.create(model="demo", input=COUNT, temperature=0)
            stream = await client.responses.create(model="demo", input=COUNT, temperature=0, stream=True)
            pieces = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            return [(await whole).output_text, "".join(pieces)]

    assert asyncio.run(ask()) == [COUNTED, COUNTED]


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True, "store": False}, "background"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"truncation": "other"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]}, "tools"),
        ({"tools": [{"type": "odd"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 101}, "temperature"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 3}}}}, "text.format"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
        ({"input": "x " * 5000}, "input"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"model": "other"}, "model"),
    ],
)
def test_what_is_not_served_is_refused_by_name(endpoint: Endpoint, values: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        status, answer = endpoint.post("/v1/responses", {"input": "hello", "stream": stream, **values})
        assert (status, answer["error"]["param"]) == (404 if param == "model" else 400, param), answer
        assert param in answer["error"]["message"]
    assert endpoint.get("/v1/responses/resp_1")[0] == 404


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_continued_by_its_id(endpoint: Endpoint, stream: bool) -> None:
    client = endpoint.client()
    first = client.responses.create(model="demo", input="What is 17 + 25?", temperature=0)
    asked: Any = {"model": "demo", "input": "And 2 + 3?", "temperature": 0, "previous_response_id": first.id}
    if stream:
        second = list(client.responses.create(**asked, stream=True))[-1].response
    else:
        second = client.responses.create(**asked)
    whole: Any = [
        {"role": "user", "content": "What is 17 + 25?"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And 2 + 3?"},
    ]
    expected = client.responses.create(model="demo", input=whole, temperature=0, store=False)
    assert second.output_text == expected.output_text
    assert second.usage.input_tokens == expected.usage.input_tokens
    assert (second.previous_response_id, second.store, expected.store) == (first.id, True, False)
    assert client.responses.retrieve(second.id).output_text == second.output_text
    listed = client.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in listed] == ["message", "message", "message"]
    client.responses.delete(first.id)
    assert client.responses.create(**{**asked, "previous_response_id": second.id}).output_text
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as missing:
        client.responses.create(**asked)
    assert missing.value.code == "previous_response_not_found"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(expected.id)


def test_responses_in_the_background(endpoint: Endpoint) -> None:
    client = endpoint.client()

    def ended(response: Any) -> Any:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while response.status == "in_progress" and time.monotonic() < deadline:
            time.sleep(0.05)
            response = client.responses.retrieve(response.id)
        return response

    begun = client.responses.create(model="demo", input=COUNT, temperature=0, background=True)
    assert begun.status in ("in_progress", "completed")
    found = ended(begun)
    assert (found.status, found.output_text) == ("completed", COUNTED)
    endless = client.responses.create(model="demo", input=COUNT, background=True, extra_body={"ignore_eos": True})
    assert client.responses.cancel(endless.id).status == "cancelled"
    assert ended(endless).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="background=true"):
        client.responses.cancel(client.responses.create(model="demo", input=COUNT, max_output_tokens=16).id)


def test_a_server_that_keeps_nothing(server: Server) -> None:
    with running_endpoint(server, response_store_bytes=0) as other:
        client = other.client()
        answer = client.responses.create(model="demo", input=COUNT, max_output_tokens=16)
        assert answer.store is False
        with pytest.raises(openai.NotFoundError, match="--response-store-bytes 0"):
            client.responses.retrieve(answer.id)
        with pytest.raises(openai.BadRequestError, match="previous_response_id is given"):
            client.responses.create(model="demo", input=COUNT, previous_response_id=answer.id)
