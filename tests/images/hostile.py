"""Files that are no pictures, or odd ones, with the answer that each gets: made here, none is kept.

`CASES`: name -> a function that makes the file, and what is said of it: words of the refusal, or the size of the
upright image with what its pixels must be.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, PngImagePlugin

from tests.seeing import encoded, picture

NO_IMAGE = "is no image that is served"
CUT = "cannot be decoded"


class Refused(NamedTuple):
    words: str


class Accepted(NamedTuple):
    """Width and height; the colour of the upper left corner within `tolerance`, where it is known."""

    width: int
    height: int
    corner: tuple[int, int, int] | None = None
    tolerance: int = 0


class Case(NamedTuple):
    make: Callable[[], bytes]
    answer: Refused | Accepted
    full: bool = False  # takes seconds


def chunk(kind: bytes, data: bytes, checksum: int | None = None) -> bytes:
    found = zlib.crc32(kind + data) if checksum is None else checksum
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", found)


def png(width: int, height: int, *chunks: bytes, depth: int = 8, colour: int = 2, interlace: int = 0) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlace)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + b"".join(chunks) + chunk(b"IEND", b"")


def rows(width: int, height: int, *, channels: int = 3, depth: int = 8) -> bytes:
    """IDAT of a black image."""
    line = b"\0" * (1 + (width * channels * depth + 7) // 8)
    packer = zlib.compressobj(9)
    return chunk(b"IDAT", b"".join([*(packer.compress(line) for _ in range(height)), packer.flush()]))


def _noise(width: int = 300, height: int = 200) -> Image.Image:
    return Image.open(io.BytesIO(picture(width, height)))


def _halves() -> Image.Image:
    """Red above, blue below, 20 wide and 10 high, as it is to be seen."""
    pixels = np.zeros((10, 20, 3), np.uint8)
    pixels[:5, :, 0], pixels[5:, :, 2] = 255, 255
    return Image.fromarray(pixels)


def turned(orientation: int, kind: str = "JPEG") -> bytes:
    """`_halves`, stored so that it is upright only with EXIF's orientation."""
    back = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # Pillow's transposes that undo it
    image = _halves()
    if orientation in back:
        image = image.transpose(Image.Transpose(back[orientation]))
    exif = image.getexif()
    exif[0x0112] = orientation
    options: dict[str, Any] = {"quality": 95, "subsampling": 0} if kind == "JPEG" else {}
    return encoded(image, kind, exif=exif, **options)


def _wrong_exif() -> bytes:
    return encoded(_halves(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff" + b"\x12\x01" * 20, quality=95)


def _frames(kind: str, count: int = 5) -> bytes:
    frames = [Image.new("RGB", (16, 12), (40 * k % 256, 0, 0)) for k in range(count)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:])


def _apng() -> bytes:
    frames = [Image.new("RGB", (16, 12), (40 * k, 0, 0)) for k in range(4)]
    return encoded(frames[0], "PNG", save_all=True, append_images=frames[1:])


def _alpha(mode: str) -> bytes:
    return encoded(Image.new(mode, (8, 8), (0,) * len(mode)))


def _palette_with_transparency() -> bytes:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, 10, 200, 30])
    return encoded(image, "PNG", transparency=1)


def _deep(kind: str = "PNG") -> bytes:
    return encoded(Image.fromarray(np.full((8, 8), 0x80FF, np.uint16)), kind)


def _deep_colours() -> bytes:
    lines = b"".join(b"\0" + b"\x80\x00\x40\x00\x20\x00" * 8 for _ in range(8))
    return png(8, 8, chunk(b"IDAT", zlib.compress(lines)), depth=16)


def _text_bomb(kind: bytes) -> bytes:
    packed = zlib.compress(b"x" * (80 << 20))
    data = {b"zTXt": b"a\0\0", b"iTXt": b"a\0\1\0\0\0", b"iCCP": b"a\0\0"}[kind] + packed
    return png(1, 1, chunk(kind, data), rows(1, 1))


