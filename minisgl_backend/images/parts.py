"""Image parts of chat messages: taken out of a body as bytes, which then travel beside it. Refusals by part and reason.

Needs the standard library alone: the endpoint does it before anything else is known of the model.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote_to_bytes

from minisgl_backend.errors import InvalidRequestError

WHITE = (255, 255, 255)
MAX_FILE_BYTES = 20 << 20
MAX_IMAGES = 100  # of a request, whatever the server allows
DETAILS = ("auto", "low", "high", "original")
# Kinds of parts that are known elsewhere, and why they are not served.
REFUSED = {
    "video_url": "this server has no video; send single frames as images",
    "video": "this server has no video; send single frames as images",
    "input_audio": "this server has no audio",
    "audio_url": "this server has no audio",
    "audio": "this server has no audio",
    "image_embeds": "vectors of clients are not taken; send the image",
    "image_pil": "it exists only in the process of `LLM`; send a data URL",
    "input_file": "files are not read; render their pages to images",
    "file": "files are not read; render their pages to images",
    "document": "documents are not read; render their pages to images",
}
IMAGE = {"type": "image"}  # what stands for one in messages
IMAGE_KINDS = ("image_url", "input_image", "image")
_PART_KEYS = {"type", "image_url", "file_id", "detail", "uuid", "cache_control"}
_URL_KEYS = {"url", "detail", "format"}
_BLANKS, _PIECE, _MAX_SALT, _MAX_SHOWN = b" \t\r\n\f\v", 1 << 20, 1024, 60
_DATA = re.compile(r"data:([^,]*),", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """One image as a client gave it, with what was asked for it."""

    name: str  # of the part, for errors
    data: bytes = field(default=b"", repr=False)
    url: str = field(default="", repr=False)  # instead of data: where they are
    file_id: str = ""  # or these: of a file that was uploaded
    raw: tuple[int, int] | None = None  # width and height of data that are RGB pixels already
    turn: int = 1  # of these, as EXIF says it
    low_detail: bool = False
    background: tuple[int, int, int] = WHITE  # behind transparency
    options: Mapping[str, Any] = field(default_factory=dict)  # mm_processor_kwargs
    salt: str = ""  # a client's own id of it

    def part(self, index: int) -> dict[str, Any]:
        """The content part that stands for it on the way to the tokenizer, which gets the bytes beside the messages."""
        asked = {"low": self.low_detail, "background": self.background, "options": self.options, "salt": self.salt}
        return {"type": "image", "index": index, "name": self.name, **asked}


@dataclass(frozen=True)
class Asked:
    """What a request asks for all of its images."""

    background: tuple[int, int, int] = WHITE
    options: Mapping[str, Any] = field(default_factory=dict)


def asked_of_all(processor_options: Any, io_options: Any) -> Asked:
    """vLLM's `mm_processor_kwargs`, which the model's family checks, and `media_io_kwargs`. Raises
    InvalidRequestError."""
    if processor_options is not None and not isinstance(processor_options, Mapping):
        raise InvalidRequestError(f"mm_processor_kwargs is {_shown(processor_options)}; allowed: an object")
    return Asked(_background(io_options), dict(processor_options or {}))


def has_images(messages: Sequence[Any], texts: Sequence[str] = ("text",)) -> bool:
    """Whether any message has a part that is no text. Cheap for texts. `texts`: types of parts that are."""
    return any(
        isinstance(part, Mapping) and _kind(part) not in texts
        for message in messages
        if isinstance(message, Mapping) and isinstance(message.get("content"), (list, tuple))
        for part in message["content"]
    )


def take_images(
    messages: Sequence[Any], asked: Asked | None = None, name: str = "messages"
) -> tuple[list[Any], list[Source]]:
    """The messages with {"type": "image"} in place of each image, and the images in their order, not loaded.

    Parts of other kinds stay as they are. Raises InvalidRequestError naming message, part and reason.
    """
    sources: list[Source] = []
    found = []
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, (list, tuple)):
            kept = []
            for index, part in enumerate(content):
                taken = take_image(part, f"{name}[{number}].content[{index}]", asked or Asked(), sources)
                kept.append(part if taken is None else IMAGE)
            message = {**message, "content": kept}
        found.append(message)
    return found, sources


def check_number(sources: Sequence[Source], max_images: int) -> None:
    """Raises InvalidRequestError where a request has more."""
    check_count(len(sources), max_images, lambda at: sources[at].name)


def check_count(count: int, max_images: int, name: Callable[[int], str]) -> None:
    """`check_number` before there are sources. `name`: of an image, by its index."""
    if count > max_images:
        raise InvalidRequestError(
            f"{name(max_images)} is image {max_images + 1} of {count}; allowed: {max_images} a request (max_images)"
        )


def take_indexed(messages: Sequence[Any], data: Sequence[bytes]) -> tuple[list[Any], list[Source]]:
    """As `take_images`, of messages from `Source.part`, whose images' bytes are `data`."""
    sources: list[Source] = []

    def taken(part: Any) -> Any:
        if not isinstance(part, Mapping) or part.get("type") != "image":
            return part
        index = part.get("index")
        if index != len(sources) or index >= len(data):
            raise InvalidRequestError(f"image_data has {len(data)} images; allowed: one for each image part, in order")
        background = part.get("background", WHITE)
        sources.append(
            Source(
                str(part.get("name", f"image {index}")),
                data[index],
                low_detail=bool(part.get("low")),
                background=(int(background[0]), int(background[1]), int(background[2])),
                options=part.get("options") or {},
                salt=str(part.get("salt") or ""),
            )
        )
        return IMAGE

    found = []
    for message in messages:
        if isinstance(message, Mapping) and isinstance(message.get("content"), list):
            message = {**message, "content": [taken(part) for part in message["content"]]}
        found.append(message)
    if len(sources) != len(data):
        raise InvalidRequestError(f"image_data has {len(data)} images; the messages have {len(sources)}")
    return found, sources


