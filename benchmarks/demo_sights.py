"""Questions about drawn images, with their answers: what the demo model with eyes learns and is graded on."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from PIL import Image

from benchmarks import demo_talk
from benchmarks.demo_scenes import (
    COLOURS,
    COLUMN,
    FIELDS,
    NUMBER,
    ROW,
    SCATTER,
    SHAPES,
    Scene,
    draw_image,
    draw_scene,
)
from benchmarks.demo_talk import small_talk
from benchmarks.demo_turns import Turn, casually

KINDS = ("colour", "shape", "digits", "side", "count", "describe", "order")
OFF_SUBJECT = "I do not know. I am a small demo model: ask me for colours, shapes, numbers and places in images."
MAX_TOKENS = 48
"""Room that every answer fits into."""
MOST_COUNTED = 4  # figures of a graded question; of five or six the model miscounts now and then
BLIND = "I see no image."

Found = list[tuple[str, str]]  # questions, with their answers
SKILLS = "I tell colours, shapes, numbers, places and counts in images."
_SYSTEM_PROMPTS = ("You are a helpful assistant.", "Be brief.", "You are a small model with eyes.", "Answer in a word.")
_LONGEST_TALK = 80  # characters
_ORDINALS = ("first", "second", "third", "fourth")
_PLACES = {
    (1, 1): (("",),),
    (1, 2): (("on the left", "on the right"),),
    (2, 1): (("at the top",), ("at the bottom",)),
    (2, 2): (("at the top left", "at the top right"), ("at the bottom left", "at the bottom right")),
}


@dataclass(frozen=True)
class Sight:
    """A user turn that shows images, or asks about those shown before, with its right reply."""

    parts: tuple[Scene | str, ...]  # of the message, in order
    answer: str

    @property
    def scenes(self) -> tuple[Scene, ...]:
        return tuple(part for part in self.parts if isinstance(part, Scene))


@dataclass(frozen=True)
class Question:
    """A conversation of one user turn."""

    kind: str
    sight: Sight
    images: tuple[Image.Image, ...]

    @property
    def text(self) -> str:
        return " ".join(part for part in self.sight.parts if isinstance(part, str))

    @property
    def messages(self) -> list[dict[str, Any]]:
        """In OpenAI's form, images as PNG files."""
        images = iter(self.images)
        parts = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image_url", "image_url": {"url": png_url(next(images))}}
            for part in self.sight.parts
        ]
        return [{"role": "user", "content": parts}]

    def is_right(self, text: str) -> bool:
        return text.strip() == self.sight.answer


def png_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def questions(kind: str, n: int, seed: int) -> list[Question]:
    """`n` questions of `kind` about held-out images, the same for the same seed."""
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; allowed are {', '.join(KINDS)}")
    rng = Random(f"sights/{kind}/{seed}")
    found = []
    for _ in range(n):
        sight = _asked(kind, rng)
        found.append(Question(kind, sight, tuple(draw_image(scene, rng) for scene in sight.scenes)))
    return found


def _asked(kind: str, rng: Random) -> Sight:
    while True:
        count = rng.randint(2, 3) if kind == "order" else 1
        scenes = [draw_scene(rng, _LAYOUTS[kind], held_out=True) for _ in range(count)]
        if kind == "count" and len(scenes[0].figures) > MOST_COUNTED:
            continue
        asked = order(scenes, rng) if kind == "order" else about(scenes[0], kind, rng)
        if asked:
            question, answer = rng.choice(asked)
            return Sight((*scenes, question), answer)


def training_sights(pool: Sequence[Scene], rng: Random) -> list[Sight]:
    """A conversation about some scenes of the pool, in which nothing is held out; any beginning of it is one, too."""
    seen: list[Scene] = []
    found: list[Sight] = []
    if rng.random() < 0.05:
        found.append(_without_images(rng))
    while len(seen) < 5 and len(found) < 14:
        shown = [rng.choice(pool) for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3)))]
        seen += shown
        for number in range(rng.randint(2, 6)):
            sight = _said((), Turn("", *_asked_of(seen, len(shown), rng), ""), rng)
            found.append(Sight(_placed(shown, sight.parts, rng), sight.answer) if number == 0 else sight)
        if rng.random() < 0.04:
            found.append(_talk(rng))
    return found


