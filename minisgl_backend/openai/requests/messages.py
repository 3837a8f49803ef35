"""Converts chat messages from clients into the form that chat templates expect."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.images.parts import Asked, Source, has_images, take_image
from minisgl_backend.openai.errors import ApiError, invalid

MAX_MESSAGES = 10_000

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_MAX_SHOWN = 60


class Message(BaseModel):
    """Role and content, and any other fields that the chat template reads."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: Any = None

    def for_template(
        self, number: int, images: list[Source] | None = None, asked: Asked | None = None
    ) -> dict[str, Any]:
        """The content as one text, or as parts if there are images; calls are validated. The tokenizer converts them to
        the form of its template. The message's images are appended to `images`.

        Raises ApiError.
        """
        name = f"messages[{number}]"
        content = content_of(self.content, f"{name}.content", [] if images is None else images, asked or Asked())
        message = {**(self.model_extra or {}), "role": self.role, "content": content}
        calls = message.pop("tool_calls", None)
        if calls is not None:
            message["tool_calls"] = _checked_calls(calls, f"{name}.tool_calls")
        return message


def text_of(content: Any, name: str) -> str:
    """A message's content, a text or a list of parts, as one text. Raises ApiError that refers to it as `name`."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(name, f"is {shown(content)}; allowed: a text or a list of parts")
    return "\n".join(_part_text(part, f"{name}[{number}]") for number, part in enumerate(content))


def content_of(content: Any, name: str, images: list[Source], asked: Asked) -> str | list[dict[str, Any]]:
    """`text_of`, or the parts in their order if there are images among them, which are appended to `images`. Raises
    ApiError."""
    if not isinstance(content, list) or not has_images([{"content": content}], _TEXT_PARTS):
        return text_of(content, name)
    parts: list[dict[str, Any]] = []
    for number, part in enumerate(content):
        place = f"{name}[{number}]"
        try:
            found = take_image(part, place, asked, images)
        except InvalidRequestError as error:
            raise invalid("messages", str(error)) from None
        if found is None:
            found = {"type": "text", "text": _part_text(part, place)}
        parts.append(found)
    return parts


def text_at(item: dict[str, Any], key: str, name: str) -> str:
    """The text that the item called `name` must have there. Raises ApiError."""
    value = item.get(key)
    if not isinstance(value, str):
        raise wrong(f"{name}.{key}", f"is {shown(value)}; allowed: a text")
    return value


def wrong(name: str, reason: str) -> ApiError:
    """The error for a nested value: `messages[3].content` belongs to the field `messages`."""
    return invalid(name.partition("[")[0], f"{name} {reason}")


def shown(value: Any) -> str:
    """A wrong value as quoted in an error message."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _part_text(part: Any, name: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
        kind = part.get("type") if isinstance(part, dict) else part
        raise wrong(f"{name}.type", f"is {shown(kind)}; allowed: text (this server has no other inputs)")
    text = part.get("text", part.get("refusal"))
    if not isinstance(text, str):
        raise wrong(f"{name}.text", f"is {shown(text)}; allowed: a text")
    return text


def _checked_calls(calls: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise wrong(name, f"is {shown(calls)}; allowed: a list")
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise wrong(f"{name}[{number}].function.name", "is missing; allowed: a function's name")
    return calls