def without_eyes(messages: Sequence[Any], why: str, name: str = "image") -> InvalidRequestError:
    """The refusal of a model that has no encoder of images, by the part's name, or by `name` where no message has one.
    `why`: it has one all the same."""
    place = next(
        (
            f"messages[{number}].content[{index}]"
            for number, message in enumerate(messages)
            if isinstance(message, Mapping) and isinstance(message.get("content"), (list, tuple))
            for index, part in enumerate(message["content"])
            if has_images([{"content": [part]}])
        ),
        name,
    )
    reason = f" ({why})" if why else ""
    return InvalidRequestError(f"{place} is no text; allowed: text, as this model has no image encoder{reason}")


def image_source(url: Any, name: str, asked: Asked | None = None, *, detail: Any = None, salt: Any = None) -> Source:
    """One image by its URL, not read yet. Raises InvalidRequestError, with `name` for the value."""
    if not isinstance(url, str) or not url.strip():
        raise InvalidRequestError(f"{name} is {_shown(url)}; allowed: a data URL, `data:image/png;base64,...`")
    return replace(_asked_source(name, asked or Asked(), detail, salt), url=url)


def _asked_source(name: str, asked: Asked, detail: Any, salt: Any) -> Source:
    if detail is not None and detail not in DETAILS:
        raise InvalidRequestError(f"{name}.detail is {_shown(detail)}; allowed: {', '.join(DETAILS)}")
    if salt is not None and (not isinstance(salt, str) or len(salt.encode("utf-8", "replace")) > _MAX_SALT):
        raise InvalidRequestError(f"{name}.uuid is {_shown(salt)}; allowed: a text of at most {_MAX_SALT} bytes")
    return Source(name, low_detail=detail == "low", background=asked.background, options=asked.options, salt=salt or "")


