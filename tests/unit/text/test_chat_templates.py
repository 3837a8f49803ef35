"""Whole conversations through the chat templates of real models, which tests/third_party/llama.cpp has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import tokenizers.models
import transformers

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.openai.requests.anthropic import CountTokensRequest, MessagesRequest
from minisgl_backend.openai.requests.chat import ChatRequest
from minisgl_backend.openai.requests.messages import Message
from minisgl_backend.openai.requests.responses import ResponsesRequest
from minisgl_backend.openai.requests.tokenize import TokenizeRequest
from minisgl_backend.text.chat_template import ChatTemplate

TEMPLATES = Path(__file__).parents[2] / "third_party" / "llama.cpp" / "templates"
LLAMA = "meta-llama-Llama-3.1-8B-Instruct"
NEMO = "mistralai-Mistral-Nemo-Instruct-2407"
SMALL = "Mistral-Small-3.2-24B-Instruct-2506"
DISTILL_OLD = "deepseek-ai-DeepSeek-R1-Distill-Llama-8B"
DISTILL_NEW = "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells it",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
# These write no calls at all, or refuse tools, whatever the history looks like.
WITHOUT_CALLS = {
    "HuggingFaceTB-SmolLM3-3B",
    "LFM2-8B-A1B",
    "LFM2.5-Instruct",
    "google-gemma-2-2b-it",
    "ibm-granite-granite-3.3-2B-Instruct",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
}
# These ask for variables of their own, or for what no sandbox allows; transformers refuses them, too.
NOT_RENDERED = {
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "Kimi-K2-Instruct",
    "Kimi-K2-Thinking",
    "fireworks-ai-llama-3-firefunction-v2",
    "llama-cpp-deepseek-r1",
}
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


def template(name: str) -> ChatTemplate:
    """`name`: of a file, or the template itself."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
    file = TEMPLATES / f"{name}.jinja"
    tokenizer.chat_template = file.read_text(encoding="utf-8") if name in NAMES else name
    return ChatTemplate(tokenizer)


def call(arguments: Any, id: str = "call_6fa920ea33364e46a99e0bf8", **more: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "weather", "arguments": arguments, **more}}


def conversation(content: Any, *calls: dict[str, Any]) -> list[dict[str, Any]]:
    results = [{"role": "tool", "tool_call_id": one["id"], "name": "weather", "content": "22 degrees"} for one in calls]
    return [
        {"role": "user", "content": "How warm is it?"},
        {"role": "assistant", "content": content, "tool_calls": list(calls)},
        *results,
    ]


def render(name: str, messages: list[dict[str, Any]], door: str = "openai", **arguments: Any) -> str:
    """The prompt as the OpenAI endpoint or Triton's `messages` make it of a client's messages."""
    if door == "openai":
        messages = [Message.model_validate(message).for_template(place) for place, message in enumerate(messages)]
    return template(name).render(messages, arguments)


@pytest.mark.parametrize("door", ["openai", "triton"])
@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("arguments", ['{"city": "Pa\\"ris"}', {"city": 'Pa"ris'}], ids=["text", "object"])
def test_every_template_shows_the_model_its_calls_and_their_results(door: str, content: Any, arguments: Any) -> None:
    for name in NAMES:
        if name in WITHOUT_CALLS | NOT_RENDERED:
            continue
        prompt = render(name, conversation(content, call(arguments)), door, tools=[TOOL])
        history = prompt[prompt.rindex("How warm") :] if "</tool" not in prompt[-30:] else prompt
        assert "weather" in history, name
        assert "Pa" in history, name
        assert "22 degrees" in prompt, name
        # An object that was joined to a text, a text that was made JSON once more, and a null that became a word.
        assert "{'" not in history, name
        assert '\\\\\\"' not in history, name
        assert "None" not in history, name


def test_templates_that_are_left_out_are_those_that_cannot() -> None:
    for name in NOT_RENDERED:
        with pytest.raises(InvalidRequestError, match="the chat template refuses them"):
            render(name, conversation("", call({"city": "Paris"})), tools=[TOOL])
    for name in WITHOUT_CALLS - {"google-gemma-2-2b-it"}:
        assert "Paris" not in render(name, conversation("", call({"city": "Paris"})))


