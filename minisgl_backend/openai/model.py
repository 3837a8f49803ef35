"""The model behind the endpoint: its names, and the parsers for its answers."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from minisgl_backend.host.options.endpoint import EndpointSettings
from minisgl_backend.openai.errors import ApiError, invalid
from minisgl_backend.openai.requests.base import Named, Sampling
from minisgl_backend.openai.triton import ModelInfo, TritonServer
from minisgl_backend.parsers.parts import ReasoningParser, ToolParser
from minisgl_backend.parsers.strict import StrictCall, structural_tag
from minisgl_backend.parsers.table import CALLS, REASONING, Format, Functions, find_calls, find_reasoning

_UNKNOWN_SECONDS = 0.5  # after which it is asked again for a name that is not known
_INFO_SECONDS = 10.0  # a remote server may have come back with another model


class ServedModel:
    """Information about the model, requested when needed, since the server may start later."""

    def __init__(self, triton: TritonServer, settings: EndpointSettings) -> None:
        self._triton = triton
        self._settings = settings
        self._info: ModelInfo | None = None
        self._asked_at = 0.0  # time.monotonic()
        self._created = int(time.time())

    async def info(self, max_age_s: float | None = None) -> ModelInfo:
        """At most so old. Raises ApiError if the server has never answered."""
        known, now = self._info, time.monotonic()
        if known is not None and now - self._asked_at < (_INFO_SECONDS if max_age_s is None else max_age_s):
            return known
        self._asked_at = now  # concurrent callers use what is known
        try:
            info = await self._triton.model_info()
        except ApiError:
            if known is None:
                raise
            return known
        if info != known:
            self._info = info
        return info

    def forget(self) -> None:
        """Something of it has changed."""
        self._asked_at = 0.0

    async def names(self) -> Sequence[str]:
        return self._settings.served_model_names or ((await self.info()).model,)

    async def resolve(self, name: str | None) -> str:
        """The model name for answers. Raises ApiError for another model's name."""
        await self._adapter(name)
        return name or (await self.names())[0]

    async def cards(self) -> list[dict[str, Any]]:
        """The entries of /v1/models."""
        info, names = await self.info(_UNKNOWN_SECONDS), await self.names()  # adapters come and go
        roots: list[tuple[str, str, str | None]] = [(name, info.model, None) for name in names]
        roots += [(name, folder, names[0]) for name, folder in info.adapters.items() if name not in names]
        return [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "minisgl-backend",
                "root": root,
                "parent": parent,
                "max_model_len": info.max_model_len,
                **({} if parent is None else {"state": info.adapter_states.get(name, "disk")}),
            }
            for name, root, parent in roots
        ]

    async def card(self, name: str) -> dict[str, Any]:
        """Raises ApiError for another model's name."""
        adapter, cards = await self._adapter(name), await self.cards()
        found = next((card for card in cards if card["id"] in (name, adapter)), None)
        return found or await self._refuse(name)

    async def adapter_fields(self, body: Named) -> dict[str, str]:
        """The field of a request whose model is an adapter. Raises ApiError for another model's name: the adapter may
        have been unloaded since `resolve` passed, and the model without it would give another answer."""
        adapter = await self._adapter(body.model) or body.lora_path
        return {"lora_name": adapter} if adapter else {}

    async def _adapters(self, max_age_s: float | None = None) -> Mapping[str, str]:
        """Their folders by name; none of a server that does not answer, where no name is served."""
        try:
            return (await self.info(max_age_s)).adapters
        except ApiError:
            return {}

    async def _adapter(self, name: str | None) -> str:
        """The adapter that a model's name stands for: its own, or behind the model's (`base:adapter`, as in SGLang).
        "": the model itself. Raises ApiError for another model's name."""
        names = await self.names()
        if name is None or name in names:
            return ""
        base, _, behind = name.rpartition(":")
        for max_age_s in (None, _UNKNOWN_SECONDS):  # it may have been loaded just now
            adapters = await self._adapters(max_age_s)
            if name in adapters:
                return name
            if behind in adapters and base in names:
                return behind
        return await self._refuse(name)

    async def _refuse(self, name: str) -> NoReturn:
        allowed = ", ".join((*await self.names(), *await self._adapters()))
        message = f"model is {name[:200]!r}, which is not served here; allowed: {allowed}"
        raise ApiError(404, message, param="model", code="model_not_found")

    async def answer_format(
        self,
        functions: Functions | None,
        *,
        reasoning: bool,
        is_guided: bool,
        forced: bool = False,
        apart: bool = True,
    ) -> AnswerFormat:
        """How to parse an answer. Raises ApiError if the format of the model's calls is unknown.

        `functions`: those that the model may call, if any; `reasoning`: whether to tell the reasoning from the rest,
        `apart`: and to say it apart; `is_guided`: a grammar applies from the first token on, so the answer cannot
        continue reasoning that the prompt opened.
        `forced`: one of the functions must be called, in the model's own format if a grammar can enforce any schema
        there.
        """
        calls = None if functions is None else await self._calls(forced=forced)
        row = await self._reasoning() if reasoning else None
        if row is not None and row.both is not None and not apart:
            row = None  # its parser of calls knows reasoning
        if calls is None:
            return AnswerFormat(None, row, functions or {}, is_guided=is_guided, apart=apart)
        info = await self.info()
        strict = calls.strict_form(info.chat_template, info.added_tokens)
        if forced and not (strict is not None and strict.keeps_schemas):
            return AnswerFormat(None, row, functions or {}, is_guided=is_guided, apart=apart)
        return AnswerFormat(calls, row, functions or {}, strict, is_guided=is_guided, apart=apart)

    async def options(self, body: Sampling) -> dict[str, Any]:
        """Sampling options of a request that names an adapter or limits the reasoning.

        For models without known reasoning, budgets of APIs that treat them as hints have no effect and are dropped.
        """
        budget, adapter = body.thinking_budget, await self.adapter_fields(body)
        if budget is None or (body.thinking_token_budget is None and await self._reasoning() is None):
            return adapter
        return {**adapter, "thinking_token_budget": budget, "reasoning_parser": self._settings.reasoning_parser}

    async def _calls(self, *, forced: bool) -> Format | None:
        kind = self._settings.tool_call_parser
        info = await self.info()
        found = find_calls(info.chat_template, info.added_tokens) if kind == "auto" else CALLS.get(kind)
        if found is None and not forced:
            raise invalid(
                "tools",
                "tools: it is not known how this model writes tool calls (--tool-call-parser says it); allowed: "
                "tool_choice required or a function's name",
            )
        return found

    async def _reasoning(self) -> Format | None:
        kind = self._settings.reasoning_parser
        if kind != "auto":
            return REASONING.get(kind)
        info = await self.info()
        return find_reasoning(info.chat_template, info.added_tokens)