def loaded(source: Source) -> Source:
    """With the data of a data URL in place of it. Raises InvalidRequestError for other URLs and files."""
    if source.file_id:
        raise InvalidRequestError(f"{source.name} is {_shown(source.file_id)}; allowed: image_url with a data URL")
    return replace(source, data=data_of_url(source.url, source.name), url="") if source.url else source


def data_of_url(url: str, name: str) -> bytes:
    """The bytes of a data URL (RFC 2397), whatever media type it names. Raises InvalidRequestError."""
    head = _DATA.match(url.lstrip())
    if head is None:
        scheme = url.partition(":")[0].strip().lower()
        if scheme in ("http", "https"):
            raise InvalidRequestError(
                f"{name} is an {scheme} URL, and this server fetches none; allowed: a data URL, "
                "`data:image/png;base64,...`"
            )
        raise InvalidRequestError(f"{name} is {_shown(url)}; allowed: a data URL, `data:image/png;base64,...`")
    if len(url) > 4 * MAX_FILE_BYTES:
        raise InvalidRequestError(f"{name} has {len(url)} characters; allowed: an image of {MAX_FILE_BYTES} bytes")
    payload = url.lstrip()[head.end() :]
    is_base64 = any(one.strip().lower() == "base64" for one in head[1].split(";")[1:])
    if "%" in payload or not is_base64:
        data = _unquoted(payload)
        return _base64(data, name) if is_base64 else _bounded(data, name)
    return base64_data(payload, name)


def _unquoted(payload: str) -> bytes:
    """Percent-encoding decoded, in pieces: between them other threads run, and few objects stand at a time."""
    raw, pieces, at = payload.encode("utf-8", "replace"), [], 0
    while at < len(raw):
        end = at + _PIECE
        cut = raw.rfind(b"%", end - 2, end)  # so that no escape is cut
        end = cut if cut > at else end
        pieces.append(unquote_to_bytes(raw[at:end]))
        at = end
    return b"".join(pieces)


def base64_data(text: str | bytes, name: str) -> bytes:
    """Decodes base64: blanks and line breaks, the URL's letters, and missing padding are accepted. Raises
    InvalidRequestError."""
    try:
        return _base64(text.encode("ascii") if isinstance(text, str) else text, name)
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{name} holds characters that are not base64's; allowed: base64") from None


def _base64(data: bytes, name: str) -> bytes:
    letters = data.translate(bytes.maketrans(b"-_", b"+/"), _BLANKS).rstrip(b"=")
    if len(letters) * 3 // 4 > MAX_FILE_BYTES:
        raise InvalidRequestError(f"{name} has {len(letters) * 3 // 4} bytes; allowed: {MAX_FILE_BYTES}")
    letters += b"=" * (-len(letters) % 4)
    try:  # in pieces, between which other threads run
        pieces = [base64.b64decode(letters[at : at + _PIECE], validate=True) for at in range(0, len(letters), _PIECE)]
        return _bounded(b"".join(pieces), name)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(f"{name} is no base64 ({error}); allowed: base64 of an image file") from None


def _bounded(data: bytes, name: str) -> bytes:
    if not data:
        raise InvalidRequestError(f"{name} is empty; allowed: an image file")
    if len(data) > MAX_FILE_BYTES:
        raise InvalidRequestError(f"{name} has {len(data)} bytes; allowed: {MAX_FILE_BYTES}")
    return data


def _kind(part: Mapping[Any, Any]) -> Any:
    """Its type, by its keys where that is left out, as some clients do."""
    if part.get("type") is None:
        return next((kind for kind in ("image_url", "text") if kind in part), None)
    return part["type"]