@pytest.mark.parametrize("door", ["openai", "triton"])
def test_an_empty_list_of_calls_is_no_call(door: str) -> None:
    """Clients and servers write it into every message of an assistant."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello, I am here", "tool_calls": []},
        {"role": "user", "content": "Hi again"},
    ]
    without = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
    refused = set()
    for name in NAMES:
        try:
            expected = render(name, without, door)
        except InvalidRequestError:  # some want tools with every conversation
            refused.add(name)
            continue
        assert render(name, messages, door) == expected, name
    assert len(refused) < 8
    assert "Hello, I am here" in render(SMALL, messages, door)


@pytest.mark.parametrize("door", ["openai", "triton"])
@pytest.mark.parametrize("missing", [None, "absent", "null", ""])
def test_arguments_that_are_missing_are_none(door: str, missing: Any) -> None:
    one = call(missing)
    if missing == "absent":
        del one["function"]["arguments"]
    found = render("Qwen-Qwen2.5-7B-Instruct", conversation(None, one), door)
    assert '{"name": "weather", "arguments": {}}' in found


WHOLE = {
    LLAMA: '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "weather", "parameters": {"city": "Paris"}}'
    '<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"22 degrees"<|eot_id|>',
    NEMO: '[INST]How warm is it?[/INST][TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}, "id": '
    '"abcdef123"}]</s>[TOOL_RESULTS]{"content": 22 degrees, "call_id": "abcdef123"}[/TOOL_RESULTS]',
    SMALL: '[TOOL_CALLS]weather[CALL_ID]abcdef123[ARGS]{"city": "Paris"}</s>'
    "[TOOL_RESULTS]abcdef123[TOOL_CONTENT]22 degrees[/TOOL_RESULTS]",
    DISTILL_OLD: "<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>'
    "22 degrees<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
    DISTILL_NEW: "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
    "Qwen-Qwen3-0.6B": '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n'
    "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n22 degrees\n</tool_response><|im_end|>",
    "Qwen3-Coder": "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
    "openai-gpt-oss-120b": "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
    '{"city": "Paris"}<|call|><|start|>functions.weather to=assistant<|channel|>commentary<|message|>'
    '"22 degrees"<|end|>',
}


@pytest.mark.parametrize("door", ["openai", "triton"])
@pytest.mark.parametrize("name", sorted(WHOLE))
def test_a_turn_with_a_call_is_what_the_model_was_trained_on(name: str, door: str) -> None:
    found = render(name, conversation(None, call('{"city": "Paris"}', "abcdef123")), door, tools=[TOOL])
    assert WHOLE[name] in found


def test_ids_of_other_servers_get_nine_letters_where_the_template_asks_for_them() -> None:
    found = render(NEMO, conversation(None, call("{}", "call_6fa920ea33364e46a99e0bf8")), tools=[TOOL])
    (made,) = {piece.split('"')[0] for piece in found.split('id": "')[1:]}
    assert len(made) == 9
    assert made.isalnum()
    other = render(NEMO, conversation(None, call("{}", "call_7")), tools=[TOOL])
    assert made not in other


def test_a_text_beside_calls_is_kept_by_a_template_that_has_no_room_for_it() -> None:
    found = render(DISTILL_OLD, conversation("I shall look.", call('{"city": "Paris"}')))
    assert "<｜Assistant｜>I shall look.<｜end▁of▁sentence｜>" in found
    assert '<｜tool▁sep｜>weather\n```json\n{"city": "Paris"}' in found


def test_calls_that_are_none_are_named() -> None:
    for calls, named in (("x", "tool_calls is 'x'"), ([{}], r"tool_calls\[0\]"), ([{"function": {}}], r"\[0\]")):
        with pytest.raises(InvalidRequestError, match=rf"messages\[0\]\.{named}" if "is" in named else named):
            template(LLAMA).render([{"role": "assistant", "content": "", "tool_calls": calls}], {})


STRICT_SYSTEM = (  # one system message, which comes first; users and assistants in turns
    "{% if messages[0].role == 'system' %}[{{ messages[0].content }}]{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no turn') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
CALLED: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call("{}", "abcdef123")]}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "abcdef123", "name": "weather", "content": "22 degrees"}


def said(turns: str) -> list[dict[str, Any]]:
    """`system S1, user U1`: a conversation of these texts; `call` and `result` as above."""
    found: list[dict[str, Any]] = []
    for turn in turns.split(", "):
        role, _, content = turn.partition(" ")
        found.append({"call": CALLED, "result": RESULT}.get(role) or {"role": role, "content": content})
    return found


@pytest.mark.parametrize(
    ("name", "turns", "same_as"),
    [
        ("Qwen3.5-4B", "system S1, user U1, system S2", "system S1\n\nS2, user U1"),
        ("Qwen3.5-4B", "user U1, system S1", "system S1, user U1"),
        ("Qwen3.5-4B", "system S1, system S2, user U1", "system S1\n\nS2, user U1"),
        ("Qwen3.5-4B", "system S1, user U1, developer S2, user U2", "system S1\n\nS2, user U1, user U2"),
        ("Qwen3.5-4B", "system S1, user U1, call, result, system S2", "system S1\n\nS2, user U1, call, result"),
        (
            NEMO,
            "system S1, user U1, assistant A1, system S2, user U2",
            "system S1\n\nS2, user U1, assistant A1, user U2",
        ),
        (NEMO, "user U1, system S1, user U2", "system S1, user U1\n\nU2"),
        (NEMO, "user U1, assistant A1, assistant A2, user U2", "user U1, assistant A1\n\nA2, user U2"),
        (SMALL, "user U1, user U2", "user U1\n\nU2"),
        ("mistralai-Ministral-3-14B-Reasoning-2512", "system S1, user U1, system S2", "system S1\n\nS2, user U1"),
        ("Apertus-8B-Instruct", "system S1, user U1, system S2", "system S1\n\nS2, user U1"),
        ("google-gemma-2-2b-it", "system S1, user U1, system S2", "user S1\n\nS2\n\nU1"),
        ("google-gemma-2-2b-it", "system S1, user U1, user U2, assistant A1", "user S1\n\nU1\n\nU2, assistant A1"),
        (STRICT_SYSTEM, "developer S1, developer S2, user U1", "system S1\n\nS2, user U1"),
        (STRICT_SYSTEM, "system S1, system S2, user U1, user U2", "system S1\n\nS2, user U1\n\nU2"),
    ],
)
def test_where_a_template_refuses_the_order_messages_are_joined(name: str, turns: str, same_as: str) -> None:
    assert render(name, said(turns), "triton") == render(name, said(same_as), "triton")
    assert render(name, said(turns), "openai") == render(name, said(same_as), "openai")


def test_what_a_user_says_behind_a_result_is_kept_by_templates_that_want_an_answer_first() -> None:
    for name in (NEMO, SMALL):
        found = render(name, said("system S1, user U1, call, result, user U2"), tools=[TOOL])
        assert "22 degrees\n\nU2" in found


def test_what_renders_stays_as_it_is() -> None:
    """A prompt that was cached is found again."""
    turns = "system S1, user U1, system S2, user U2, assistant A1, assistant A2, user U3"
    expected = "".join(
        f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in (turn.split(" ") for turn in turns.split(", "))
    )
    found = render("Qwen-Qwen2.5-7B-Instruct", said(turns))
    assert found == f"{expected}<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("name", "is_lost"), [("MiniMax-M2", True), ("openai-gpt-oss-120b", True), ("Qwen-Qwen2.5-7B-Instruct", False)]
)
def test_a_template_that_leaves_out_system_messages_is_warned_of_once(
    name: str, is_lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    found = template(name)
    for _ in range(2):
        assert ("S2" in found.render(said("system S1, user U1, system S2"), {})) != is_lost
    assert len([record for record in caplog.records if "leaves out" in record.getMessage()]) == is_lost


def test_developers_are_heard_by_every_model_that_hears_the_system() -> None:
    """Some templates name the role and drop its messages, others drop it behind one of the system."""
    for path in sorted(TEMPLATES.glob("*.jinja")):
        for begin in ("", "system S1, "):
            try:
                heard = "S2" in render(path.stem, said(f"{begin}system S2, user U1"))
            except InvalidRequestError:  # without tools
                continue
            found = render(path.stem, said(f"{begin}developer S2, user U1"))
            assert "S2" in found or not heard, (path.stem, begin)
            assert ("S1" in found) or not begin, path.stem
    for name in ("Cohere2MoE", "deepseek-ai-DeepSeek-V3.2", "Apertus-8B-Instruct"):
        assert render(name, said("developer S1, user U1")) == render(name, said("system S1, user U1"))
    assert "S1\n\nS2" in render("openai-gpt-oss-120b", said("system S1, developer S2, user U1"))


@pytest.mark.parametrize(
    ("name", "turns", "told"),
    [
        (NEMO, "system S1, assistant A1, user U1", r"must alternate.*\(messages\[1\], of role 'assistant': 'A1'\)"),
        ("google-gemma-2-2b-it", "user U1, call, result", r"must alternate.*\(messages\[2\], of role 'tool'"),
        ("google-gemma-2-2b-it", "system S1", r"System role not supported \(messages\[0\], of role 'system': 'S1'\)"),
        ("fireworks-ai-llama-3-firefunction-v2", "user U1, user U2", r"refuses them: 'functions' is undefined$"),
    ],
)
def test_where_nothing_helps_the_message_is_named(name: str, turns: str, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        render(name, said(turns))


def test_each_api_says_later_system_messages_first() -> None:
    """As Claude Code and Codex send them, and as each API's request becomes a chat."""
    later: list[Any] = [{"role": "user", "content": "U1"}, {"role": "system", "content": "S2"}]
    developer = [{"role": "user", "content": "U1"}, {"role": "developer", "content": "S2"}]
    requests = (
        MessagesRequest.model_validate({"max_tokens": 1, "system": "S1", "messages": later}).as_chat(),
        CountTokensRequest.model_validate({"system": "S1", "messages": later}).as_chat(),
        ResponsesRequest.model_validate({"instructions": "S1", "input": developer}).as_chat(),
        TokenizeRequest.model_validate({"messages": [{"role": "system", "content": "S1"}, *developer]}),
        ChatRequest.model_validate({"messages": [{"role": "system", "content": "S1"}, *later]}),
    )
    expected = render("Qwen3.5-4B", said("system S1\n\nS2, user U1"))
    for request in requests:
        messages = [message.for_template(number) for number, message in enumerate(request.messages or ())]
        assert template("Qwen3.5-4B").render(messages, request.template_kwargs()) == expected
