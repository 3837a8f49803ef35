"""Chat messages -> the prompt made by the model's own chat template, ready for the assistant's turn."""

from __future__ import annotations

import bisect
import contextlib
import logging
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
from transformers.utils import chat_template_utils

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.remote_errors import NO_CHAT_TEMPLATE
from minisgl_backend.text.chat import (
    arguments_as_text,
    as_parts,
    calls_without_content,
    developer_as_system,
    plain_messages,
    short_call_ids,
    shown,
)
from minisgl_backend.text.turns import orders

log = logging.getLogger(__name__)

# Missing before transformers 4.53, whose apply_chat_template keeps null values.
_render_template: Any = getattr(chat_template_utils, "render_jinja_template", None)

# Arguments of apply_chat_template that only the server sets; a client's template would be foreign code.
_OWN_ARGUMENTS = frozenset(
    {"self", "conversation", "messages", "chat_template", "tokenize", "padding", "truncation", "max_length"}
    | {"return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)
_REFUSALS = (jinja2.TemplateError, ValueError, TypeError, KeyError, AttributeError, IndexError)
_ASKS_FOR_NO_CONTENT = re.compile(r"content['\"]?\]? is none")  # DeepSeek-R1's first: calls only with null content
_ASKS_FOR_PARTS = re.compile(r"\btype\b")
_ASKS_FOR_SHORT_IDS = re.compile(r"length *!= *9\b")  # Mistral's
_PROBE = "probe_of_calls"
_A_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": _PROBE, "arguments": "{}"}}
_PROBED = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [_A_CALL]})


