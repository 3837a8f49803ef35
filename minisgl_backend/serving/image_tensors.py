"""Images that Triton's clients send as tensors: those of vllm_backend, of tensorrtllm_backend and of its LLM API."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.images.parts import Asked, Source, base64_data, check_count, image_source
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
    fields: Mapping[str, Any], asked: Asked, load: Callable[[Sequence[Source]], list[Source]], max_images: int
) -> GivenImages:
    """The images of a request that has some as tensors, none of them decoded. `load`: reads those of URLs. Too many are
    refused before any is looked at. Raises InvalidRequestError, and what `load` does."""
    names = [name for name in IMAGES if len(fields.get(name, ()))]
    if len(names) > 1:
        raise InvalidRequestError(f"{names[1]} is given together with {names[0]}; allowed: one of them")
    if not names:
        raise InvalidRequestError(f"{_SIZES} is given without images; allowed: with one of {', '.join(IMAGES)}")
    (name,) = names
    items = _pixels(name, fields[name]) if name == "image_bytes_input" else fields[name]
    check_count(len(items), max_images, lambda at: f"{name}[{at}]")
    sizes = _sizes(fields.get(_SIZES), len(items))
    if name == "image_bytes_input":
        return GivenImages(name, _of_pixels(name, items, sizes, asked), None)
    make = _of_file if name == "image" else _of_url
    return GivenImages(name, load([make(f"{name}[{at}]", one, asked) for at, one in enumerate(items)]), sizes)


def _sizes(given: Any, num_images: int) -> list[tuple[int, int]] | None:
    """`given`: whole numbers [images, 2], also with a batch dimension of 1, or [2] of one image; empty: there are
    none. Raises InvalidRequestError."""
    if given is None or not given.size:
        return None
    if given.dtype.kind not in "iu" or given.shape[-1:] != (2,) or any(one != 1 for one in given.shape[:-2]):
        raise InvalidRequestError(
            f"{_SIZES} is {given.dtype} {list(given.shape)}; allowed: int64 [images, 2], height and width of each"
        )
    sizes = given.reshape(-1, 2)
    if len(sizes) != num_images:
        raise InvalidRequestError(f"{_SIZES} has {len(sizes)} sizes for {num_images} images; allowed: one for each")
    return [(int(height), int(width)) for height, width in sizes]


def _of_url(name: str, url: str | bytes, asked: Asked) -> Source:
    text = url if isinstance(url, str) else url.decode("utf-8", "replace")
    return image_source(text, name, asked)


def _of_file(name: str, given: str | bytes, asked: Asked) -> Source:
    """Of base64, or of a data URL."""
    if given[:5].lower() in (b"data:", "data:") or given[:4].lower() in (b"http", "http"):
        return _of_url(name, given, asked)
    return Source(name, base64_data(given, name), background=asked.background, options=asked.options)


def _pixels(name: str, given: Any) -> Any:
    """`given`: uint8 [images, height, width, 3] or [images, 3, height, width], also with a batch dimension of 1; as the
    first of these. Raises InvalidRequestError."""
    shape = given.shape[-4:]
    last, first = shape[-1:] == (3,), shape[1:2] == (3,)
    is_shaped = given.ndim == 4 or (given.ndim == 5 and given.shape[0] == 1)
    if given.dtype != np.uint8 or not is_shaped or given.size == 0 or last == first:
        raise InvalidRequestError(
            f"{name} is {given.dtype} {list(given.shape)}; allowed: uint8 [images, height, width, 3] or "
            "[images, 3, height, width], of which one alone has 3 channels"
        )
    return given.reshape(shape) if last else np.moveaxis(given.reshape(shape), 1, 3)


def _of_pixels(name: str, pixels: Any, sizes: Sequence[tuple[int, int]] | None, asked: Asked) -> list[Source]:
    """`pixels`: uint8 [images, height, width, 3]. `sizes`: what of each, from its upper left on, is the image."""
    height, width = pixels.shape[1:3]
    parts = sizes or [(height, width)] * len(pixels)
    found = []
    for number, ((rows, columns), image) in enumerate(zip(parts, pixels, strict=True)):
        if not (1 <= rows <= height and 1 <= columns <= width):
            allowed = f"allowed: 1 to {height}, 1 to {width}"
            raise InvalidRequestError(f"{_SIZES}[{number}] is {shown((rows, columns))}; {allowed}")
        data = np.ascontiguousarray(image[:rows, :columns]).tobytes()
        common: dict[str, Any] = {"background": asked.background, "options": asked.options}
        found.append(Source(f"{name}[{number}]", data, raw=(columns, rows), **common))
    return found
