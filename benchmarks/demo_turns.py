"""Single turns whose right replies are known: sums, counting, and lists of words."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from benchmarks.demo_words import WORD_POOLS

_HELD_OUT_SHARE = 16  # one content in so many is kept out of training


@dataclass(frozen=True)
class Turn:
    """One user turn with its right reply; `content` is what the split into training and held-out goes by.

    Of a turn that takes a tool, the model first says `call` and is told `result`.
    """

    kind: str
    user: str
    assistant: str
    content: str
    call: str = ""
    result: str = ""


def is_held_out(content: str) -> bool:
    """Whether a turn of this content is kept for grading. A checksum decides, so every run agrees."""
    return zlib.crc32(content.encode("utf-8")) % _HELD_OUT_SHARE == 0


def arithmetic_turn(rng: Random, held_out: bool | None = None) -> Turn:
    """An addition or subtraction of numbers up to three digits; a difference may be negative."""

    def draw() -> Turn:
        a, b = operand(rng), operand(rng)
        minus = rng.random() < 0.5
        symbol, result = ("-", a - b) if minus else ("+", a + b)
        phrase = rng.choice(_DIFFERENCE_PHRASES if minus else _SUM_PHRASES)
        reply = f"{a} {symbol} {b} = {result}."
        return Turn("arithmetic", phrase.format(a=a, b=b, s=symbol), reply, f"arithmetic {a}{symbol}{b}")

    return draw_on_side(draw, held_out)


_PHRASES = (
    "What is {a} {s} {b}?",
    "What is {a} {s} {b}?",
    "What is {a}{s}{b}?",
    "{a} {s} {b}",
    "{a} {s} {b} = ?",
    "{a}{s}{b}",
    "{a} {s} {b} =",
    "Calculate {a} {s} {b}.",
    "Please compute {a} {s} {b}.",
    "{a} {s} {b}?",
)
_SUM_PHRASES = (
    *_PHRASES,
    "What is {a} plus {b}?",
    "How much is {a} plus {b}?",
    "Add {a} and {b}.",
    "What is the sum of {a} and {b}?",
)
_DIFFERENCE_PHRASES = (
    *_PHRASES,
    "What is {a} minus {b}?",
    "How much is {a} minus {b}?",
    "Subtract {b} from {a}.",
    "What is the difference {a} minus {b}?",
)


def counting_turn(rng: Random, held_out: bool | None = None, span: int = 300) -> Turn:
    """Counting upwards over at most `span` numbers within 1 to 999, all on one line."""

    def draw() -> Turn:
        length = rng.randint(2, span)
        first = 1 if rng.random() < 0.3 else rng.randint(1, 1000 - length)
        last = first + length - 1
        reply = ", ".join(map(str, range(first, last + 1)))
        phrases = (*_COUNT_PHRASES, *_COUNT_FROM_ONE) if first == 1 else _COUNT_PHRASES
        user = rng.choice(phrases).format(a=first, b=last)
        return Turn("counting", user, reply, f"counting {first}..{last}")

    return draw_on_side(draw, held_out)


_COUNT_PHRASES = (
    "Count from {a} to {b}.",
    "Count from {a} to {b}.",
    "Please count from {a} to {b}.",
    "Count from {a} up to {b}.",
    "List the numbers from {a} to {b}.",
    "Count from {a} to {b}",
    "Count from {a} to {b} please",
    "Can you count from {a} to {b}?",
    "Count {a} to {b}.",
)
_COUNT_FROM_ONE = ("Count to {b}.", "Count to {b}", "Count up to {b}.", "Please count to {b}.", "Can you count to {b}?")


def repeat_turn(rng: Random, held_out: bool | None = None, made_up: float = 0.0) -> Turn:
    """Saying a list of words again; a share `made_up` of the words is random letters or symbols."""

    def draw() -> Turn:
        text = ", ".join(_word_list(rng, made_up))
        return Turn("repeat", rng.choice(_REPEAT_PHRASES).format(text), text, f"repeat {text}")

    return draw_on_side(draw, held_out)


_REPEAT_PHRASES = (
    "Repeat these words: {}",
    "Repeat: {}",
    "Please repeat this list: {}",
    "Say these words again: {}",
    "Repeat after me: {}",
)


def reverse_turn(rng: Random, held_out: bool | None = None, made_up: float = 0.0) -> Turn:
    """Saying a list of words in the opposite order (the words themselves stay as they are)."""

    def draw() -> Turn:
        words = _word_list(rng, made_up)
        user = rng.choice(_REVERSE_PHRASES).format(", ".join(words))
        return Turn("reverse", user, ", ".join(reversed(words)), f"reverse {', '.join(words)}")

    return draw_on_side(draw, held_out)


_REVERSE_PHRASES = (
    "Reverse the order of these words: {}",
    "Reverse: {}",
    "Please reverse this list: {}",
    "Say these words in reverse order: {}",
)


def words_turn(rng: Random, held_out: bool | None = None, made_up: float = 0.0) -> Turn:
    maker = repeat_turn if rng.random() < 0.35 else reverse_turn
    return maker(rng, held_out, made_up)


def _word_list(rng: Random, made_up: float) -> list[str]:
    """2 to 10 different words, so that what follows (or precedes) each is unambiguous."""
    pool_share = rng.random()
    words: dict[str, None] = {}
    length = rng.randint(2, 10)
    only = rng.choice(WORD_POOLS) if pool_share < 0.3 else None
    while len(words) < length:
        if made_up and rng.random() < made_up:
            words[made_up_word(rng)] = None
        else:
            words[rng.choice(only or rng.choice(WORD_POOLS))] = None
    return list(words)


def made_up_word(rng: Random) -> str:
    style = rng.random()
    if style < 0.6:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 8)))
    if style < 0.7:
        return "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZäéñöøß0123456789", k=rng.randint(2, 6)))
    first, last = rng.choice(_SCRIPTS)
    most = 2 if first > 0xFFFF else 5
    return "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, most)))


# Latin with accents, Greek, Cyrillic, Hebrew, Arabic, Hindi, Thai, kana, Chinese (twice), Korean, symbols, emoji
_SCRIPTS = (
    *((0xC0, 0x17F), (0x391, 0x3C9), (0x410, 0x44F), (0x5D0, 0x5EA), (0x621, 0x64A), (0x905, 0x939)),
    *((0xE01, 0xE2E), (0x3041, 0x30FA), (0x4E00, 0x9FA5), (0x4E00, 0x9FA5), (0xAC00, 0xD7A3)),
    *((0x2600, 0x27BF), (0x1F300, 0x1F64F), (0x1F680, 0x1F6D2), (0x1F90C, 0x1F9FF), (0x1FA70, 0x1FAD6)),
)


def casually(turn: Turn, rng: Random) -> Turn:
    """The turn, one time in eight as people type in haste: without a capital, a full stop or a question mark."""
    if rng.random() > 0.125:
        return turn
    user = turn.user.rstrip("?.!") if rng.random() < 0.7 else turn.user
    return replace(turn, user=user[:1].lower() + user[1:] if rng.random() < 0.7 else user)


def operand(rng: Random) -> int:
    """Numbers of one, two and three digits, the long (harder, more) ones most often."""
    return rng.randint(0, rng.choice((9, 99, 999, 999, 999)))


def draw_on_side(draw: Callable[[], Turn], held_out: bool | None) -> Turn:
    while True:
        turn = draw()
        if held_out is None or is_held_out(turn.content) == held_out:
            return turn