class ChatTemplate:
    """One tokenizer's template, in transformers' sandbox.

    Templates expect different forms of the same history: a call's arguments as an object or as JSON text, null or empty
    content in messages with calls, ids of nine letters. Each template gets the form that it can render. Only where it
    refuses the order of the messages, system messages and those of one role are joined.
    """

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: one of transformers."""
        self._tokenizer = tokenizer
        self._has_warned = False  # of system messages that are left out

    def __bool__(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @cached_property
    def source(self) -> str:
        """The template's source; several are concatenated; "" if there is none."""
        template = self._tokenizer.chat_template or ""
        return "\n".join(template.values()) if isinstance(template, dict) else str(template)

    def render(self, messages: Sequence[Mapping[str, Any]], arguments: dict[str, Any], *, images: bool = False) -> str:
        """`arguments` are passed to the template (tools, enable_thinking ...), with `images` also content parts that
        stand for one. Raises InvalidRequestError."""
        if not self:
            raise InvalidRequestError(
                f"messages: {NO_CHAT_TEMPLATE} and goes on with a text: /v1/completions, text_input, `minisgl generate`"
            )
        for name in arguments:
            if name in _OWN_ARGUMENTS:
                raise InvalidRequestError(f"chat_template_kwargs has {name!r}; allowed: the template's own arguments")
        arguments.setdefault("add_generation_prompt", not arguments.get("continue_final_message"))
        plain = plain_messages(messages, images=images)
        formed = self._formed(plain)
        try:
            prompt = self._in_either_form(formed, arguments)
            self._warn_of_lost(formed, prompt)
            return prompt
        except RecursionError:
            raise InvalidRequestError(
                "chat_template_kwargs or messages are nested too deeply for the chat template; allowed: fewer levels"
            ) from None
        except _REFUSALS as error:
            refused = error
        for order in orders(formed):
            with contextlib.suppress(*_REFUSALS):
                return self._in_either_form(order, arguments)
        place = self._place(plain, arguments, str(refused))
        raise InvalidRequestError(f"messages: the chat template refuses them: {refused}{place}") from None

    def _warn_of_lost(self, messages: Sequence[Mapping[str, Any]], prompt: str) -> None:
        """Some templates show the model no system message but the first, or the last, and say nothing."""
        if self._has_warned:
            return
        systems = [message["content"] for message in messages if message["role"] in ("system", "developer")]
        texts = [part["text"].strip() for content in systems for part in as_parts(content) if "text" in part]
        if len(texts) > 1 or (texts and messages[0]["role"] not in ("system", "developer")):
            self._has_warned = any(text not in prompt for text in texts)
            if self._has_warned:
                log.warning(
                    "the chat template leaves out some of a request's system messages; the model never sees them"
                )

    def _formed(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with roles, ids and contents as the template wants them."""
        developers = any(message["role"] == "developer" for message in messages)
        if developers and not self._shows_developers[messages[0]["role"] == "system"]:
            messages = developer_as_system(messages)
        if any("tool_calls" in message for message in messages):
            if _ASKS_FOR_SHORT_IDS.search(self.source):
                messages = short_call_ids(messages)
            if self._wants_calls_without_content:
                messages = calls_without_content(messages)
        return messages

    def _place(self, messages: list[dict[str, Any]], arguments: dict[str, Any], reason: str) -> str:
        """Which message is refused, for the error: the last one of the shortest beginning that is refused for this
        reason. "" if a plain question is, too."""
        arguments = {name: value for name, value in arguments.items() if name != "continue_final_message"}

        def is_refused(some: list[dict[str, Any]]) -> bool:
            try:
                self._in_either_form(self._formed(some), arguments)
            except _REFUSALS as error:
                return str(error) == reason
            return False

        if is_refused(plain_messages(_PROBED[:1])) or not is_refused(messages):
            return ""
        fewest = bisect.bisect_left(range(1, len(messages)), True, key=lambda count: is_refused(messages[:count])) + 1
        culprit = messages[fewest - 1]
        return f" (messages[{fewest - 1}], of role {shown(culprit['role'])}: {shown(culprit['content'])})"

    @cached_property
    def _shows_developers(self) -> tuple[bool, bool]:
        """Whether the template knows that role, and renders it at the beginning, and behind the system's message. Some
        name the role and drop or refuse its messages."""
        if "developer" not in self.source:
            return False, False
        developer = {"role": "developer", "content": _PROBE}
        begins = ([developer], [{"role": "system", "content": "x"}, developer])
        first, second = (self._renders_probe([*begin, _PROBED[0]]) for begin in begins)
        return first, second

    def _renders_probe(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        try:
            return _PROBE in self._in_either_form(plain_messages(messages), {})
        except _REFUSALS:
            return False

    @cached_property
    def _wants_calls_without_content(self) -> bool:
        """Whether the template drops a call if the message's content is an empty text."""
        if not _ASKS_FOR_NO_CONTENT.search(self.source):
            return False
        try:
            return _PROBE not in self._in_either_form(plain_messages(_PROBED), {})
        except _REFUSALS:
            return False

    def _in_either_form(self, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
        """Renders calls' arguments as objects, or as texts if the template cannot concatenate an object with a text."""
        try:
            return self._apply(messages, arguments)
        except TypeError:
            as_text = arguments_as_text(messages)
            if as_text == messages:
                raise
            return self._apply(as_text, arguments)

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the template shows a content only as a list of parts, as some of models that see do."""
        if not _ASKS_FOR_PARTS.search(self.source):
            return False
        return self._shows([{"type": "text", "text": _PROBE}]) and not self._shows(_PROBE)

    def _shows(self, content: Any) -> bool:
        messages = [{"role": "user", "content": content}]
        try:
            return _PROBE in str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        except _REFUSALS:
            return False

    def _apply(self, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
        if self._wants_parts:
            messages = [
                message if message["content"] is None else {**message, "content": as_parts(message["content"])}
                for message in messages
            ]
        if _render_template is None or all(message["content"] is not None for message in messages):
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **arguments))
        # apply_chat_template drops null values, which makes a difference to templates that test for them.
        template = self._tokenizer.get_chat_template(None, arguments.get("tools"))
        known = {**self._tokenizer.special_tokens_map, **arguments}
        rendered, _ = _render_template(conversations=[messages], chat_template=template, **known)
        return str(rendered[0])
