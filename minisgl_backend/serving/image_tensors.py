"""Images that Triton's clients send as tensors: those of vllm_backend, of tensorrtllm_backend and of its LLM API."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.images.parts import Asked, Source, base64_data, image_source
from minisgl_backend.serving.fields import shown
from minisgl_backend.serving.tensors import IMAGES

_SIZES = "image_sizes_input"


@dataclass(frozen=True)
class GivenImages:
    """Those of one request."""

    name: str  # of their tensor
    sources: list[Source]
    sizes: Sequence[tuple[int, int]] | None  # height and width that a client says files have

    def goes_through_template(self, has_slots: bool, default: bool) -> bool:
        """Whether the text is a question behind them, where the request does not say it. tensorrtllm_backend writes
        prompts with images itself; here only those without places for them. `default`: of a text alone."""
        return default or self.name == "image_url" or (self.name != "image" and not has_slots)

    def check_sizes(self, upright: Sequence[tuple[int, int]]) -> None:
        """`upright`: width and height of each as found. Raises InvalidRequestError."""
        for number, ((height, width), found) in enumerate(zip(self.sizes or (), upright, strict=False)):
            if (width, height) != found:
                raise InvalidRequestError(
                    f"{_SIZES}[{number}] is {height}, {width}, and the image is {found[1]}, {found[0]}; allowed: its "
                    "height and width"
                )


def given_images(
    fields: Mapping[str, Any], asked: Asked, load: Callable[[Sequence[Source]], list[Source]]
) -> GivenImages:
    """The images of a request that has some as tensors, none of them decoded. `load`: reads those of URLs. Raises
    InvalidRequestError, and what `load` does."""
    names = [name for name in IMAGES if len(fields.get(name, ()))]
    if len(names) > 1:
        raise InvalidRequestError(f"{names[1]} is given together with {names[0]}; allowed: one of them")
    if not names:
        raise InvalidRequestError(f"{_SIZES} is given without images; allowed: with one of {', '.join(IMAGES)}")
    (name,) = names
    sizes = fields.get(_SIZES)
    listed = None if sizes is None or not sizes.size else [(int(h), int(w)) for h, w in sizes.reshape(-1, 2)]
    if name == "image_bytes_input":
        return GivenImages(name, _of_pixels(name, fields[name], listed, asked), None)
    items = [(f"{name}[{number}]", one) for number, one in enumerate(fields[name])]
    if listed is not None and len(listed) != len(items):
        raise InvalidRequestError(f"{_SIZES} has {len(listed)} sizes for {len(items)} images; allowed: one for each")
    make = _of_file if name == "image" else _of_url
    return GivenImages(name, load([make(place, one, asked) for place, one in items]), listed)


def _of_url(name: str, url: str | bytes, asked: Asked) -> Source:
    text = url if isinstance(url, str) else url.decode("utf-8", "replace")
    return image_source(text, name, asked)


def _of_file(name: str, given: str | bytes, asked: Asked) -> Source:
    """Of base64, or of a data URL."""
    if given[:5].lower() in (b"data:", "data:") or given[:4].lower() in (b"http", "http"):
        return _of_url(name, given, asked)
    return Source(name, base64_data(given, name), background=asked.background, options=asked.options)


def _of_pixels(name: str, given: Any, sizes: Sequence[tuple[int, int]] | None, asked: Asked) -> list[Source]:
    """`given`: uint8 [images, height, width, 3] or [images, 3, height, width], also with a batch dimension of 1.
    `sizes`: what of each, from its upper left on, is the image."""
    shape = given.shape[-4:]
    last, first = shape[-1:] == (3,), shape[1:2] == (3,)
    if given.dtype != np.uint8 or given.ndim not in (4, 5) or given.size == 0 or last == first:
        raise InvalidRequestError(
            f"{name} is {given.dtype} {list(given.shape)}; allowed: uint8 [images, height, width, 3] or "
            "[images, 3, height, width], of which one alone has 3 channels"
        )
    pixels = given.reshape(shape) if last else np.moveaxis(given.reshape(shape), 1, 3)
    height, width = pixels.shape[1:3]
    parts = sizes or [(height, width)] * len(pixels)
    if len(parts) != len(pixels):
        raise InvalidRequestError(f"{_SIZES} has {len(parts)} sizes for {len(pixels)} images; allowed: one for each")
    found = []
    for number, ((rows, columns), image) in enumerate(zip(parts, pixels, strict=True)):
        if not (1 <= rows <= height and 1 <= columns <= width):
            allowed = f"allowed: 1 to {height}, 1 to {width}"
            raise InvalidRequestError(f"{_SIZES}[{number}] is {shown((rows, columns))}; {allowed}")
        data = np.ascontiguousarray(image[:rows, :columns]).tobytes()
        common: dict[str, Any] = {"background": asked.background, "options": asked.options}
        found.append(Source(f"{name}[{number}]", data, raw=(columns, rows), **common))
    return found
