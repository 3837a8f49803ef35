"""POST /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from minisgl_backend.openai.errors import invalid
from minisgl_backend.openai.requests.base import Generating, Model
from minisgl_backend.openai.requests.messages import MAX_MESSAGES, Message, parts_of
from minisgl_backend.openai.requests.tools import (
    MAX_TOOLS,
    FunctionDefinition,
    NamedTool,
    Tool,
    calls_schema,
    check_name,
    find_function,
)


class AllowedTools(Model):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedToolsChoice(Model):
    """OpenAI's way to offer only some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class Thinking(Model):
    """The form of the switch used by DeepSeek, Z.ai and Anthropic."""

    type: Literal["enabled", "disabled", "auto", "adaptive"]
    budget_tokens: int | None = None


class OpenRouterReasoning(Model):
    effort: str | None = None
    enabled: bool | None = None
    exclude: bool | None = None  # leave the reasoning out of the answer
    max_tokens: int | None = None


class ChatRequest(Generating):
    """A chat: messages, and how to generate and parse the answer."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    verbosity: str | None = None
    # Beyond OpenAI, by vLLM's names.
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None  # of all images
    media_io_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None  # the answer begins with the message that it continues
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    include_reasoning: bool | None = None  # false: reasoning is left out
    # Other services' names for what chat templates call enable_thinking, thinking or reasoning_effort.
    enable_thinking: bool | None = None
    thinking: Thinking | None = None
    reasoning: OpenRouterReasoning | None = None
    separate_reasoning: bool | None = None  # SGLang's: false leaves the reasoning in the content

    @property
    def choice(self) -> str | NamedTool:
        """Which tools may or must be used."""
        if not self.tools:
            return "none"
        if isinstance(self.tool_choice, AllowedToolsChoice):
            return self.tool_choice.allowed_tools.mode
        return "auto" if self.tool_choice is None else self.tool_choice

    @property
    def offered(self) -> Sequence[Tool]:
        """The tools that may be called. Raises ApiError if tool_choice allows one that is not among them."""
        tools = self.tools or ()
        if not isinstance(self.tool_choice, AllowedToolsChoice):
            return tools
        names = [tool.function.name for tool in self.tool_choice.allowed_tools.tools]
        for name in names:
            find_function(tools, name)
        return [tool for tool in tools if tool.function.name in names]

    @property
    def must_call(self) -> bool:
        """Whether a grammar makes the answer a call."""
        return self.choice not in ("none", "auto")

    @property
    def allows_several_calls(self) -> bool:
        return self.parallel_tool_calls is not False and not isinstance(self.choice, NamedTool)

    @property
    def callable_functions(self) -> Sequence[FunctionDefinition]:
        """The functions that the answer may or must call. Raises ApiError if tool_choice names none of them."""
        if isinstance(self.choice, NamedTool):
            return [find_function(self.offered, self.choice.function.name)]
        return [] if self.choice == "none" else [tool.function for tool in self.offered]

    @property
    def separates_reasoning(self) -> bool:
        return self.separate_reasoning is not False and not self.continue_final_message

    @property
    def reasoning_hides_calls(self) -> bool:
        """Whether thoughts that stay in the content have to be known: a call that they quote is none."""
        return self.separate_reasoning is False and bool(self.callable_functions) and not self.continue_final_message

    @property
    def thinking_budget(self) -> int | None:
        named = super().thinking_budget
        if self.thinking_token_budget is not None:
            return named
        if self.reasoning is not None and self.reasoning.max_tokens is not None:
            return self.reasoning.max_tokens
        return self.thinking.budget_tokens if self.thinking else None

    @property
    def drops_reasoning(self) -> bool:
        return self.include_reasoning is False or bool(self.reasoning and self.reasoning.exclude)

    @property
    def echoed(self) -> str:
        """The beginning of the answer: the message that it continues, without its images."""
        last = self.messages[-1]
        if not self.echo or last.role != "assistant":
            return ""
        parts = parts_of(last.content, "messages")
        return parts if isinstance(parts, str) else "\n".join(part for part in parts if isinstance(part, str))

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", f"top_logprobs is {self.top_logprobs}; allowed: only with logprobs=true")
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid(
                "continue_final_message",
                "continue_final_message is true together with add_generation_prompt; allowed: one of them",
            )
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise invalid("tool_choice", "tool_choice is given without tools; allowed: none")
        for number, tool in enumerate(self.tools or ()):
            check_name(tool.function.name, f"tools[{number}].function.name")
        _ = self.offered
        if self.must_call:
            self.tool_schema()
            guided = self._guided()
            # As with OpenAI, a forced call overrides response_format; other constraints contradict it.
            if guided is not None and guided[0] != "response_format":
                reason = "is given together with tool_choice, which constrains the answer, too; allowed: one"
                raise invalid(guided[0], f"{guided[0]} {reason}")

    def switches(self) -> dict[str, Any]:
        """The template arguments that determine how the answer begins."""
        kwargs = {**self._thinking(), **(self.chat_template_kwargs or {})}
        for name in ("add_generation_prompt", "continue_final_message", "reasoning_effort"):
            if (value := getattr(self, name)) is not None:
                kwargs[name] = value
        return kwargs

    def _thinking(self) -> dict[str, Any]:
        """By the templates' names: enable_thinking for Qwen and GLM, thinking for DeepSeek and Granite."""
        switch = self.enable_thinking
        found: dict[str, Any] = {}
        if self.reasoning is not None:
            switch = self.reasoning.enabled if switch is None else switch
            found |= {} if self.reasoning.effort is None else {"reasoning_effort": self.reasoning.effort}
        if self.thinking is not None and self.thinking.type in ("enabled", "disabled"):
            switch = self.thinking.type == "enabled"
        return found if switch is None else {**found, "enable_thinking": switch, "thinking": switch}

    def template_kwargs(self) -> dict[str, Any]:
        """The chat template's arguments other than the messages."""
        kwargs = self.switches()
        if self.documents is not None:
            kwargs["documents"] = self.documents
        if self.tools and self.choice != "none":
            kwargs["tools"] = [tool.model_dump(exclude_none=True) for tool in self.offered]
        return kwargs

    def sampling(self) -> dict[str, Any]:
        values = super().sampling()
        if self.max_completion_tokens is not None:
            values["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            values["logprobs"] = self.top_logprobs or 0
        if self.must_call:
            values["guided_decoding"] = {"json": json.dumps(self.tool_schema())}
        return values

    def names(self) -> dict[str, str]:
        names = super().names()
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if self.must_call:
            names |= dict.fromkeys(("guided_decoding", "guided_decoding_guide"), "tools")
        return {**names, "logprobs": "top_logprobs"}

    def tool_schema(self) -> dict[str, Any]:
        """The JSON schema of an answer with tool_choice `required` (a list of calls) or a name (its arguments)."""
        tools = self.offered
        if isinstance(self.choice, NamedTool):
            return find_function(tools, self.choice.function.name).schema_of_arguments
        return calls_schema(tools, parallel=self.parallel_tool_calls is not False)
