"""POST /tokenize and /detokenize, as in vLLM."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from minisgl_backend.openai.errors import invalid
from minisgl_backend.openai.requests.base import Model, TokenIds
from minisgl_backend.openai.requests.messages import MAX_MESSAGES, Message
from minisgl_backend.openai.requests.tools import MAX_TOOLS, Tool


class TokenizeRequest(Model):
    """POST /tokenize: a prompt, or messages to be rendered by the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None  # of all images
    media_io_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "prompt and messages: allowed: exactly one of them")

    def template_kwargs(self) -> dict[str, Any]:
        kwargs = dict(self.chat_template_kwargs or {})
        for name in ("add_generation_prompt", "continue_final_message"):
            if (value := getattr(self, name)) is not None:
                kwargs[name] = value
        if self.tools:
            kwargs["tools"] = [tool.model_dump(exclude_none=True) for tool in self.tools]
        return kwargs


class DetokenizeRequest(Model):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
