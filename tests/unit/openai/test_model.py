"""What the endpoint knows of the model behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from minisgl_backend.host.options.endpoint import EndpointSettings
from minisgl_backend.openai import model as model_module
from minisgl_backend.openai.endpoint import Endpoint
from minisgl_backend.openai.errors import ApiError
from minisgl_backend.openai.model import ServedModel
from minisgl_backend.openai.requests.chat import ChatRequest
from minisgl_backend.openai.triton import Delta, ModelInfo, Prompt, RequestContext


class Server:
    """A server whose model changes; None: it does not answer."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.asked = 0
        self.adapters: dict[str, str] = {}

    async def model_info(self) -> ModelInfo:
        self.asked += 1
        if self.name is None:
            raise ApiError(503, "the server does not answer")
        return ModelInfo(
            model=self.name,
            max_model_len=4096,
            vocab_size=1000,
            chat_template="",
            added_tokens=[],
            adapters=self.adapters,
        )


def resolve(model: ServedModel, name: str | None = None) -> str:
    return asyncio.run(model.resolve(name))


def test_an_adapter_is_a_model_with_a_parent() -> None:
    server: Any = Server("base")
    server.adapters = {"sql": "/adapters/sql", "base:v2": "/adapters/v2"}
    model = ServedModel(server, EndpointSettings(port=0))
    named = {None: {}, "base": {}, "sql": {"lora_name": "sql"}, "base:sql": {"lora_name": "sql"}}
    for name, fields in {**named, "base:v2": {"lora_name": "base:v2"}}.items():
        assert resolve(model, name) == (name or "base")
        assert asyncio.run(model.adapter_fields(ChatRequest.model_construct(model=name))) == fields
        assert asyncio.run(model.card(name or "base"))["id"] == fields.get("lora_name", "base")
    by_path = ChatRequest.model_construct(model="base", lora_path="sql")
    assert asyncio.run(model.adapter_fields(by_path)) == {"lora_name": "sql"}
    for wrong in ("other", "other:sql", "base:", ":sql", "base:other"):
        with pytest.raises(ApiError, match="which is not served here; allowed: base, sql, base:v2"):
            resolve(model, wrong)
    cards = asyncio.run(model.cards())
    found = [(card["id"], card["root"], card["parent"]) for card in cards]
    assert found == [("base", "base", None), ("sql", "/adapters/sql", "base"), ("base:v2", "/adapters/v2", "base")]


def test_an_adapter_that_is_unloaded_meanwhile_is_not_answered_by_its_base(monkeypatch: pytest.MonkeyPatch) -> None:
    server: Any = Server("base")
    server.adapters = {"sql": "/adapters/sql"}
    model = ServedModel(server, EndpointSettings(port=0))
    monkeypatch.setattr(model_module, "_INFO_SECONDS", 0.0)
    monkeypatch.setattr(model_module, "_UNKNOWN_SECONDS", 0.0)
    for name in ("sql", "base:sql"):
        server.adapters = {"sql": "/adapters/sql"}
        assert resolve(model, name) == name
        server.adapters = {}
        body = ChatRequest.model_construct(model=name)
        for late in (model.adapter_fields(body), model.options(body), model.card(name)):
            with pytest.raises(ApiError, match=f"model is '{name}', which is not served here; allowed: base") as error:
                asyncio.run(late)
            assert error.value.status == 404


def test_a_server_may_come_back_with_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    server: Any = Server("one")
    model = ServedModel(server, EndpointSettings(port=0))
    for _ in range(3):
        assert resolve(model) == "one"
    assert server.asked == 1
    monkeypatch.setattr(model_module, "_INFO_SECONDS", 0.0)
    server.name = None
    assert resolve(model, "one") == "one"
    server.name = "two"
    assert resolve(model, "two") == "two"
    with pytest.raises(ApiError, match="'one', which is not served here; allowed: two"):
        resolve(model, "one")


@pytest.mark.parametrize(("is_guided", "kind"), [(False, "reasoning"), (True, "content")])
def test_what_a_grammar_allows_is_no_thought_that_the_prompt_began(is_guided: bool, kind: str) -> None:
    server: Any = Server("one")
    model = ServedModel(server, EndpointSettings(port=0, reasoning_parser="deepseek_r1"))
    parser = asyncio.run(model.answer_format(None, reasoning=True, is_guided=is_guided)).new_reasoning("")
    assert parser is not None
    assert [part.kind for part in parser.feed('{"a": 1} ')] == [kind]


@pytest.mark.parametrize(
    ("tail", "kind"),
    [("<｜Assistant｜><think>\n", "reasoning"), ("22<｜tool▁outputs▁end｜>", "content"), ("a <think> b", "content")],
)
def test_the_prompt_of_the_request_says_whether_thoughts_are_open(tail: str, kind: str) -> None:
    server: Any = Server("one")
    model = ServedModel(server, EndpointSettings(port=0, reasoning_parser="qwen3"))
    form = asyncio.run(model.answer_format(None, reasoning=True, is_guided=False))
    assert form.depends_on_prompt
    parser = form.new_reasoning(tail)
    assert parser is not None
    assert [part.kind for part in parser.feed("22 degrees ")] == [kind]