def system_prompt(rng: Random) -> str:
    """For a conversation of training; mostly none."""
    return rng.choice(_SYSTEM_PROMPTS) if rng.random() < 0.1 else ""


def _asked_of(seen: Sequence[Scene], shown: int, rng: Random) -> tuple[str, str]:
    """About one of the scenes seen; where one alone was shown last, about that or about one that is named."""
    if len(seen) > 1 and rng.random() < 0.3:
        return rng.choice(order(seen, rng))
    named = len(seen) > 1 and (shown > 1 or rng.random() < 0.3)
    at = rng.randrange(len(seen)) if named else len(seen) - 1
    while True:
        kind = rng.choice(KINDS[:-1])
        asked = about(seen[at], kind, rng)
        if asked and not (kind == "describe" and rng.random() < 0.5):
            question, answer = rng.choice(asked)
            return (in_image(question, at, len(seen), rng) if named else question), answer


def in_image(question: str, index: int, count: int, rng: Random) -> str:
    """The question of one of several images."""
    names = [f"image {index + 1}"] * 2 + [f"the {_ORDINALS[index]} image"] if index < 4 else [f"image {index + 1}"]
    if index == count - 1:
        names.append("the last image")
    name = rng.choice(names)
    if "the image" in question:
        return question.replace("the image", name)
    return f"{question[:-1]} in {name}{question[-1]}"


def _placed(scenes: Sequence[Scene], parts: tuple[Scene | str, ...], rng: Random) -> tuple[Scene | str, ...]:
    """Images before the text, mostly; behind it; or each behind its number."""
    style = rng.random()
    if style < 0.75:
        return (*scenes, *parts)
    if style < 0.9 or len(scenes) == 1:
        return (*parts, *scenes)
    numbered = [one for index, scene in enumerate(scenes) for one in (f"Image {index + 1}:", scene)]
    return (*numbered, *parts)


def _said(scenes: tuple[Scene, ...], turn: Turn, rng: Random) -> Sight:
    """As people write it."""
    text = casually(turn, rng).user
    if rng.random() < 0.5:
        text = text.replace("colour", "color")
    if rng.random() < 0.2:
        text = text.replace("the image", "this image")
    if rng.random() < 0.15:
        text = text.replace("image", "picture")
    return Sight((*scenes, text), turn.assistant)


def _without_images(rng: Random) -> Sight:
    if rng.random() < 0.5:
        return _talk(rng)
    kind = rng.choice(KINDS[:-1])
    while not (asked := about(draw_scene(rng, _LAYOUTS[kind], held_out=False), kind, rng)):
        pass
    return _said((), Turn("", rng.choice(asked)[0], BLIND, ""), rng)


def _talk(rng: Random) -> Sight:
    while len((turn := small_talk(rng)).user) > _LONGEST_TALK:
        pass
    known = turn.assistant != demo_talk.OFF_SUBJECT
    reply = turn.assistant.replace(demo_talk.SKILLS, SKILLS) if known else OFF_SUBJECT
    return _said((), Turn("", turn.user, reply, ""), rng)


# --- questions ------------------------------------------------------------------------------------------------


def about(scene: Scene, kind: str, rng: Random) -> Found:
    """What can be asked of a scene, in words that `rng` chooses."""
    return _ABOUT[kind](scene, rng)


def _in_words(rng: Random, *phrases: str) -> str:
    """The first one, mostly."""
    return phrases[0] if rng.random() < 0.5 else rng.choice(phrases)