class AnswerFormat:
    """The formats of one request's answer."""

    def __init__(
        self,
        calls: Format | None,
        reasoning: Format | None,
        functions: Functions,
        strict: StrictCall | None = None,
        *,
        is_guided: bool,
        apart: bool = True,
    ) -> None:
        self.apart = apart  # reasoning is told apart from the content
        self._calls = calls
        self._strict = strict
        self._reasoning = reasoning
        self._functions = functions
        self._is_guided = is_guided

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the text must include special tokens, which are the format's tags."""
        return any(row is not None and row.special for row in (self._calls, self._reasoning))

    @property
    def depends_on_prompt(self) -> bool:
        """Whether the prompt determines how the answer begins."""
        row = self._reasoning
        is_known = row is None or row.tags is None or (row.always_thinks and self.apart)
        return not is_known and not self._is_guided

    @property
    def makes_calls(self) -> bool:
        """Whether a grammar can write calls in the format."""
        return self._strict is not None

    def grammar(self, strict: Collection[str]) -> dict[str, Any] | None:
        """xgrammar's structural tag that enforces the schemas of these functions; None: the format has none."""
        if self._strict is None or not strict:
            return None
        return structural_tag(self._strict, {n: (schema, n in strict) for n, schema in self._functions.items()})

    def forced_grammar(self, *, parallel: bool) -> dict[str, Any] | None:
        """The same for an answer that must consist of calls of its functions; None: they are JSON in another form."""
        if self._strict is None:
            return None
        kept = {name: (schema, True) for name, schema in self._functions.items()}
        return structural_tag(self._strict, kept, forced=True, parallel=parallel)

    def new_reasoning(self, prompt_tail: str) -> ReasoningParser | None:
        """A parser for one choice; None for a model without reasoning. `prompt_tail`: the prompt's end."""
        row = self._reasoning
        if row is None:
            return None
        if row.both is not None:
            return row.new_both(self._functions)
        opens = row.opens(prompt_tail) if self.apart else row.is_opened_by(prompt_tail)
        return row.new_reasoning(inside=opens and not self._is_guided, apart=self.apart)

    def new_calls(self) -> ToolParser | None:
        """A parser for one choice; None if there can be no calls, or the parser of the reasoning finds them."""
        row = self._calls
        if row is None or (self._reasoning is not None and self._reasoning.both is not None):
            return None
        return row.new_calls(self._functions)
