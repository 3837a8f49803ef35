"""Whole conversations through the chat templates of real models, which tests/third_party/llama.cpp has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import tokenizers.models
import transformers

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.openai.requests.messages import Message
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
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
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
