"""Images that a caller of this very process gives: Pillow's, NumPy arrays, bytes, paths, data URLs."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.images.parts import IMAGE, IMAGE_KINDS, REFUSED, Asked, Source, image_source, loaded, take_image

_ALLOWED = "an image of Pillow, a uint8 array [height, width, 3], bytes of a file, a path or a data URL"
_EXIF_ORIENTATION = 0x0112
_OWN_KINDS = ("image", "image_pil")  # with the image itself under the kind's name


def local_source(given: Any, name: str, asked: Asked | None = None, *, detail: Any = None, salt: Any = None) -> Source:
    """Raises InvalidRequestError, with `name` for the value."""
    asked = asked or Asked()
    if isinstance(given, str) and given.lstrip()[:5].lower() == "data:":
        return loaded(image_source(given, name, asked, detail=detail, salt=salt))
    low = detail == "low"
    common: dict[str, Any] = {
        "low_detail": low,
        "background": asked.background,
        "options": asked.options,
        "salt": salt or "",
    }
    if isinstance(given, (bytes, bytearray, memoryview)):
        return Source(name, bytes(given), **common)
    if isinstance(given, (str, os.PathLike)):
        return Source(name, _read(Path(given), name), **common)
    if isinstance(given, np.ndarray):
        pixels, size = _of_array(given, name)
        return Source(name, pixels, raw=size, **common)
    if all(hasattr(given, one) for one in ("mode", "size", "tobytes", "save")):
        data, raw, turn = _of_pillow(given, name)
        return Source(name, data, raw=raw, turn=turn, **common)
    raise InvalidRequestError(f"{name} is a {type(given).__name__}; allowed: {_ALLOWED}")


def local_sources(given: Any, name: str, asked: Asked | None = None, salts: Any = None) -> list[Source]:
    """One image, or a list of them. `salts`: as many, or None. Raises InvalidRequestError."""
    listed = list(given) if isinstance(given, (list, tuple)) else [given]
    found = list(salts) if isinstance(salts, (list, tuple)) else [salts] * len(listed)
    if len(found) != len(listed):
        raise InvalidRequestError(f"{name} has {len(listed)} images and {len(found)} uuids; allowed: one for each")
    return [
        local_source(one, f"{name}[{number}]", asked, salt=salt)
        for number, (one, salt) in enumerate(zip(listed, found, strict=True))
    ]


def take_local_images(messages: Sequence[Any], asked: Asked | None = None) -> tuple[list[Any], list[Source]]:
    """As `parts.take_images`; parts may also have the image itself: {"type": "image", "image": ...}, {"type":
    "image_pil", "image_pil": ...}, or an image in place of a URL. Those of URLs are not loaded. Raises
    InvalidRequestError."""
    sources: list[Source] = []
    found = []
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, (list, tuple)):
            kept = [
                _taken(part, f"messages[{number}].content[{index}]", asked or Asked(), sources)
                for index, part in enumerate(content)
            ]
            message = {**message, "content": kept}
        found.append(message)
    return found, sources


def _taken(part: Any, name: str, asked: Asked, sources: list[Source]) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _OWN_KINDS and part.get(kind) is not None:
        sources.append(local_source(part[kind], f"{name}.{kind}", asked, salt=part.get("uuid")))
        return IMAGE
    if kind in _OWN_KINDS:
        raise InvalidRequestError(f"{name}.{kind} is missing; allowed: {_ALLOWED}")
    if kind in IMAGE_KINDS and kind not in REFUSED:
        given = part.get("image_url")
        url, detail = (given.get("url"), given.get("detail")) if isinstance(given, Mapping) else (given, None)
        if not isinstance(url, str):
            sources.append(local_source(url, f"{name}.image_url", asked, detail=detail, salt=part.get("uuid")))
            return IMAGE
    if take_image(part, name, asked, sources) is None:
        return part
    return IMAGE


def _read(path: Path, name: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"{name} is {str(path)!r:.200}, which cannot be read: {error.strerror}") from None


def _of_array(array: Any, name: str) -> tuple[bytes, tuple[int, int]]:
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or array.shape[2:] not in ((), (1,), (3,)) or not array.size:
        raise InvalidRequestError(
            f"{name} is an array of {array.dtype} {list(array.shape)}; allowed: uint8 [height, width, 3] or "
            "[height, width]"
        )
    grey = array.reshape(*array.shape[:2], -1)
    pixels = np.ascontiguousarray(np.broadcast_to(grey, (*array.shape[:2], 3)))
    return pixels.tobytes(), (array.shape[1], array.shape[0])


def _of_pillow(image: Any, name: str) -> tuple[bytes, tuple[int, int] | None, int]:
    """Its data, width and height if these are pixels, and EXIF's orientation."""
    try:
        turn = image.getexif().get(_EXIF_ORIENTATION, 1)
        turn = turn if isinstance(turn, int) and 1 <= turn <= 8 else 1
        if image.mode == "RGB" and "transparency" not in image.info:
            return image.tobytes(), image.size, turn
        if image.mode == "F":
            raise InvalidRequestError(f"{name} has floating-point pixels; allowed: {_ALLOWED}")
        if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I"):
            return image.convert("RGB").tobytes(), image.size, turn
        file = io.BytesIO()
        image.save(file, "PNG", compress_level=1)  # keeps EXIF, transparency and 16 bits
        return file.getvalue(), None, 1
    except (OSError, ValueError, SyntaxError) as error:
        raise InvalidRequestError(f"{name} cannot be read: {error!s:.200}") from None
