"""From a file's bytes to pixels: untrusted data, so in a worker alone. Needs Pillow, and no other module at its top.

The order is fixed, as it is part of what an image is: format, size limits from the header, first frame, strict
decoding, orientation, transparency, 16 bits, RGB, then the family's steps. Colour profiles are left aside.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from minisgl_backend.arrays import UInt8Array
from minisgl_backend.images.sizes import Shape, Step, View

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
MAX_PIXELS = 50_000_000  # of a file, before it is decoded

_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_WITH_ALPHA = ("RGBA", "LA", "PA", "La", "RGBa")
_PLAIN = ("RGB", "L", "1", "P", "CMYK", "YCbCr", "LAB", "HSV", "RGBX")


class ImageRefused(Exception):
    """What a client is told: words that follow the part's name."""


@dataclass(frozen=True)
class Opened:
    """A file whose header was read."""

    image: Image.Image
    turn: int  # EXIF's orientation, 1 to 8

    @property
    def upright(self) -> tuple[int, int]:
        """Width and height as it is to be seen."""
        width, height = self.image.size
        return (height, width) if self.turn >= 5 else (width, height)


def open_image(data: bytes) -> Opened:
    """Reads the header alone. Raises ImageRefused."""
    if not data:
        raise ImageRefused("is empty; allowed: an image file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the limits below are stricter than Pillow's
            Image.MAX_IMAGE_PIXELS = None
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            width, height = image.size
    except Exception as error:
        raise _unreadable(error) from None
    _check_pixels(width, height)
    return Opened(image, _turn(image))


def open_raw(data: bytes, width: int, height: int, turn: int) -> Opened:
    """Pixels as a client gave them: RGB, uint8 [height, width, 3]. Raises ImageRefused."""
    _check_pixels(width, height)
    return Opened(Image.frombytes("RGB", (width, height), data), turn)


def _check_pixels(width: int, height: int) -> None:
    if width < 1 or height < 1 or width * height > MAX_PIXELS:
        raise ImageRefused(f"is {width}x{height}; allowed: at most {MAX_PIXELS} pixels")


def rgb(opened: Opened, background: Sequence[int]) -> Image.Image:
    """Decodes, and returns the upright RGB image. `background`: the colour behind transparency. Raises ImageRefused."""
    image, upright = opened.image, opened.upright
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image.load()
    except MemoryError:
        raise ImageRefused("needs more memory than a worker may have; allowed: a smaller image") from None
    except Exception as error:
        raise _unreadable(error) from None
    if opened.turn in _TURNS:
        image = image.transpose(_TURNS[opened.turn])
    if image.size != upright:
        raise ImageRefused(f"is {image.size[0]}x{image.size[1]}, and its header says {upright[0]}x{upright[1]}")
    return _as_rgb(image, tuple(background))


def pixels_of(image: Image.Image, views: Sequence[View], shape: Shape, resample: int) -> UInt8Array:
    """The views' tiles: uint8 [tiles, height, width, 3]. `image`: upright RGB."""
    tiles, height, width, _ = shape
    found = np.empty(shape, dtype=np.uint8)
    first = 0
    done: dict[tuple[Step, ...], Image.Image] = {(): image}
    for view in views:
        seen = _stepped(done, view.steps, resample)
        columns, rows = seen.size[0] // width, seen.size[1] // height
        cut = np.asarray(seen).reshape(rows, height, columns, width, 3).swapaxes(1, 2)
        found[first : first + rows * columns] = cut.reshape(-1, height, width, 3)
        first += rows * columns
    if first != tiles:
        raise ImageRefused(f"made {first} tiles; expected: {tiles}")
    return found


def _stepped(done: dict[tuple[Step, ...], Image.Image], steps: tuple[Step, ...], resample: int) -> Image.Image:
    """The image after the steps; those of several views are done once."""
    if steps not in done:
        done[steps] = _step(_stepped(done, steps[:-1], resample), steps[-1], resample)
    return done[steps]


def _step(image: Image.Image, step: Step, resample: int) -> Image.Image:
    kind, numbers = step[0], [int(one) for one in step[1:]]
    if kind == "resize":
        return image.resize((numbers[0], numbers[1]), Image.Resampling(resample))
    if kind == "crop":
        left, top, width, height = numbers
        return image.crop((left, top, left + width, top + height))
    width, height, left, top, red, green, blue = numbers
    canvas = Image.new("RGB", (width, height), (red, green, blue))
    canvas.paste(image, (left, top))
    return canvas


def _turn(image: Image.Image) -> int:
    """1 where the header does not say it, and of TIFF, which Pillow turns itself. What a PNG says behind its pixels
    does not count: its size must be known from the header."""
    if image.format == "TIFF":
        return 1
    try:
        found = Image.Image.getexif(image).get(_ORIENTATION, 1)
    except Exception:  # EXIF of a wrong length turns nothing
        return 1
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def _as_rgb(image: Image.Image, background: tuple[int, ...]) -> Image.Image:
    if image.mode in _WITH_ALPHA or "transparency" in image.info:
        seen = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", seen.size, (*background, 255)), seen).convert("RGB")
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):
        return _from_16_bits(np.asarray(image))
    if image.mode in _PLAIN:
        return image.convert("RGB")
    raise ImageRefused(f"has pixels of the kind {image.mode}; allowed: grey, colours or a palette, of 1 to 16 bits")


def _from_16_bits(values: Any) -> Image.Image:
    """The upper 8 bits; Pillow's own conversion makes all above 255 white. Small integers of 32 bits are 8 bits."""
    wide = values.astype(np.int32).clip(0, 65535)
    if values.dtype.itemsize > 2 and wide.max(initial=0) < 256:
        return Image.fromarray(wide.astype(np.uint8)).convert("RGB")
    return Image.fromarray((wide >> 8).astype(np.uint8)).convert("RGB")


def _unreadable(error: Exception) -> ImageRefused:
    allowed = "JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF"
    if isinstance(error, Image.UnidentifiedImageError):
        return ImageRefused(f"is no image that is served; allowed: {allowed}")
    return ImageRefused(f"cannot be decoded ({type(error).__name__}: {error!s:.120}); allowed: a whole {allowed}")
