"""Chat messages as clients send them -> as every chat template takes them: the content of each is a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minisgl_backend.errors import InvalidRequestError

MAX_SHOWN = 60  # characters of a wrong value that a message repeats


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with OpenAI's content parts joined by newlines, as vLLM joins them for templates that take texts.

    Other keys (name, tool_calls ...) stay as they are. Raises InvalidRequestError naming message, part and type.
    """
    return [_plain(f"messages[{number}]", message) for number, message in enumerate(messages)]


def developer_as_system(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For templates that do not know OpenAI's newer name of the system's role, most of which drop it without a word.

    Behind a system's message at the beginning its content is added to that: some templates refuse a second one.
    """
    found: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "developer":
            found.append(dict(message))
        elif len(found) == 1 and found[0]["role"] == "system":
            found[0]["content"] = "\n\n".join(filter(None, (found[0]["content"], message["content"])))
        else:
            found.append({**message, "role": "system"})
    return found


def _plain(name: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"{name} is {_shown(message)}; allowed: an object with role and content")
    content = message.get("content", "")
    if isinstance(content, (list, tuple)):
        parts = [_text_of(f"{name}.content[{number}]", part) for number, part in enumerate(content)]
        return {**message, "content": "\n".join(parts)}
    if content is not None and not isinstance(content, str):
        raise InvalidRequestError(f"{name}.content is {_shown(content)}; allowed: a text, or a list of text parts")
    # Templates read the content; OpenAI lets a message go without, as that of an assistant that calls tools.
    return {**message, "content": content}


def _text_of(name: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise InvalidRequestError(f"{name} is {_shown(part)}; allowed: an object with type and text")
    if part["type"] != "text":
        raise InvalidRequestError(f"{name} has type {_shown(part['type'])}, which is not served; allowed: 'text'")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{name}.text is {_shown(text)}; allowed: a text")
    return text


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"
