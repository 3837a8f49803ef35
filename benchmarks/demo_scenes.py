"""Drawn images whose contents are known: what the demo model with eyes learns to see and is graded on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from random import Random

from PIL import Image, ImageDraw, ImageFont

from benchmarks.demo_turns import is_held_out

SHAPES = ("circle", "square", "triangle", "star", "diamond", "cross")
# RGB values that a colour is drawn around; the first of each is what people mean by its name.
COLOURS = {
    "red": ((255, 0, 0), (220, 20, 30), (235, 45, 40)),
    "orange": ((255, 165, 0), (255, 140, 0), (240, 125, 20)),
    "yellow": ((255, 255, 0), (250, 220, 30), (255, 235, 60)),
    "green": ((0, 128, 0), (0, 255, 0), (40, 160, 60), (50, 200, 80)),
    "blue": ((0, 0, 255), (30, 80, 220), (50, 110, 235), (0, 0, 150)),
    "purple": ((128, 0, 128), (130, 40, 180), (150, 60, 200)),
    "pink": ((255, 192, 203), (255, 105, 180), (250, 150, 190)),
    "brown": ((139, 69, 19), (165, 42, 42), (110, 60, 30)),
    "black": ((0, 0, 0), (22, 22, 26)),
    "white": ((255, 255, 255), (244, 244, 244)),
    "gray": ((128, 128, 128), (110, 112, 115), (160, 160, 160)),
}
ROW, COLUMN, SCATTER, NUMBER, FIELDS = "row", "column", "scatter", "number", "fields"

Colour = tuple[int, int, int]
_JITTER, _LEAST_CONTRAST = 6, 75.0
_LONGEST = 400  # pixels of the side of most images; a few are larger
_LARGEST = 1000


@dataclass(frozen=True)
class Figure:
    shape: str
    colour: str

    def __str__(self) -> str:
        return f"{'an' if self.colour == 'orange' else 'a'} {self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """What an image shows."""

    layout: str  # one of ROW, COLUMN, SCATTER (figures anywhere), NUMBER, FIELDS (two or four colours, or one)
    figures: tuple[Figure, ...] = ()  # of a row from left to right, of a column from top to bottom
    number: str = ""
    fields: tuple[tuple[str, ...], ...] = ()  # rows of colours
    colour: str = ""  # of the number
    background: str = ""

    @property
    def content(self) -> str:
        """What the split into training and held-out scenes goes by: of a few contents alone, nothing is held out."""
        if self.layout == NUMBER:
            return f"number {self.number}"
        return f"{self.layout} {', '.join(map(str, self.figures))} {self.fields}"

    @property
    def is_held_out(self) -> bool:
        return is_held_out(self.content)

    @property
    def can_be_held_out(self) -> bool:
        return len(self.figures) > 1 or len(self.number) > 1 or len(self.fields) * len(self.fields[:1]) > 1


def draw_scene(rng: Random, layouts: Sequence[str], held_out: bool | None = None) -> Scene:
    """A scene of one of the layouts, on the wanted side of the split."""
    scene = _SCENES[rng.choice(layouts)](rng)
    if held_out is None or not scene.can_be_held_out:
        return scene
    while not scene.can_be_held_out or scene.is_held_out != held_out:
        scene = _SCENES[rng.choice(layouts)](rng)
    return scene


def draw_image(scene: Scene, rng: Random) -> Image.Image:
    """An RGB image of the scene, of a random size."""
    wide, high = _size(scene, rng)
    if scene.layout == FIELDS:
        return _fields(scene, wide, high, rng)
    for _ in range(100):
        ground = shade(scene.background, rng)
        names = [figure.colour for figure in scene.figures] or [scene.colour]
        colours = [shade(name, rng) for name in names]
        if all(math.dist(ground, one) >= _LEAST_CONTRAST for one in colours):
            break
    finer = 2 if max(wide, high) <= 200 and rng.random() < 0.5 else 1  # edges that are smooth
    image = Image.new("RGB", (wide * finer, high * finer), ground)
    if scene.layout == NUMBER:
        _draw_number(image, scene.number, colours[0], rng)
    else:
        cells = _cells(scene, *image.size, rng)
        for figure, colour, (x, y, radius) in zip(scene.figures, colours, cells, strict=True):
            draw_figure(image, figure.shape, colour, x, y, radius, rng)
    return image.reduce(finer) if finer > 1 else image


def shade(name: str, rng: Random) -> Colour:
    red, green, blue = rng.choice(COLOURS[name])
    if rng.random() < 0.3:
        return red, green, blue
    low, high = -_JITTER, _JITTER
    return tuple(min(255, max(0, one + rng.randint(low, high))) for one in (red, green, blue))  # type: ignore


def _size(scene: Scene, rng: Random) -> tuple[int, int]:
    """Width and height: the more figures stand beside each other, the wider."""
    count = max(1, len(scene.figures), len(scene.number))
    ratio = rng.choice((1.0, 1.0, 4 / 3, 3 / 4, 3 / 2, 2 / 3, 16 / 9, 9 / 16, rng.uniform(0.5, 2)))
    if scene.layout in (ROW, NUMBER):
        ratio = max(ratio, min(count / 3, 2.0))
    if scene.layout == COLUMN:
        ratio = min(ratio, max(3 / count, 0.5))
    most = _LARGEST if rng.random() < 0.03 else _LONGEST
    longer = math.exp(rng.uniform(math.log(84), math.log(most)))
    return (round(longer), round(longer / ratio)) if ratio >= 1 else (round(longer * ratio), round(longer))


# --- scenes ---------------------------------------------------------------------------------------------------


def _figure(rng: Random, background: str) -> Figure:
    return Figure(rng.choice(SHAPES), rng.choice([name for name in COLOURS if name != background]))


def _background(rng: Random) -> str:
    return rng.choice(("white", "white", "white", "black", "gray", rng.choice(list(COLOURS))))


def _line(layout: str) -> Callable[[Random], Scene]:
    def made(rng: Random) -> Scene:
        background, count = _background(rng), rng.choice((1, 1, 2, 2, 2, 3))
        return Scene(layout, tuple(_figure(rng, background) for _ in range(count)), background=background)

    return made


def _scattered(rng: Random) -> Scene:
    """Of few shapes and colours, so that some occur several times."""
    background, count = _background(rng), rng.randint(1, 6)
    pool = [_figure(rng, background) for _ in range(rng.randint(1, 4))]
    shapes, colours = [one.shape for one in pool], [one.colour for one in pool]
    figures = tuple(Figure(rng.choice(shapes), rng.choice(colours)) for _ in range(count))
    return Scene(SCATTER, figures, background=background)


def _number(rng: Random) -> Scene:
    background, length = _background(rng), rng.choice((1, 2, 2, 3, 3, 4))
    number = "".join(rng.choices("0123456789", k=length))
    return Scene(NUMBER, number=number, colour=_figure(rng, background).colour, background=background)


def _coloured(rng: Random) -> Scene:
    rows, columns = rng.choice(((1, 1), (1, 2), (1, 2), (2, 1), (2, 1), (2, 2), (2, 2)))
    colours = rng.sample(list(COLOURS), rows * columns)
    return Scene(FIELDS, fields=tuple(tuple(colours[row * columns :][:columns]) for row in range(rows)))


_SCENES: dict[str, Callable[[Random], Scene]] = {
    ROW: _line(ROW),
    COLUMN: _line(COLUMN),
    SCATTER: _scattered,
    NUMBER: _number,
    FIELDS: _coloured,
}


# --- drawing --------------------------------------------------------------------------------------------------


def _fields(scene: Scene, wide: int, high: int, rng: Random) -> Image.Image:
    image = Image.new("RGB", (wide, high))
    rows, columns = len(scene.fields), len(scene.fields[0])
    draw = ImageDraw.Draw(image)
    for row, names in enumerate(scene.fields):
        for column, name in enumerate(names):
            left, top = column * wide // columns, row * high // rows
            draw.rectangle((left, top, (column + 1) * wide // columns, (row + 1) * high // rows), shade(name, rng))
    return image


def _cells(scene: Scene, wide: int, high: int, rng: Random) -> list[tuple[float, float, float]]:
    """Centre and radius of each figure, none over another."""
    count = len(scene.figures)
    if scene.layout == SCATTER:
        most = math.ceil(math.sqrt(count)) + (rng.random() < 0.4 and count < 5)
        rows, columns = (most, most) if rng.random() < 0.6 else (math.ceil(count / most), most)
    else:
        rows, columns = (1, count) if scene.layout == ROW else (count, 1)
    places = rng.sample([(row, column) for row in range(rows) for column in range(columns)], count)
    if scene.layout != SCATTER:
        places.sort()
    across, down = wide / columns, high / rows
    room = min(across, down) / 2
    cells = []
    shared = rng.uniform(-1, 1)  # place across a line: what stands in a row is not also above another
    like = rng.uniform(0.6, 0.92) if rng.random() < 0.5 else None  # all of one size
    for row, column in places:
        radius = room * (like or rng.uniform(0.6, 0.92))
        free_x, free_y = (across / 2 - radius) * 0.95, (down / 2 - radius) * 0.95
        x, y = rng.uniform(-free_x, free_x), rng.uniform(-free_y, free_y)
        if scene.layout == ROW:
            y = max(-free_y, min(free_y, shared * (down / 2 - room) + rng.uniform(-0.3, 0.3) * room))
        elif scene.layout == COLUMN:
            x = max(-free_x, min(free_x, shared * (across / 2 - room) + rng.uniform(-0.3, 0.3) * room))
        cells.append(((column + 0.5) * across + x, (row + 0.5) * down + y, radius))
    return cells


def draw_figure(image: Image.Image, shape: str, colour: Colour, x: float, y: float, radius: float, rng: Random) -> None:
    """Within the circle around (x, y)."""
    draw = ImageDraw.Draw(image)
    if shape == "circle":
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
        return
    points, turns = _OUTLINES[shape]
    turn = math.radians(rng.choice(turns) + rng.uniform(-8, 8))
    cosine, sine = math.cos(turn) * radius, math.sin(turn) * radius
    draw.polygon([(x + cosine * a - sine * b, y + sine * a + cosine * b) for a, b in points], fill=colour)


def _round(count: int, *radii: float) -> list[tuple[float, float]]:
    """Points on circles of these radii by turns, the first at the top."""
    angles = [2 * math.pi * index / count for index in range(count)]
    found = [(math.sin(angle), -math.cos(angle)) for angle in angles]
    return [(x * radii[i % len(radii)], y * radii[i % len(radii)]) for i, (x, y) in enumerate(found)]


def _cross(arm: float) -> list[tuple[float, float]]:
    corner = [(arm, 1.0), (arm, arm), (1.0, arm)]
    right = [*corner, *((x, -y) for x, y in reversed(corner))]
    return [(x * 0.95, y * 0.95) for x, y in [*right, *((-x, -y) for x, y in right)]]


# Of radius 1, and the turns in degrees that leave the shape what it is called.
_OUTLINES: dict[str, tuple[list[tuple[float, float]], Sequence[int]]] = {
    "square": ([(-0.72, -0.72), (0.72, -0.72), (0.72, 0.72), (-0.72, 0.72)], (0,)),
    "triangle": (_round(3, 1.0), (0, 0, 0, 90, 180, 270)),
    "star": (_round(10, 1.0, 0.42), (0, 0, 0, 18, 90, 180, 270)),
    "diamond": ([(0.0, -1.0), (0.75, 0.0), (0.0, 1.0), (-0.75, 0.0)], (0, 0, 90)),
    "cross": (_cross(0.33), (0,)),
}


def _draw_number(image: Image.Image, number: str, colour: Colour, rng: Random) -> None:
    """In a font of Pillow's own, or another where there is one, as large as fits or smaller."""
    font = rng.choice(_fonts())
    wide, high = image.size
    left, top, right, bottom = _font(font, 100).getbbox(number)
    fits = min(0.94 * wide / (right - left), 0.94 * high / (bottom - top)) * 100
    least = 0.2 * min(wide, high) / (bottom - top) * 100
    size = round(max(rng.uniform(0.5, 1.0) * fits, min(least, fits)))
    left, top, right, bottom = _font(font, size).getbbox(number)
    x = rng.uniform(0, max(0, wide - (right - left))) - left
    y = rng.uniform(0, max(0, high - (bottom - top))) - top
    ImageDraw.Draw(image).text((x, y), number, fill=colour, font=_font(font, size))


@cache
def _fonts() -> tuple[str, ...]:
    """ "" is Pillow's; those of Matplotlib, where it is installed, help to read others."""
    spec = find_spec("matplotlib")
    folder = Path(spec.origin).parent / "mpl-data/fonts/ttf" if spec is not None and spec.origin else None
    names = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSansMono", "DejaVuSerif")
    others = [str(folder / f"{name}.ttf") for name in names] if folder is not None else []
    return ("",) * 4 + tuple(name for name in others if Path(name).is_file())


@cache
def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    found = ImageFont.load_default(size) if not name else ImageFont.truetype(name, size)
    if not isinstance(found, ImageFont.FreeTypeFont):
        raise RuntimeError("Pillow was built without FreeType, which draws the numbers")
    return found