def _many_chunks(number: int) -> bytes:
    return png(8, 8, chunk(b"teSt", b"") * number, rows(8, 8))


def _bad_checksum() -> bytes:
    data = rows(8, 8)
    return png(8, 8, data[:-4] + b"\0\0\0\0")


def _gif_outside() -> bytes:
    """A frame of 60x60 on a canvas of 8x8."""
    data = bytearray(encoded(Image.new("P", (60, 60), 3), "GIF"))
    data[6:10] = struct.pack("<HH", 8, 8)
    return bytes(data)


def _tiff_loop() -> bytes:
    """The directory's next directory is itself."""
    data = bytearray(encoded(Image.new("RGB", (8, 8), (7, 8, 9)), "TIFF"))
    start = struct.unpack("<I", data[4:8])[0]
    count = struct.unpack("<H", data[start : start + 2])[0]
    data[start + 2 + 12 * count :][:4] = struct.pack("<I", start)
    data[start + 2 + 12 * count : start + 6 + 12 * count] = struct.pack("<I", start)
    return bytes(data)


def _cmyk() -> bytes:
    return encoded(Image.new("CMYK", (8, 8), (0, 0, 0, 0)), "JPEG")


def _cmyk_without_marker() -> bytes:
    """Of Adobe, which says that its inks are inverted."""
    data = _cmyk()
    start = data.index(b"\xff\xee")
    return data[:start] + data[start + 2 + struct.unpack(">H", data[start + 2 : start + 4])[0] :]


def _patched(data: bytes, mark: bytes, behind: int, value: bytes) -> bytes:
    at = data.index(mark) + len(mark) + behind
    return data[:at] + value + data[at + len(value) :]


def _thumbnail_bomb() -> bytes:
    """EXIF names a thumbnail of 4 GB, far behind the file's end."""
    first = struct.pack("<H", 0) + struct.pack("<I", 14)
    tags = ((0x0100, 65_535), (0x0101, 65_535), (0x0201, 0xFFFFFF00), (0x0202, 0xFFFFFFFF))
    second = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return encoded(_halves(), "JPEG", quality=95, exif=b"Exif\0\0II*\0\x08\0\0\0" + first + second + b"\0\0\0\0")


def _tiff(*tags: tuple[int, int], pages: int = 1) -> bytes:
    """Directories alone, one behind the other, each with these tags (numbers of 32 bits)."""
    size = 2 + 12 * len(tags) + 4
    body = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    links = (struct.pack("<I", 8 + size * (page + 1) if page + 1 < pages else 0) for page in range(pages))
    return b"II*\0\x08\0\0\0" + b"".join(body + link for link in links)


_TIFF = ((256, 8), (257, 8), (258, 8), (259, 1), (262, 1), (277, 1))  # 8x8 of grey


def _bmp_lying() -> bytes:
    data = bytearray(encoded(Image.new("RGB", (8, 8)), "BMP"))
    data[18:26] = struct.pack("<ii", 20_000, 2_000)
    return bytes(data)


def _comment() -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_text("Comment", "<|image_pad|>" * 1000)
    return encoded(Image.new("RGB", (8, 8), (1, 2, 3)), "PNG", pnginfo=info)


_EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"
_JPEG, _PNG = picture(300, 200, "JPEG"), picture(300, 200)
_GREY = (128, 128, 128)

