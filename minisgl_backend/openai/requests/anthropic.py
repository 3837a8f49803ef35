"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's requests, and their conversion to chats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from minisgl_backend.openai.errors import invalid
from minisgl_backend.openai.requests.anthropic_blocks import message_of_assistant, messages_of_user, system_text
from minisgl_backend.openai.requests.base import Constraint, JsonSchema, Model, ResponseFormat, Sampling, check_unicode
from minisgl_backend.openai.requests.chat import ChatRequest, Thinking
from minisgl_backend.openai.requests.messages import MAX_MESSAGES, Message
from minisgl_backend.openai.requests.tools import (
    MAX_TOOLS,
    FunctionDefinition,
    FunctionName,
    NamedTool,
    Tool,
    check_name,
)

# A field of the chat -> its name here.
WORDS: Mapping[str, str] = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class AnthropicMessage(Model):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class AnthropicTool(Constraint):
    name: str
    type: str | None = None  # "custom" or none; Anthropic itself runs all other types
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    # Accepted without effect.
    cache_control: dict[str, Any] | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[Any] | None = None
    allowed_callers: list[str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_options(cls, values: Any) -> Any:
        """Tools that Anthropic itself runs are dropped with their options, whatever these are; some have no name."""
        kind = values.get("type") if isinstance(values, dict) else None
        if not isinstance(kind, str) or kind == "custom":
            return values
        return {"type": kind, "name": values.get("name") or kind}

    def as_tool(self) -> Tool:
        definition = FunctionDefinition.model_construct(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return Tool.model_construct(type="function", function=definition)


class ToolChoice(Constraint):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicThinking(Thinking):
    display: str | None = None


class OutputFormat(Constraint):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Model):
    effort: str | None = None  # passed to the chat template, as reasoning_effort
    format: OutputFormat | None = None


class CountTokensRequest(Sampling):
    """The part of a request that determines its prompt."""

    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: str | list[dict[str, Any]] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: AnthropicThinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # its older name
    chat_template_kwargs: dict[str, Any] | None = None
    # Accepted without effect: nothing is stored, and no conversation is shortened.
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    container: str | None = None
    inference_geo: str | None = None
    speed: str | None = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None

    def check(self) -> None:
        """Raises ApiError for errors other than types and those that the chat reports."""
        if self.stop is not None:
            raise invalid("stop", "stop is given; allowed: stop_sequences")
        for name in ("system", "messages", "tools"):
            value = getattr(self, name)
            check_unicode(name, [one.model_dump() for one in value] if name != "system" and value else value)

    def as_chat(self) -> ChatRequest:
        """The equivalent chat. Raises ApiError for what a chat cannot express."""
        values = {name: getattr(self, name) for name in Sampling.model_fields if name not in ("stop", "metadata")}
        tools = self._tools()
        last = self.messages[-1]
        values |= {
            "messages": [Message.model_validate(message) for message in self._messages()],
            "response_format": self._format(),
            "tools": tools or None,
            "tool_choice": self._choice() if tools else None,
            "parallel_tool_calls": not (self.tool_choice and self.tool_choice.disable_parallel_tool_use),
            "reasoning_effort": self.output_config.effort if self.output_config else None,
            "thinking": self.thinking,
            "chat_template_kwargs": self.chat_template_kwargs,
            "continue_final_message": last.role == "assistant" or None,
        }
        return ChatRequest.model_construct(**values)

    @property
    def left_out(self) -> list[str]:
        """Types of tools that this server cannot run."""
        return [tool.type for tool in self.tools or () if tool.type not in (None, "custom")]

    def _tools(self) -> list[Tool]:
        tools = []
        for number, tool in enumerate(self.tools or ()):
            if tool.type in (None, "custom"):
                check_name(tool.name, f"tools[{number}].name")
                tools.append(tool.as_tool())
        if self.tools and not tools:
            raise invalid("tools", f"tools holds {self.left_out[0]:.60}, which this server cannot run; allowed: custom")
        return tools

    def _choice(self) -> str | NamedTool | None:
        choice = self.tool_choice
        if choice is None or choice.type != "tool":
            return None if choice is None else _CHOICES[choice.type]
        if choice.name is None:
            raise invalid("tool_choice", "tool_choice.name is missing; type tool needs it")
        return NamedTool(type="function", function=FunctionName(name=choice.name))

    def _format(self) -> ResponseFormat | None:
        form = self.output_config.format if self.output_config else None
        if (form := form or self.output_format) is None:
            return None
        schema = JsonSchema.model_construct(name=None, schema_=form.schema_, strict=None)
        return ResponseFormat.model_construct(type="json_schema", json_schema=schema)

    def _messages(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if system := system_text(self.system or "", "system"):
            found.append({"role": "system", "content": system})
        for number, message in enumerate(self.messages):
            name = f"messages[{number}].content"
            if message.role == "system":
                if (system := system_text(message.content, name)) or not message.content:
                    found.append({"role": "system", "content": system})
            elif isinstance(message.content, str):
                found.append({"role": message.role, "content": message.content})
            elif message.role == "user":
                found += messages_of_user(message.content, name)
            else:
                found.append(message_of_assistant(message.content, name))
        return found


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None

    def check(self) -> None:
        super().check()
        if not 1 <= self.max_tokens < 2**31:
            raise invalid("max_tokens", f"max_tokens is {self.max_tokens}; allowed: 1 to below 2**31")

    def as_chat(self) -> ChatRequest:
        chat = super().as_chat()
        chat.max_tokens = self.max_tokens
        if self.stop_sequences:
            # Includes the text that ended the answer, so that the response can report which one it was.
            chat.stop, chat.include_stop_str_in_output = self.stop_sequences, True
        return chat
