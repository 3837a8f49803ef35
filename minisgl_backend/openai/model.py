"""The model behind the endpoint: its names, and which parsers take its answers apart."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minisgl_backend.host.openai_endpoint import EndpointSettings
from minisgl_backend.openai.errors import ApiError, invalid
from minisgl_backend.openai.triton import ModelInfo, Prompt, TritonServer
from minisgl_backend.parsers.qwen_coder import QwenCoderParser
from minisgl_backend.parsers.reasoning import CLOSE, OPEN, ReasoningParser
from minisgl_backend.parsers.tool_calls import HermesParser, LlamaParser, ToolParser

_TOOL_PARSERS: Mapping[str, Callable[[Mapping[str, Mapping[str, Any]]], ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": LlamaParser,
    "qwen3_coder": QwenCoderParser,
}
_PROBE = ({"role": "user", "content": "x"},)
_MAX_PROBES = 256
_INFO_SECONDS = 10.0  # a server elsewhere may have come back with another model
_ARGUMENTS = re.compile(r"[\"']arguments[\"']|\barguments\b")


class ServedModel:
    """What is known of the model; asked for when it is needed, since the server may start later."""

    def __init__(self, triton: TritonServer, settings: EndpointSettings) -> None:
        self._triton = triton
        self._settings = settings
        self._info: ModelInfo | None = None
        self._asked_at = 0.0  # time.monotonic()
        self._created = int(time.time())
        self._opens_thoughts: dict[bytes, bool] = {}  # by the digest of the chat template's arguments

    async def info(self) -> ModelInfo:
        """Raises ApiError where the server has never answered."""
        known, now = self._info, time.monotonic()
        if known is not None and now - self._asked_at < _INFO_SECONDS:
            return known
        self._asked_at = now  # who comes meanwhile takes what is known
        try:
            info = await self._triton.model_info()
        except ApiError:
            if known is None:
                raise
            return known
        if info != known:
            self._info = info
            self._opens_thoughts.clear()
        return info

    async def names(self) -> Sequence[str]:
        return self._settings.served_model_names or ((await self.info()).model,)

    async def resolve(self, name: str | None) -> str:
        """The name that answers carry. Raises ApiError for another model's."""
        names = await self.names()
        if name is None or name in names:
            return name or names[0]
        allowed = ", ".join(names)
        message = f"model is {name[:200]!r}, which is not served here; allowed: {allowed}"
        raise ApiError(404, message, param="model", code="model_not_found")

    async def cards(self) -> list[dict[str, Any]]:
        """As /v1/models lists them."""
        info = await self.info()
        return [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "minisgl-backend",
                "root": info.model,
                "parent": None,
                "max_model_len": info.max_model_len,
            }
            for name in await self.names()
        ]

    async def tool_parser(self, functions: Mapping[str, Mapping[str, Any]]) -> Callable[[], ToolParser]:
        """Makes a parser for each choice. Raises ApiError where the format of the model's calls is not known.

        `functions`: name -> JSON schema of the arguments.
        """
        kind = self._settings.tool_call_parser
        if kind == "auto":
            kind = tool_format(await self.info())
        if kind == "none":
            raise invalid(
                "tools",
                "tools: it is not known how this model writes tool calls (--tool-call-parser says it); allowed: "
                "tool_choice required or a function's name",
            )
        parser = _TOOL_PARSERS[kind]
        return lambda: parser(functions)

    async def reasoning_parser(
        self, template_kwargs: Mapping[str, Any], *, is_guided: bool
    ) -> Callable[[], ReasoningParser] | None:
        """Makes a parser for each choice; None for a model that writes no thoughts.

        `is_guided`: a grammar holds from the first token on, so that the answer is no thought that was begun before.
        """
        kind = self._settings.reasoning_parser
        if kind == "auto":
            kind = "qwen3" if writes_thoughts(await self.info()) else "none"
        if kind == "none":
            return None
        opened = kind == "deepseek_r1" or await self._prompt_opens_thoughts(template_kwargs)
        inside = opened and not is_guided
        return lambda: ReasoningParser(inside=inside)

    async def _prompt_opens_thoughts(self, template_kwargs: Mapping[str, Any]) -> bool:
        """Whether the chat template ends with `<think>`, as some do, or only with certain arguments."""
        key = hashlib.sha256(json.dumps(template_kwargs, sort_keys=True).encode()).digest()  # they may be megabytes
        if key not in self._opens_thoughts:
            prompt = Prompt(messages=_PROBE, template_kwargs=template_kwargs)
            names = {"messages": "chat_template_kwargs"}
            found = await self._triton.tokenize(prompt, ["prompt_text"], names)
            text = found["prompt_text"][0].decode("utf-8", "replace")
            if len(self._opens_thoughts) >= _MAX_PROBES:
                self._opens_thoughts.clear()
            self._opens_thoughts[key] = text.rfind(OPEN) > text.rfind(CLOSE)
        return self._opens_thoughts[key]


def tool_format(info: ModelInfo) -> str:
    """The format that the chat template shows beyond doubt, else `none`."""
    template = info.chat_template
    if "<tool_call>" in template and "<function=" in template and "<parameter=" in template:
        return "qwen3_coder"
    if "<tool_call>" in template and "<function=" not in template and _ARGUMENTS.search(template):
        return "hermes"
    if "<|python_tag|>" in info.added_tokens and '"parameters"' in template:
        return "llama3_json"
    return "none"


def writes_thoughts(info: ModelInfo) -> bool:
    """Whether template or vocabulary know the end of thoughts."""
    return CLOSE in info.chat_template or CLOSE in info.added_tokens