CASES: Mapping[str, Case] = {
    "empty": Case(lambda: b"", Refused("is empty")),
    "one byte": Case(lambda: b"\xff", Refused(NO_IMAGE)),
    "text": Case(lambda: b"a picture of a cat", Refused(NO_IMAGE)),
    "svg": Case(lambda: b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>", Refused(NO_IMAGE)),
    "pdf": Case(lambda: b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\n", Refused(NO_IMAGE)),
    "heic": Case(lambda: b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", Refused(NO_IMAGE)),
    "eps": Case(lambda: _EPS, Refused(NO_IMAGE)),
    "psd": Case(
        lambda: b"8BPS\0\1" + b"\0" * 6 + struct.pack(">HIIHH", 3, 8, 8, 8, 3) + b"\0" * 100, Refused(NO_IMAGE)
    ),
    "icns": Case(lambda: encoded(Image.new("RGBA", (32, 32)), "ICNS"), Refused(NO_IMAGE)),
    "jpeg 2000": Case(lambda: encoded(Image.new("RGB", (32, 32)), "JPEG2000"), Refused(NO_IMAGE)),
    "pcx": Case(lambda: encoded(Image.new("RGB", (32, 32)), "PCX"), Refused(NO_IMAGE)),
    **{
        f"{kind} cut at {percent} %": Case(
            lambda data=data, percent=percent: data[: len(data) * percent // 100], Refused(CUT)
        )
        for kind, data in (("jpeg", _JPEG), ("png", _PNG))
        for percent in (10, 50, 97)
    },
    "png of a head alone": Case(lambda: _PNG[:20], Refused("")),
    "bad checksum of pixels": Case(_bad_checksum, Accepted(8, 8, (0, 0, 0))),  # which Pillow does not look at
    "bad checksum of the head": Case(lambda: _PNG[:29] + b"\0\0\0\0" + _PNG[33:], Refused("")),
    "0x5": Case(lambda: png(0, 5, rows(1, 5)), Refused("")),
    "1x1": Case(lambda: png(1, 1, rows(1, 1)), Accepted(1, 1, (0, 0, 0))),
    "1x20000": Case(lambda: png(1, 20_000, rows(1, 20_000)), Refused("200 times the shorter")),
    "20000x1": Case(lambda: png(20_000, 1, rows(20_000, 1)), Refused("200 times the shorter")),
    "30000x30000 of 100 bytes": Case(lambda: png(30_000, 30_000, rows(1, 1)), Refused("at most 50000000 pixels")),
    "7000x7000 of one colour": Case(
        lambda: png(7000, 7000, rows(7000, 7000)), Accepted(7000, 7000, (0, 0, 0)), full=True
    ),
    "12000x12000": Case(lambda: png(12_000, 12_000, rows(1, 1)), Refused("at most 50000000 pixels")),
    "interlaced, 6000x6000": Case(
        lambda: png(6000, 6000, rows(6000, 12_000), interlace=1), Accepted(6000, 6000), full=True
    ),
    **{
        f"{kind.decode()} bomb": Case(lambda kind=kind: _text_bomb(kind), Refused(CUT))
        for kind in (b"zTXt", b"iTXt", b"iCCP")
    },
    "a million chunks": Case(lambda: _many_chunks(10**6), Accepted(8, 8, (0, 0, 0)), full=True),
    "text of placeholders": Case(_comment, Accepted(8, 8, (1, 2, 3))),
    "apng": Case(_apng, Accepted(16, 12, (0, 0, 0))),
    "gif of five frames": Case(lambda: _frames("GIF"), Accepted(16, 12, (0, 0, 0))),
    "gif of 1000 frames": Case(lambda: _frames("GIF", 1000), Accepted(16, 12, (0, 0, 0)), full=True),
    "webp of 1000 frames": Case(lambda: _frames("WEBP", 1000), Accepted(16, 12, (0, 0, 0), 3), full=True),
    "webp of five frames": Case(lambda: _frames("WEBP"), Accepted(16, 12, (0, 0, 0), 3)),
    "gif with a frame outside": Case(_gif_outside, Accepted(60, 60)),
    "tiff of 500 pages": Case(lambda: _frames("TIFF", 500), Accepted(16, 12, (0, 0, 0)), full=True),
    "tiff of 65535 pages": Case(
        lambda: _tiff(*_TIFF, (273, 8), (278, 8), (279, 64), pages=65_535), Accepted(8, 8), full=True
    ),
    "tiff whose tiles lie": Case(
        lambda: _tiff(*_TIFF, (322, 1 << 20), (323, 1 << 20), (324, 0xFFFFFF00), (325, 0xFFFFFFFF)), Refused(CUT)
    ),
    "tiff of 60000x60000": Case(
        lambda: _tiff((256, 60_000), (257, 60_000), *_TIFF[2:], (273, 8), (279, 9)), Refused("")
    ),
    "tiff in a loop": Case(_tiff_loop, Accepted(8, 8, (7, 8, 9))),
    "float tiff": Case(lambda: encoded(Image.new("F", (8, 8), 0.5), "TIFF"), Refused("pixels of the kind F")),
    **{f"jpeg turned {k}": Case(lambda k=k: turned(k), Accepted(20, 10, (254, 0, 0), 3)) for k in range(1, 9)},
    **{
        f"{kind} turned 6": Case(lambda kind=kind: turned(6, kind), Accepted(20, 10, (255, 0, 0)))
        for kind in ("PNG", "TIFF")
    },
    "webp turned 8": Case(lambda: turned(8, "WEBP"), Accepted(20, 10)),
    "avif turned 6": Case(lambda: turned(6, "AVIF"), Accepted(20, 10)),
    "orientation 9": Case(lambda: turned(9), Accepted(20, 10, (254, 0, 0), 3)),
    "exif of a wrong length": Case(_wrong_exif, Accepted(20, 10)),
    "progressive jpeg": Case(lambda: encoded(_noise(), "JPEG", progressive=True), Accepted(300, 200)),
    "jpeg with restart markers": Case(lambda: encoded(_noise(), "JPEG", restart_marker_blocks=2), Accepted(300, 200)),
    "jpeg of 4:1:1": Case(lambda: encoded(_noise(), "JPEG", subsampling="4:1:1"), Accepted(300, 200)),
    "jpeg of 12 bits": Case(lambda: _patched(_JPEG, b"\xff\xc0", 2, b"\x0c"), Refused("")),
    "arithmetic jpeg of other data": Case(lambda: _patched(_JPEG, b"\xff\xc0", -1, b"\xc9"), Accepted(300, 200)),
    "lossless jpeg": Case(lambda: _patched(_JPEG, b"\xff\xc0", -1, b"\xc3"), Refused("")),
    "jpeg with a thumbnail of 4 GB": Case(_thumbnail_bomb, Accepted(20, 10)),
    "cmyk jpeg without a marker": Case(_cmyk_without_marker, Accepted(8, 8)),
    "cmyk jpeg": Case(_cmyk, Accepted(8, 8, (255, 255, 255))),
    "transparent": Case(lambda: _alpha("RGBA"), Accepted(8, 8, (255, 255, 255))),
    "transparent grey": Case(lambda: _alpha("LA"), Accepted(8, 8, (255, 255, 255))),
    "transparent palette": Case(_palette_with_transparency, Accepted(8, 8, (255, 255, 255))),
    "16 bits of grey": Case(_deep, Accepted(8, 8, _GREY)),
    "16 bits of grey, tiff": Case(lambda: _deep("TIFF"), Accepted(8, 8, _GREY)),
    "16 bits of colour": Case(_deep_colours, Accepted(8, 8, (128, 64, 32), 1)),
    "16 bits of colour, opaque": Case(
        lambda: png(
            8, 8, chunk(b"IDAT", zlib.compress((b"\0" + b"\x80\0\x40\0\x20\0\xff\xff" * 8) * 8)), depth=16, colour=6
        ),
        Accepted(8, 8, (128, 64, 32), 1),
    ),
    "one bit": Case(lambda: encoded(Image.new("1", (8, 8), 1)), Accepted(8, 8, (255, 255, 255))),
    "avif that says 30000x30000": Case(
        lambda: _patched(encoded(_noise(), "AVIF"), b"ispe", 4, struct.pack(">II", 30_000, 30_000)), Refused("")
    ),
    "avif": Case(lambda: encoded(_noise(), "AVIF"), Accepted(300, 200)),
    "bmp whose head lies": Case(_bmp_lying, Refused(CUT)),
    "a zip behind": Case(lambda: _JPEG + b"PK\x03\x04" * 1000, Accepted(300, 200)),
    "html in front": Case(lambda: b"<html>" + _PNG, Refused(NO_IMAGE)),
}
