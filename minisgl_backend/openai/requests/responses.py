"""POST /v1/responses: a conversation as items, and its conversion to a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from minisgl_backend.openai.errors import invalid
from minisgl_backend.openai.requests.base import Constraint, JsonSchema, Model, ResponseFormat, Sampling, check_unicode
from minisgl_backend.openai.requests.chat import AllowedTools, AllowedToolsChoice, ChatRequest, OpenRouterReasoning
from minisgl_backend.openai.requests.messages import MAX_MESSAGES, Message, parts_of, shown, text_at, wrong
from minisgl_backend.openai.requests.response_tools import (
    AllowedFunctions,
    CallableTools,
    NamedFunction,
    ToolDicts,
    flat_name,
)
from minisgl_backend.openai.requests.tools import FunctionName, NamedTool

_NOT_SERVED = {
    "conversation": "this server keeps no conversations: send previous_response_id, or all of it as input",
    "prompt": "this server has no prompt templates: send instructions and input",
    "context_management": "this server does not shorten conversations",
}
# A field of the chat -> its name here.
WORDS: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
_REPEATED = {"instructions", "metadata", "reasoning", "text", "tool_choice", "tools", "user"}  # in the answer
Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
_ITEMS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")


class TextFormat(Constraint):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class Text(Model):
    format: TextFormat | None = None
    verbosity: str | None = None  # accepted without effect


class Reasoning(Model):
    effort: str | None = None  # passed to the chat template
    max_tokens: int | None = None  # reasoning tokens; OpenRouter's field
    # Accepted without effect: reasoning is returned unchanged.
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesStreamOptions(Model):
    include_obfuscation: bool | None = None  # has no effect: it is never done
    include_usage: bool | None = None  # always included; some clients know it from chats and send it


class ResponsesRequest(Sampling):
    """A conversation as items."""

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: Text | None = None
    tools: ToolDicts | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    include: Annotated[list[Included], Field(fail_fast=True)] | None = None
    top_logprobs: int | None = None
    stream_options: ResponsesStreamOptions | None = None
    truncation: Literal["disabled", "auto"] | None = None  # nothing is ever cut: a prompt that is too long is an error
    client_metadata: dict[str, Any] | None = None  # Codex's, accepted without effect
    max_tool_calls: int | None = None  # of built-in tools, of which there are none
    chat_template_kwargs: dict[str, Any] | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    # Refused by name if they request anything.
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None

    @cached_property
    def callable_tools(self) -> CallableTools:
        """Raises ApiError for an invalid tool."""
        return CallableTools(self.tools or ())

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())

    def check(self) -> None:
        """Raises ApiError for errors other than types and those that the chat reports."""
        for name, reason in _NOT_SERVED.items():
            if getattr(self, name):
                raise invalid(name, f"{name} is given; {reason}")
        check_unicode("input", self.input)
        for name, value in self.model_dump(include=_REPEATED).items():
            check_unicode(name, value)
        if self.max_output_tokens is not None and not 1 <= self.max_output_tokens < 2**31:
            raise invalid(
                "max_output_tokens", f"max_output_tokens is {self.max_output_tokens}; allowed: 1 to below 2**31"
            )
        form = self.text.format if self.text else None
        if form is not None and form.type == "json_schema" and form.schema_ is None:
            raise invalid("text.format", "text.format.schema is missing; json_schema needs it")
        if self.top_logprobs and not self.wants_logprobs:
            needed = "message.output_text.logprobs in include"
            raise invalid("top_logprobs", f"top_logprobs is {self.top_logprobs}; allowed: only with {needed}")

    @property
    def items(self) -> list[dict[str, Any]]:
        """The input's items."""
        if not isinstance(self.input, str):
            return self.input
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": self.input}]}]

    @property
    def references(self) -> dict[int, str]:
        """Places in the input -> ids of the kept items that stand there. Raises ApiError for one without an id."""
        if isinstance(self.input, str):
            return {}
        return {
            number: text_at(item, "id", f"input[{number}]")
            for number, item in enumerate(self.input)
            if item.get("type") == "item_reference" or (item and item.keys() <= {"id", "type"} and not item.get("type"))
        }

    def resolve(self, found: Mapping[int, dict[str, Any]]) -> None:
        """Puts the items in the place of their references."""
        self.input = [found.get(number, item) for number, item in enumerate(self.items)]

    def as_chat(self, earlier: Sequence[dict[str, Any]] = ()) -> ChatRequest:
        """The equivalent chat. `earlier`: the items before the input. Raises ApiError for items that a chat cannot
        express."""
        values = {name: getattr(self, name) for name in Sampling.model_fields}
        values |= {
            "messages": [Message.model_validate(message) for message in self._messages(earlier)],
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": self.wants_logprobs or None,
            "top_logprobs": self.top_logprobs if self.wants_logprobs else None,
            "response_format": self._format(),
            "tools": self.callable_tools.tools or None,
            "tool_choice": self._choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "chat_template_kwargs": self.chat_template_kwargs,
            "reasoning": OpenRouterReasoning(max_tokens=self.reasoning.max_tokens) if self.reasoning else None,
        }
        return ChatRequest.model_construct(**values)

    def _format(self) -> ResponseFormat | None:
        form = self.text.format if self.text else None
        if form is None:
            return None
        schema = JsonSchema.model_construct(name=form.name, schema_=form.schema_, strict=form.strict)
        return ResponseFormat.model_construct(type=form.type, json_schema=schema)

    def _choice(self) -> str | NamedTool | AllowedToolsChoice | None:
        if isinstance(self.tool_choice, NamedFunction):
            return _named(self.tool_choice)
        if isinstance(self.tool_choice, AllowedFunctions):
            allowed = AllowedTools(mode=self.tool_choice.mode, tools=[_named(one) for one in self.tool_choice.tools])
            return AllowedToolsChoice(type="allowed_tools", allowed_tools=allowed)
        return self.tool_choice

    def _messages(self, earlier: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        for number, item in enumerate(earlier):
            _add(item, f"previous_response_id[{number}]", messages)
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for number, item in enumerate(self.input):
            _add(item, f"input[{number}]", messages)
        return messages


def _named(function: NamedFunction) -> NamedTool:
    return NamedTool(type="function", function=FunctionName(name=flat_name(function.name, function.namespace)))


def _add(item: dict[str, Any], name: str, messages: list[dict[str, Any]]) -> None:
    """Reasoning, text and calls of one turn of the model are separate items here, but one message of a chat."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str):
            raise wrong(f"{name}.role", f"is {shown(role)}; allowed: a role")
        content = parts_of(item.get("content"), f"{name}.content")
        begun = _turn(messages) if role == "assistant" else None
        if begun is not None and not begun["content"] and "tool_calls" not in begun:
            begun["content"] = content
        else:
            messages.append({"role": role, "content": content})
    elif kind == "function_call":
        function = {key: text_at(item, key, name) for key in ("name", "arguments")}
        if isinstance(namespace := item.get("namespace"), str):
            function["name"] = flat_name(function["name"], namespace)
        call = {"id": text_at(item, "call_id", name), "type": "function", "function": function}
        begun = _turn(messages)
        if begun is None:
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        else:
            begun.setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = parts_of(item.get("output"), f"{name}.output")
        messages.append({"role": "tool", "tool_call_id": text_at(item, "call_id", name), "content": output})
    elif kind == "reasoning":
        reasoning = _reasoning_text(item, name)
        if reasoning:
            messages.append({"role": "assistant", "content": "", "reasoning_content": reasoning})
    else:
        raise wrong(f"{name}.type", f"is {shown(kind)}; allowed: {', '.join(_ITEMS)}")


def _turn(messages: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The message of the model's current turn, which no other message follows yet."""
    return messages[-1] if messages and messages[-1]["role"] == "assistant" else None


def _reasoning_text(item: dict[str, Any], name: str) -> str:
    """Its text or, from clients that keep nothing else, its summary."""
    key = "content" if item.get("content") else "summary"
    parts = item.get(key) or ()
    if not isinstance(parts, (list, tuple)):
        raise wrong(f"{name}.{key}", f"is {shown(parts)}; allowed: a list of parts")
    texts = []
    for number, part in enumerate(parts):
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise wrong(f"{name}.{key}[{number}].text", "is missing; allowed: a text")
        texts.append(part["text"])
    return "\n".join(texts)
