"""Converts chat messages from clients into the forms that chat templates accept."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from minisgl_backend.errors import InvalidRequestError

IMAGE = {"type": "image"}  # a content part as templates read it
MAX_SHOWN = 60  # characters of a wrong value that an error message quotes


def plain_messages(messages: Sequence[Mapping[str, Any]], *, images: bool = False) -> list[dict[str, Any]]:
    """The messages in the form that nearly every template accepts.

    The content is a text, "" if there is none: OpenAI's content parts are joined by newlines, as in vLLM. With `images`
    and parts of type image it is a list of parts, as templates of models that see take it: in order, texts as they are.
    `tool_calls` is present only if there are calls; arguments are objects, {} if there are none. Other null values are
    removed; other keys stay as they are. Raises InvalidRequestError naming message, part and type.
    """
    return [_plain(f"messages[{number}]", message, images) for number, message in enumerate(messages)]


def developer_as_system(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For templates that do not know OpenAI's newer name of the system role; most of them silently drop such messages.

    After an initial system message its content is appended to that one: some templates refuse a second system message.
    """
    found: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "developer":
            found.append(dict(message))
        elif len(found) == 1 and found[0]["role"] == "system":
            found[0]["content"] = joined([found[0]["content"], message["content"]])
        else:
            found.append({**message, "role": "system"})
    return found


def arguments_as_text(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Encodes the arguments of calls as JSON texts, as in OpenAI's API."""

    def text(call: Mapping[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    return [_with_calls(message, [text(call) for call in message.get("tool_calls", ())]) for message in messages]


def calls_without_content(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Sets the content of messages with calls to null; their text becomes a separate message before them."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if "tool_calls" not in message:
            found.append(dict(message))
            continue
        if message["content"]:
            found.append({key: value for key, value in message.items() if key != "tool_calls"})
        found.append({**message, "content": None})
    return found


def short_call_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Replaces call ids, perhaps from another server, by nine letters and digits; equal ids stay equal."""

    def short(value: Any) -> Any:
        if not isinstance(value, str) or (len(value) == 9 and value.isascii() and value.isalnum()):
            return value
        return hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()[:9]

    found = []
    for message in messages:
        calls = [{**call, "id": short(call["id"])} if "id" in call else call for call in message.get("tool_calls", ())]
        answered = {"tool_call_id": short(message["tool_call_id"])} if "tool_call_id" in message else {}
        found.append({**_with_calls(message, calls), **answered})
    return found


def _with_calls(message: Mapping[str, Any], calls: list[dict[str, Any]]) -> dict[str, Any]:
    return {**message, "tool_calls": calls} if calls else dict(message)


def _plain(name: str, message: Any, images: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"{name} is {shown(message)}; allowed: an object with role and content")
    found = {key: value for key, value in message.items() if value is not None}
    calls = found.pop("tool_calls", None)
    if calls:
        found["tool_calls"] = _calls(f"{name}.tool_calls", calls)
    if "reasoning" in found:  # vLLM's name; templates read the other one
        found.setdefault("reasoning_content", found.pop("reasoning"))
    content = found.get("content", "")
    if isinstance(content, (list, tuple)):
        parts = [_part(f"{name}.content[{number}]", part, images) for number, part in enumerate(content)]
        if any(part == IMAGE for part in parts):
            return {**found, "content": parts}
        content = "\n".join(part["text"] for part in parts)
    if not isinstance(content, str):
        raise InvalidRequestError(f"{name}.content is {shown(content)}; allowed: a text, or a list of text parts")
    return {**found, "content": content}


def _calls(name: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, (list, tuple)):
        raise InvalidRequestError(f"{name} is {shown(calls)}; allowed: a list of calls")
    found = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(f"{name}[{number}] is {shown(call)}; allowed: an object with function.name")
        found.append({**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}})
    return found


def _arguments(arguments: Any) -> Any:
    """Decodes arguments that are a JSON object; others go back to the model as it wrote them."""
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
    return {} if arguments is None else arguments


def _part(name: str, part: Any, images: bool) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if images and isinstance(part, Mapping) and part.get("type") == "image":
        return IMAGE
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise InvalidRequestError(f"{name} is {shown(part)}; allowed: an object with type and text")
    if part["type"] != "text":
        raise InvalidRequestError(f"{name} has type {shown(part['type'])}, which is not served; allowed: 'text'")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{name}.text is {shown(text)}; allowed: a text")
    return {"type": "text", "text": text}


def as_parts(content: Any) -> list[dict[str, str]]:
    """A content of `plain_messages` as a list; no parts for none."""
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def joined(contents: Sequence[Any]) -> Any:
    """Contents of `plain_messages` one after the other, a blank line between texts; empty ones are left out."""
    given = [content for content in contents if content]
    if all(isinstance(content, str) for content in given):
        return "\n\n".join(given)
    parts: list[dict[str, str]] = []
    for content in map(as_parts, given):
        if parts and "text" in parts[-1] and "text" in content[0]:
            parts[-1] = {"type": "text", "text": f"{parts[-1]['text']}\n\n{content[0]['text']}"}
            content = content[1:]
        parts += content
    return parts


def shown(value: Any) -> str:
    """A wrong value as quoted in an error message."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"
