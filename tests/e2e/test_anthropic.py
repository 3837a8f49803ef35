"""/v1/messages through the package `anthropic`, before a model that says what the test wants."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.openai_stack import Endpoint, running_endpoint, scripted_server
from tests.e2e.test_openai_scripted import BOTH, CALLS, SCRIPTS, THOUGHTS, thinking_model
from tests.e2e.wire import PATIENCE_SECONDS

if TYPE_CHECKING:  # five seconds, in each worker that collects this file
    import anthropic

pytestmark = pytest.mark.e2e

TOOLS: Any = [{"name": name, "input_schema": {"type": "object"}} for name, _ in CALLS]
MESSAGES: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    folder = tmp_path_factory.mktemp("anthropic")
    with (
        scripted_server(folder, SCRIPTS, {"model": thinking_model(folder), "null_runner_rate": "400"}) as server,
        running_endpoint(server, served_model_names=("demo",), api_keys=("secret",)) as found,
    ):
        yield found


@pytest.fixture(scope="module")
def client(endpoint: Endpoint) -> anthropic.Anthropic:
    import anthropic

    return anthropic.Anthropic(base_url=endpoint.url, api_key="secret", max_retries=0, timeout=PATIENCE_SECONDS)


def said(client: anthropic.Anthropic, script: str, *, stream: bool, **values: Any) -> anthropic.types.Message:
    seed = {"seed": SCRIPTS.index(script)}
    asked: Any = {"model": "demo", "max_tokens": 500, "messages": MESSAGES, "extra_body": seed, **values}
    if not stream:
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as events:
        return events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_text_and_calls_are_blocks(client: anthropic.Anthropic, stream: bool) -> None:
    message = said(client, BOTH, stream=stream, tools=TOOLS)
    thoughts, text, *calls = message.content
    assert (thoughts.type, thoughts.thinking) == ("thinking", "I have to look.")  # type: ignore[union-attr]
    assert (text.type, text.text) == ("text", "Let me look.")  # type: ignore[union-attr]
    assert [(call.name, call.input) for call in calls] == CALLS  # type: ignore[union-attr]
    assert (message.stop_reason, message.role) == ("tool_use", "assistant")
    assert message.usage.output_tokens > 10
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) > 0
    single = said(
        client, BOTH, stream=stream, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}
    )
    assert [block.type for block in single.content] == ["thinking", "text", "tool_use"]


@pytest.mark.parametrize("stream", [False, True])
def test_reasons_to_stop(client: anthropic.Anthropic, stream: bool) -> None:
    assert said(client, THOUGHTS, stream=stream).stop_reason == "end_turn"
    assert said(client, THOUGHTS, stream=stream, max_tokens=5).stop_reason == "max_tokens"
    stopped = said(client, THOUGHTS, stream=stream, stop_sequences=["never", " is 4"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " is 4")
    assert stopped.content[-1].text == "It"  # type: ignore[union-attr]


def test_events_in_anthropics_order(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "demo", "max_tokens": 500, "messages": MESSAGES, "tools": TOOLS}
    events = list(client.messages.create(**asked, extra_body={"seed": SCRIPTS.index(BOTH)}, stream=True))
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    starts = [event.index for event in events if event.type == "content_block_start"]
    ends = [event.index for event in events if event.type == "content_block_stop"]
    assert starts == ends == [0, 1, 2, 3]


def test_a_request_as_claude_code_sends_it(client: anthropic.Anthropic) -> None:
    """System blocks with cache marks, results of tools, thoughts of an earlier turn, fields of the day."""
    history: Any = [
        {"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I have to look.", "signature": "x"},
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "toolu_1", "name": "time", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "12:00"}]},
                {"type": "text", "text": "go on"},
            ],
        },
    ]
    found = client.beta.messages.create(
        model="demo",
        max_tokens=32000,
        system=[{"type": "text", "text": "You are helpful.", "cache_control": {"type": "ephemeral"}}],
        messages=history,
        tools=[*TOOLS, {"type": "web_search_20250305", "name": "web_search"}],
        metadata={"user_id": "me"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        betas=["context-management-2025-06-27"],
        extra_body={"seed": SCRIPTS.index(THOUGHTS)},
    )
    assert found.stop_reason == "end_turn"
    few = client.messages.count_tokens(model="demo", messages=MESSAGES).input_tokens
    more = client.messages.count_tokens(model="demo", messages=history, system="Be brief.", tools=TOOLS).input_tokens
    assert more > few > 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_system_message_behind_the_user_is_joined_to_the_first(
    endpoint: Endpoint, client: anthropic.Anthropic, stream: bool
) -> None:
    """As Claude Code sends it; the template takes none but the first."""
    later: Any = {"role": "system", "content": "Be brief."}
    found = said(client, THOUGHTS, stream=stream, system="You are helpful.", messages=[*MESSAGES, later])
    assert found.stop_reason == "end_turn"
    joined = "You are helpful.\n\nBe brief."
    counts = [
        client.messages.count_tokens(model="demo", system="You are helpful.", messages=[*MESSAGES, later]),
        client.messages.count_tokens(model="demo", system=joined, messages=MESSAGES),
    ]
    assert counts[0].input_tokens == counts[1].input_tokens
    key = {"x-api-key": "secret"}
    system = {"role": "system", "content": joined}
    messages = [{**system, "content": "You are helpful."}, *MESSAGES, {**later, "role": "developer"}]
    shown = [endpoint.post("/tokenize", {"messages": one}, key)[1]["tokens"] for one in (messages, [system, *MESSAGES])]
    assert shown[0] == shown[1]
    body = {"input": messages, "max_output_tokens": 5}
    assert endpoint.post("/v1/responses", body, key)[1]["status"] == "incomplete"


def test_errors_in_anthropics_shape(endpoint: Endpoint, client: anthropic.Anthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="claude", max_tokens=5, messages=MESSAGES)
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="temperature is 1000"):
        client.messages.create(model="demo", max_tokens=5, messages=MESSAGES, extra_body={"temperature": 1000})
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(model="demo", max_tokens=5, messages=[{"role": "user", "content": "word " * 9000}])
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    with pytest.raises(anthropic.BadRequestError, match="this model has no image encoder"):
        client.messages.create(model="demo", max_tokens=5, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=endpoint.url, api_key="wrong", max_retries=0).messages.create(
            model="demo", max_tokens=5, messages=MESSAGES
        )
    status, answer = endpoint.post("/v1/messages", b"{", {"x-api-key": "secret"})
    assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
    assert json.dumps(answer)
