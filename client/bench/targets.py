"""The servers that a benchmark can use: Triton's ensemble, or any server with OpenAI's API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..client import AsyncClient
from ..connection import parse_url
from ..openai_client import AsyncOpenAIClient, OpenAIServer
from ..request import question_of
from ..stream import AsyncTextStream

StreamClient = AsyncClient | AsyncOpenAIClient


@dataclass(frozen=True)
class Target:
    """A server, one of its models, and how to send requests."""

    kind: str  # "triton" or "openai"
    url: str
    model: str
    chat: bool  # prompts are sent as a user's message, through the model's chat template
    options: dict[str, Any]  # of every request, in addition to its length
    connect: Callable[[], StreamClient] = field(repr=False)  # to be called inside the running loop

    def ask(self, client: StreamClient, prompt: str, max_tokens: int, images: Sequence[str] = ()) -> AsyncTextStream:
        """Sends one request. images: data URLs, of a chat."""
        options: Any = {**self.options, "max_tokens": max_tokens}
        if self.chat:
            return client.stream(messages=[question_of(prompt, images)], **options)
        return client.stream(prompt, **options)


def triton_target(url: str | None, model: str, chat: bool, timeout: float, options: dict[str, Any]) -> Target:
    """The ensemble of a Triton server, over gRPC or (if the URL says so) HTTP. Raises ValueError."""
    address = parse_url(url, None)
    if not chat:
        options = {"apply_chat_template": False, **options}

    def connect() -> StreamClient:
        return AsyncClient(url, None, model, timeout=timeout)

    return Target("triton", f"{address.protocol}://{address.authority}", model, chat, options, connect)


def openai_target(
    url: str, api_key: str | None, model: str | None, chat: bool, timeout: float, options: dict[str, Any]
) -> Target:
    """A server with OpenAI's API; without `model` its first one. Raises ValueError and ClientError."""
    server = OpenAIServer.parse(url, api_key)
    chosen = server.choose_model(model)

    def connect() -> StreamClient:
        return AsyncOpenAIClient(server, chosen, timeout=timeout)

    return Target("openai", f"{server.base_url}{server.path}", chosen, chat, options, connect)