def test_a_server_that_never_answered_is_asked_again() -> None:
    server: Any = Server(None)
    model = ServedModel(server, EndpointSettings(port=0))
    for _ in range(2):
        with pytest.raises(ApiError, match="does not answer"):
            resolve(model)
    server.name = "one"
    assert resolve(model) == "one"


class Rendering:
    """A server that knows the end of its prompts, and is told what is to be generated."""

    def __init__(self, template: str, tail: str) -> None:
        self.template, self.tail = template, tail
        self.started: list[tuple[Prompt, Mapping[str, Any]]] = []

    async def model_info(self) -> ModelInfo:
        return ModelInfo(model="m", max_model_len=4096, vocab_size=1000, chat_template=self.template, added_tokens=[])

    async def tokenize(
        self, prompt: Prompt, outputs: Sequence[str], names: Mapping[str, str], sampling: Mapping[str, Any]
    ) -> dict[str, Any]:
        assert prompt.messages is not None
        return {"input_ids": [5, 6, 7], "prompt_tail": [self.tail.encode()]}

    def start(self, prompt: Prompt, sampling: Mapping[str, Any], *_: Any, **__: Any) -> None:
        self.started.append((prompt, sampling))


THINKS = "<think></think>"
HERMES = '<tool_call>{"name": n, "arguments": a}</tool_call>'
DEEPSEEK = "<think></think><｜tool▁sep｜>"
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("template", "tail", "fields", "as_tokens", "special", "kinds"),
    [
        ("plain", "", {}, False, None, None),
        (THINKS, "<think>\n", {}, True, None, ["reasoning"]),
        (THINKS, "assistant\n", {}, True, None, ["content"]),
        (THINKS, "<think>\n", {"response_format": {"type": "json_object"}}, False, None, ["content"]),
        (THINKS, "<think>\n", {"separate_reasoning": False}, False, None, None),
        (DEEPSEEK, "<think>\n", {"tools": TOOLS}, True, False, ["reasoning"]),
        (DEEPSEEK, "", {"tools": TOOLS, "tool_choice": "required"}, False, False, ["call"]),
        ("<|start|><|channel|><|message|>", "", {}, False, False, ["content"]),
    ],
)
def test_a_prompt_is_rendered_once(
    template: str, tail: str, fields: dict[str, Any], as_tokens: bool, special: bool | None, kinds: list[str] | None
) -> None:
    """Before the generation where its end says how the answer begins; it is sent as tokens then."""

    async def begin() -> Any:
        endpoint = Endpoint(EndpointSettings(port=0))
        server: Any = Rendering(template, tail)
        endpoint.triton, endpoint.model = server, ServedModel(server, EndpointSettings(port=0))
        body = ChatRequest(messages=[{"role": "user", "content": "x"}], **fields)
        return server, (await endpoint.start_chat(body, RequestContext("1"), body.names(), figures=False))[1]

    server, parsers = asyncio.run(begin())
    ((prompt, sampling),) = server.started
    assert (prompt.token_ids == [5, 6, 7]) == as_tokens
    assert (prompt.messages is None) == as_tokens
    assert sampling.get("skip_special_tokens") is special
    text = "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>" if kinds == ["call"] else "Hm, 22 degrees"
    found = None if parsers is None else parsers[0].feed(Delta(0, text, 1, None, ()))
    assert (found if found is None else [part.kind for part in found][:1]) == kinds