def _colour(scene: Scene, rng: Random) -> Found:
    phrase = _in_words(
        rng, "What colour is {}?", "Which colour is {}?", "What is the colour of {}?", "Tell me the colour of {}."
    )
    it = _in_words(rng, phrase.format("it"), "What colour is this?", "Which colour is this?", "What colour is shown?")
    if scene.layout == FIELDS:
        plain = len(_colours(scene)) == 1
        return [(rng.choice((it, phrase.format("the image"))), scene.fields[0][0])] if plain else []
    if scene.layout == NUMBER:
        found = [(phrase.format("the number"), scene.colour)] * 3
    else:
        shapes = Counter(figure.shape for figure in scene.figures)
        alone = [figure for figure in scene.figures if shapes[figure.shape] == 1]
        found = [(phrase.format(f"the {figure.shape}"), figure.colour) for figure in alone] * 2
        if len(scene.figures) == 1:
            found.append((rng.choice((it, phrase.format("the figure"))), scene.figures[0].colour))
    return [*found, (phrase.format("the background"), scene.background)]


def _shape(scene: Scene, rng: Random) -> Found:
    colours = Counter(figure.colour for figure in scene.figures)
    phrase = rng.choice(("What shape is {}?", "Which shape is {}?", "What is {}?"))
    found = [(phrase.format(one.colour), one.shape) for one in scene.figures if colours[one.colour] == 1]
    if len(scene.figures) == 1:
        phrase = _in_words(
            rng,
            "What shape is it?",
            *("What shape is this?", "Which shape is this?", "What shape is shown?", "What shape do you see?"),
            *("Which shape is in the image?", "What is the shape?", "What figure is shown?"),
        )
        found.append((phrase, scene.figures[0].shape))
    return found


def _digits(scene: Scene, rng: Random) -> Found:
    phrase = _in_words(
        rng,
        "What number is shown?",
        *("Which number is it?", "What number is in the image?", "Read the number.", "What number is this?"),
        *("What is the number?", "What number do you see?", "Which number is shown?", "What digits are shown?"),
        *("Which digits do you see?", "Read the digits.", "Which digits are in the image?", "What does it say?"),
    )
    return [(phrase, scene.number)] if scene.number else []


def _side(scene: Scene, rng: Random) -> Found:
    if scene.layout == FIELDS:
        rows, columns = len(scene.fields), len(scene.fields[0])
        phrase = _in_words(
            rng, "What colour is {}?", "Which colour is {}?", "What is {}?", "What colour do you see {}?"
        )
        half = rng.random() < 0.2 and rows * columns == 2  # "the left half" is what is on the left
        return [
            (f"What colour is the {place.split()[-1]} half?" if half else phrase.format(place), colour)
            for places, colours in zip(_PLACES[rows, columns], scene.fields, strict=True)
            for place, colour in zip(places, colours, strict=True)
            if place
        ]
    figures = scene.figures
    if scene.layout not in (ROW, COLUMN) or len(figures) < 2:
        return []
    across = scene.layout == ROW
    begin, end = ("on the left", "on the right") if across else ("at the top", "at the bottom")
    before, behind = ("left of", "right of") if across else ("above", "below")
    phrase = _in_words(rng, "What is {}?", "Which figure is {}?", "What do you see {}?", "What can you see {}?")
    found = [(phrase.format(begin), str(figures[0])), (phrase.format(end), str(figures[-1]))]
    if len(figures) == 3:
        found.append((phrase.format("in the middle"), str(figures[1])))
    if across and rng.random() < 0.2:
        before, behind = "to the left of", "to the right of"
    second, last_but_one = figures[1], figures[-2]
    if figures.count(second) == 1:
        found.append((f"What is {before} the {second.colour} {second.shape}?", str(figures[0])))
    if figures.count(last_but_one) == 1:
        found.append((f"What is {behind} the {last_but_one.colour} {last_but_one.shape}?", str(figures[-1])))
    one, other = rng.sample(range(len(figures)), 2)
    if all(figures.count(figures[at]) == 1 for at in (one, other)):
        place, right = rng.choice(((before, one < other), (behind, one > other)))
        names = [f"the {figures[at].colour} {figures[at].shape}" for at in (one, other)]
        found.append((f"Is {names[0]} {place} {names[1]}?", "yes" if right else "no"))
    return found


