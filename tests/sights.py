"""Files of drawn images that only orientation, transparency, a palette or 16 bits make what a person sees."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_LEFT_IS_RED = "What is on the left?"
_TURNED_BACK = {  # by EXIF's orientation: what makes the stored pixels of those to be seen
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@dataclass(frozen=True)
class SeenFile:
    name: str
    media_type: str
    data: bytes
    question: str
    answer: str


def pair() -> Image.Image:
    """A red circle, and a blue square at its right."""
    image = Image.new("RGB", (240, 120), "white")
    draw = ImageDraw.Draw(image)
    draw.ellipse((15, 20, 95, 100), fill="red")
    draw.rectangle((145, 25, 215, 95), fill="blue")
    return image


def number(text: str, size: tuple[int, int] = (160, 112)) -> Image.Image:
    """White on black, grey."""
    image = Image.new("L", size, 0)
    ImageDraw.Draw(image).text((20, 10), text, fill=255, font=ImageFont.load_default(80))
    return image


def seen_files() -> list[SeenFile]:
    files = [
        _file(f"orientation {turn}", "JPEG", pair().transpose(back), _LEFT_IS_RED, "a red circle", exif=_exif(turn))
        for turn, back in _TURNED_BACK.items()
    ]
    files += [
        _file("alpha", "PNG", _alpha(), "What shape is it?", "circle"),
        _file("alpha, background", "PNG", _alpha(), "What colour is the background?", "white"),
        _file("palette", "PNG", pair().quantize(8), _LEFT_IS_RED, "a red circle"),
        _file(
            "palette with transparency", "PNG", _palette(), "What colour is the background?", "white", transparency=0
        ),
        _file("16 bits", "PNG", _deep(), "What number is shown?", "47"),
        _file("16 bits, TIFF", "TIFF", _deep(), "What colour is the number?", "white"),
        _file("1 bit", "PNG", number("58").convert("1"), "What number is shown?", "58"),
        _file("CMYK", "JPEG", pair().convert("CMYK"), _LEFT_IS_RED, "a red circle"),
        _file("GIF", "GIF", pair(), "What is on the right?", "a blue square"),
        _file("WebP", "WEBP", pair(), "What is in the image?", "a red circle and a blue square"),
    ]
    return files


def _file(name: str, kind: str, image: Image.Image, question: str, answer: str, **options: Any) -> SeenFile:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return SeenFile(name, f"image/{kind.lower()}", file.getvalue(), question, answer)


def _exif(turn: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = turn
    return exif


def _alpha() -> Image.Image:
    """All pixels are green; a circle of them can be seen."""
    image = Image.new("RGBA", (120, 120), (0, 128, 0, 0))
    ImageDraw.Draw(image).ellipse((20, 20, 100, 100), fill=(0, 128, 0, 255))
    return image


def _palette() -> Image.Image:
    """Entry 0, which is not to be seen, is black."""
    image = Image.new("P", (120, 120), 0)
    image.putpalette([0, 0, 0, 255, 0, 0])
    ImageDraw.Draw(image).rectangle((30, 30, 90, 90), fill=1)
    return image


def _deep() -> Image.Image:
    """Of 16 bits: its black is above 255, which is white where bits are cut off at the top."""
    return Image.fromarray((np.asarray(number("47")).astype(np.uint16) * 254 + 400).astype(np.uint16))


Ask = Callable[[SeenFile], str]


def wrong_ones(ask: Ask) -> list[str]:
    """What is answered otherwise than a person would."""
    answers = [(one, ask(one).strip()) for one in seen_files()]
    return [f"{one.name}: {said!r}, not {one.answer!r}" for one, said in answers if said != one.answer]