@pytest.mark.parametrize(
    ("template", "fields", "budget"),
    [
        (THINKS, {"thinking_token_budget": 9}, 9),
        (THINKS, {"thinking_token_budget": -1, "reasoning": {"max_tokens": 5}}, None),
        (THINKS, {"reasoning": {"max_tokens": 5}}, 5),
        (THINKS, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, 1024),
        ("plain", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, None),
        ("plain", {"thinking_token_budget": 9}, 9),  # the server refuses it
        (THINKS, {}, None),
    ],
)
def test_thoughts_have_a_budget_by_every_name(template: str, fields: dict[str, Any], budget: int | None) -> None:
    async def begin(**more: Any) -> Any:
        endpoint, server = Endpoint(EndpointSettings(port=0)), Rendering(template, "<think>\n")
        endpoint.triton = server  # type: ignore[assignment]
        endpoint.model = ServedModel(server, EndpointSettings(port=0))  # type: ignore[arg-type]
        body = ChatRequest(messages=[{"role": "user", "content": "x"}], **fields, **more)
        parsers = (await endpoint.start_chat(body, RequestContext("1"), body.names(), figures=False))[1]
        return server.started[0][1], parsers

    sampling, _ = asyncio.run(begin())
    assert sampling.get("thinking_token_budget") == budget
    assert sampling.get("reasoning_parser") == (None if budget is None else "auto")
    if template == THINKS and budget is not None:  # a grammar holds behind them
        _, parsers = asyncio.run(begin(tools=TOOLS, tool_choice="required"))
        parts = parsers[0].feed(Delta(0, 'Hm</think>[{"name": "f", "parameters": {}}]', 1, None, ()))
        assert [part.kind for part in parts][:2] == ["reasoning", "call"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
@pytest.mark.parametrize(
    ("parser", "key", "text"),
    [
        ("hermes", "structural_tag", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
        ("granite", "structural_tag", '<|tool_call|>[{"name": "f", "arguments": {}}]'),
        ("gemma4", "structural_tag", "<|tool_call>call:f{}<tool_call|>"),
        ("pythonic", "structural_tag", "[f()]"),
        ("qwen3_coder", "json", ""),  # XML keeps fewer schemas
        ("auto", "json", ""),
    ],
)
def test_a_forced_call_has_the_models_format_where_a_grammar_keeps_any_schema_there(
    choice: Any, parser: str, key: str, text: str
) -> None:
    async def begin() -> Any:
        settings = EndpointSettings(port=0, tool_call_parser=parser)
        endpoint, server = Endpoint(settings), Rendering("plain", "")
        endpoint.triton, endpoint.model = server, ServedModel(server, settings)  # type: ignore[assignment, arg-type]
        body = ChatRequest(messages=[{"role": "user", "content": "x"}], tools=TOOLS, tool_choice=choice)
        parsers = (await endpoint.start_chat(body, RequestContext("1"), body.names(), figures=False))[1]
        return server.started[0][1]["guided_decoding"], parsers[0]

    guided, message = asyncio.run(begin())
    assert list(guided) == [key]
    if not text:
        text = "{}" if isinstance(choice, dict) else '[{"name": "f", "parameters": {}}]'
    assert [part.text for part in message.feed(Delta(0, text, 1, "stop", ()))] == ["f", "{}"]


def strict_chat(parser: str, name: str, strict: bool | None, **fields: Any) -> dict[str, Any]:
    """Its sampling options: one function, offered."""

    async def begin() -> dict[str, Any]:
        settings = EndpointSettings(port=0, tool_call_parser=parser)
        endpoint, server = Endpoint(settings), Rendering(HERMES, "")
        endpoint.triton, endpoint.model = server, ServedModel(server, settings)  # type: ignore[assignment, arg-type]
        tools = [{"type": "function", "function": {"name": name, "strict": strict, "parameters": {"type": "object"}}}]
        body = ChatRequest(messages=[{"role": "user", "content": "x"}], tools=tools, **fields)
        await endpoint.start_chat(body, RequestContext("1"), body.names(), figures=False)
        found: dict[str, Any] = server.started[0][1]
        return found

    return asyncio.run(begin())


@pytest.mark.parametrize(("parser", "strict"), [("auto", True), ("gemma4", True), ("lfm2", True), ("auto", None)])
def test_strict_functions_are_kept_by_a_grammar_of_the_format(parser: str, strict: bool | None) -> None:
    assert ("structural_tag" in strict_chat(parser, "f", strict).get("guided_decoding", {})) == bool(strict)


@pytest.mark.parametrize("name", ["get-time", "files/read", "my tool", "a😀", '"'])
@pytest.mark.parametrize("parser", ["pythonic", "lfm2", "auto"])
def test_functions_with_any_name_may_be_strict_and_forced(parser: str, name: str) -> None:
    for fields in ({}, {"tool_choice": "required"}):
        tag = strict_chat(parser, name, True, **fields)["guided_decoding"]["structural_tag"]
        written = json.dumps(name, ensure_ascii=False) if parser == "auto" else f"{name}("
        assert json.dumps(written)[1:-1] in tag


@pytest.mark.parametrize(("tail", "opening"), [("<think>\n", ""), ("assistant\n", "\n<think>\n")])
@pytest.mark.parametrize("reasoning_parser", ["qwen3", "deepseek_r1"])
def test_a_call_in_thoughts_that_stay_in_the_content_is_text(tail: str, opening: str, reasoning_parser: str) -> None:
    settings = EndpointSettings(port=0, tool_call_parser="hermes", reasoning_parser=reasoning_parser)

    async def begin() -> Any:
        endpoint = Endpoint(settings)
        server: Any = Rendering("", tail)
        endpoint.triton, endpoint.model = server, ServedModel(server, settings)
        given: Any = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "separate_reasoning": False}
        body = ChatRequest.model_validate(given)
        return (await endpoint.start_chat(body, RequestContext("1"), body.names(), figures=False))[1]

    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    thoughts = f"{opening}I could call {call}, but \n</think>"
    for text, content, num_calls in (
        (f"{thoughts}\n\nNo.", f"{thoughts}\n\nNo.", 0),
        (f"{thoughts}\n\n{call}", thoughts, 1),
        (f"{opening or 'H'}m", f"{opening or 'H'}m", 0),
    ):
        for pieces in ([text], list(text)):
            (parser,) = asyncio.run(begin())
            found = [part for piece in pieces for part in parser.feed(Delta(0, piece, 1, None, ()))]
            found += parser.feed(Delta(0, "", 0, "stop", ()))
            assert "".join(part.text for part in found if part.kind == "content") == content
            assert [part.kind for part in found].count("call") == num_calls
            assert "reasoning" not in [part.kind for part in found]