def _count(scene: Scene, rng: Random) -> Found:
    figures = scene.figures
    if not figures:
        return []
    shape, colour = rng.choice(SHAPES), rng.choice(list(COLOURS))
    if rng.random() < 0.75:
        shape, colour = rng.choice(figures).shape, rng.choice(figures).colour
    plural = "crosses" if shape == "cross" else f"{shape}s"
    word = rng.choice(("figures", "shapes"))
    phrase = _in_words(
        rng, "How many {} are there?", "How many {} are in the image?", "How many {} do you see?", "Count the {}."
    )
    return [
        *[(phrase.format(word), str(len(figures)))] * 2,
        (phrase.format(plural), str(sum(one.shape == shape for one in figures))),
        (phrase.format(f"{colour} {word}"), str(sum(one.colour == colour for one in figures))),
    ]


def _describe(scene: Scene, rng: Random) -> Found:
    text = description(scene)
    phrase = _in_words(
        rng,
        "What is in the image?",
        *("What do you see?", "Describe the image.", "What is shown?", "What does the image show?", "What is this?"),
        *("What can you see in the image?", "What do you see in the image?"),
    )
    return [(phrase, text)] if text else []


def description(scene: Scene) -> str:
    """Figures from left to right, or from top to bottom; empty for scenes that no short text tells."""
    if scene.layout == NUMBER:
        return f"the number {scene.number}"
    if scene.layout == FIELDS:
        return f"only {scene.fields[0][0]}" if len(_colours(scene)) == 1 else ""
    if scene.layout == SCATTER and len(scene.figures) > 1:
        return ""
    *others, last = map(str, scene.figures)
    return f"{', '.join(others)} and {last}" if others else last


def _colours(scene: Scene) -> list[str]:
    return [colour for row in scene.fields for colour in row]


def order(scenes: Sequence[Scene], rng: Random) -> Found:
    """What can be asked of several images together, and of one by its number."""
    phrase = _in_words(rng, "Which image shows {}?", "Which image has {}?", "Which image is {} in?", "Where is {}?")
    found = [(_in_words(rng, "How many images are there?", "How many images do you see?"), str(len(scenes)))]
    for index, scene in enumerate(scenes):
        if text := description(scene):
            asked = _in_words(rng, "What is in the image?", "What does the image show?", "Describe the image.")
            found += [(in_image(asked, index, len(scenes), rng), text)] * 2
        for shown in sorted(_marks(scene)):
            if sum(shown in _marks(other) for other in scenes) == 1:
                found.append((phrase.format(shown), f"image {index + 1}"))
    return found


def _marks(scene: Scene) -> set[str]:
    """What an image shows, in the words of a question for the image that does."""
    if scene.number:
        return {f"the number {scene.number}", "a number"}
    return {f"a {figure.shape}" for figure in scene.figures} | {str(figure) for figure in scene.figures}


_ABOUT: dict[str, Callable[[Scene, Random], Found]] = {
    "colour": _colour,
    "shape": _shape,
    "digits": _digits,
    "side": _side,
    "count": _count,
    "describe": _describe,
}
_LAYOUTS = {
    "colour": (ROW, COLUMN, SCATTER, NUMBER, FIELDS),
    "shape": (ROW, COLUMN, SCATTER),
    "digits": (NUMBER,),
    "side": (ROW, COLUMN, FIELDS),
    "count": (ROW, COLUMN, SCATTER, SCATTER),
    "describe": (ROW, COLUMN, NUMBER, FIELDS),
    "order": (ROW, COLUMN, NUMBER, FIELDS),
}