def take_image(part: Any, name: str, asked: Asked, sources: list[Source]) -> dict[str, Any] | None:
    """`Source.part` of a content part that is an image, which is appended to `sources`; None for any other part. Raises
    InvalidRequestError, with `name` for the part."""
    if not isinstance(part, Mapping):
        return None
    kind = _kind(part)
    if isinstance(kind, str) and kind in REFUSED:
        raise InvalidRequestError(f"{name} has type {kind!r}, which is not served: {REFUSED[kind]}")
    if kind not in IMAGE_KINDS:
        return None
    if kind == "image":
        return _take(_anthropic_source(part.get("source"), f"{name}.source", asked), name, sources)
    if unknown := sorted(set(part) - _PART_KEYS):
        raise InvalidRequestError(f"{name} has {_shown(unknown[0])}; allowed: {', '.join(sorted(_PART_KEYS))}")
    if part.get("file_id") is not None:
        return _take(_file_source(part, name, asked, part.get("detail")), name, sources)
    given, detail = part.get("image_url"), part.get("detail")
    place = f"{name}.image_url"
    if given is None and part.get("uuid") is not None:
        raise InvalidRequestError(f"{name}.uuid is given without an image; allowed: an image in each request")
    if isinstance(given, Mapping):
        if unknown := sorted(set(given) - _URL_KEYS, key=str):
            raise InvalidRequestError(f"{place} has {_shown(unknown[0])}; allowed: {', '.join(sorted(_URL_KEYS))}")
        detail = given.get("detail", detail)
        given, place = given.get("url"), f"{place}.url"
    return _take(image_source(given, place, asked, detail=detail, salt=part.get("uuid")), name, sources)


def _take(source: Source, name: str, sources: list[Source]) -> dict[str, Any]:
    if len(sources) >= MAX_IMAGES:
        raise InvalidRequestError(f"{name} is image {len(sources) + 1}; allowed: {MAX_IMAGES} a request")
    sources.append(source)
    return source.part(len(sources) - 1)


def _file_source(part: Mapping[str, Any], name: str, asked: Asked, detail: Any = None) -> Source:
    file_id = part.get("file_id")
    if not isinstance(file_id, str) or not file_id or part.get("image_url") is not None:
        raise InvalidRequestError(f"{name}.file_id is {_shown(file_id)}; allowed: a file's id, without image_url")
    return replace(_asked_source(f"{name}.file_id", asked, detail, part.get("uuid")), file_id=file_id)


def _anthropic_source(source: Any, name: str, asked: Asked) -> Source:
    """Of an `image` block of Anthropic's API."""
    kind = source.get("type") if isinstance(source, Mapping) else source
    if isinstance(source, Mapping) and kind == "url":
        return image_source(source.get("url"), f"{name}.url", asked)
    if isinstance(source, Mapping) and kind == "file":
        return _file_source(source, name, asked)
    if not isinstance(source, Mapping) or kind != "base64":
        raise InvalidRequestError(f"{name}.type is {_shown(kind)}; allowed: base64, url, file")
    if not isinstance(data := source.get("data"), str):
        raise InvalidRequestError(f"{name}.data is {_shown(data)}; allowed: base64 of an image file")
    return image_source(f"data:;base64,{data}", f"{name}.data", asked)


def _background(options: Any) -> tuple[int, int, int]:
    if options is None:
        return WHITE
    image = options.get("image", {}) if isinstance(options, Mapping) else None
    if not isinstance(image, Mapping) or set(options) - {"image"}:
        raise InvalidRequestError(f"media_io_kwargs is {_shown(options)}; allowed: an object with `image`")
    if unknown := sorted(set(image) - {"rgba_background_color"}, key=str):
        raise InvalidRequestError(
            f"media_io_kwargs.image has {_shown(unknown[0])}; allowed: rgba_background_color, three numbers"
        )
    colour = image.get("rgba_background_color", WHITE)
    if (
        not isinstance(colour, (list, tuple))
        or len(colour) != 3
        or not all(type(one) is int and 0 <= one <= 255 for one in colour)
    ):
        raise InvalidRequestError(
            f"media_io_kwargs.image.rgba_background_color is {_shown(colour)}; allowed: three numbers from 0 to 255"
        )
    return colour[0], colour[1], colour[2]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"
