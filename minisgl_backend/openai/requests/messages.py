"""Converts chat messages from clients into the form that chat templates expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.images.parts import Asked, Source, has_images, take_image
from minisgl_backend.openai.errors import ApiError, invalid
from minisgl_backend.openai.image_errors import image_code

MAX_MESSAGES = 10_000

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_MAX_SHOWN = 60


class ImagePart(NamedTuple):
    """A content part of a chat that is an image, with the place where another API's request has it, for errors."""

    place: str
    part: Mapping[str, Any]


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


def parts_of(content: Any, name: str) -> str | list[str | ImagePart]:
    """`text_of`, or texts and images in their order if there are images. Raises ApiError for other parts that are no
    texts."""
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return text_of(content, name)
    places = ((f"{name}[{number}]", part) for number, part in enumerate(content))
    return [
        part if isinstance(part, ImagePart) else ImagePart(place, part) if _is_image(part) else _part_text(part, place)
        for place, part in places
    ]


def content_of(content: Any, name: str, images: list[Source], asked: Asked) -> str | list[dict[str, Any]]:
    """`parts_of` as chat templates take them; the images are appended to `images`. Raises ApiError."""
    parts = parts_of(content, name)
    return parts if isinstance(parts, str) else [_taken(part, images, asked) for part in parts]


def joined(parts: Sequence[str | ImagePart]) -> str | list[str | ImagePart]:
    """The content of a chat's message: one text, lines for parts, if there is no image."""
    texts = [part for part in parts if isinstance(part, str)]
    return "\n".join(texts) if len(texts) == len(parts) else list(parts)


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


def _is_image(part: Any) -> bool:
    return isinstance(part, ImagePart) or has_images([{"content": [part]}], _TEXT_PARTS)


def _taken(part: str | ImagePart, images: list[Source], asked: Asked) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    place, given = part
    try:
        found = take_image(given, place, asked, images)
    except InvalidRequestError as error:
        raise invalid(place.partition("[")[0], str(error), image_code(str(error))) from None
    return found or {"type": "text", "text": _part_text(given, place)}


def _part_text(part: Any, name: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
        kind = part.get("type") if isinstance(part, dict) else part
        raise wrong(f"{name}.type", f"is {shown(kind)}; allowed: text, and image_url where the model sees")
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
