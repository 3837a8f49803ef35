"""Generated conversations whose answers can be checked: what the demo model learns and is graded on."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from benchmarks.demo_words import NUMBER_FACTS, PLAIN, WORD_FACTS, WORD_POOLS

KINDS = ("arithmetic", "counting", "repeat", "reverse", "recall", "multi")

MAX_TOKENS = 2000
"""Room that every answer fits into, in tokens; the longest (300 numbers of three digits) needs 1,200."""

MAX_HISTORY = 3000
"""Longest way back to a fact that a question asks for, in estimated tokens."""

_HELD_OUT_SHARE = 16  # one content in so many is kept out of training


@dataclass(frozen=True)
class Turn:
    """One user turn with its right reply; `content` is what the split into training and held-out goes by."""

    kind: str
    user: str
    assistant: str
    content: str


@dataclass(frozen=True)
class Fact:
    """Something a user tells about themselves: «my `key` is `value`»."""

    key: str
    value: str

    @property
    def content(self) -> str:
        return f"recall {self.key}={self.value}"


@dataclass(frozen=True)
class Question:
    """A conversation that ends with a user turn, and what a right reply to it is.

    `kind` is the kind asked for; `check` the kind of the last turn (they differ for "multi" alone);
    `answer` is the whole expected reply, `expected` the part of it that a reply must hold.
    """

    kind: str
    messages: list[dict[str, str]]
    answer: str
    check: str
    expected: str

    def is_right(self, text: str) -> bool:
        """Whether `text` holds the right answer; wording around a number or a fact does not matter."""
        return _CHECKS[self.check](text, self.expected)


def questions(kind: str, n: int, seed: int, held_out: bool = True) -> list[Question]:
    """`n` questions of `kind`, the same for the same seed; held-out ones never appear in training.

    Raises ValueError for a kind that is not in KINDS.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; allowed are {', '.join(KINDS)}")
    rng = Random(f"{kind}/{seed}/{held_out}")
    return [_question(kind, rng, held_out) for _ in range(n)]


def is_held_out(content: str) -> bool:
    """Whether a turn of this content is kept for grading. A checksum decides, so every run agrees."""
    return zlib.crc32(content.encode("utf-8")) % _HELD_OUT_SHARE == 0


def training_conversation(rng: Random) -> list[dict[str, str]]:
    """One conversation for the trainer, at most some 3,800 tokens long, free of held-out contents."""
    style = rng.random()
    turns: list[Turn]
    if style < 0.42:
        turns = [arithmetic_turn(rng, False) for _ in range(rng.randint(1, 10))]
    elif style < 0.70:
        turns = [_words_turn(rng, False, made_up=0.15) for _ in range(rng.randint(1, 4))]
    elif style < 0.78:
        before = _mixed_turns(rng, rng.randint(0, 600), small_talk=True) if rng.random() < 0.4 else []
        turns = [*before, counting_turn(rng, False)]
    elif style < 0.80:
        turns = [_small_talk(rng) for _ in range(rng.randint(1, 2))]
    elif style < 0.92:
        turns = _mixed_turns(rng, budget=rng.randint(50, 700), small_talk=True)
    else:
        turns = _mixed_turns(rng, budget=rng.randint(500, 3300), small_talk=True)
    return _messages([_casually(turn, rng) for turn in turns], rng)


def estimate_tokens(text: str) -> int:
    """About how many tokens of the demo model's tokenizer `text` takes."""
    return len(_PIECES.findall(text)) + (len(text.encode("utf-8")) - len(text)) // 2


_PIECES = re.compile(r", |\d|[^\W\d]+|[^\w\s]|\s")


def arithmetic_turn(rng: Random, held_out: bool | None = None) -> Turn:
    """An addition or subtraction of numbers up to three digits; a difference may be negative."""

    def draw() -> Turn:
        a, b = _operand(rng), _operand(rng)
        minus = rng.random() < 0.5
        symbol, result = ("-", a - b) if minus else ("+", a + b)
        phrase = rng.choice(_DIFFERENCE_PHRASES if minus else _SUM_PHRASES)
        reply = f"{a} {symbol} {b} = {result}."
        return Turn("arithmetic", phrase.format(a=a, b=b, s=symbol), reply, f"arithmetic {a}{symbol}{b}")

    return _draw_on_side(draw, held_out)


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
        user = rng.choice(_COUNT_PHRASES).format(a=first, b=last)
        return Turn("counting", user, reply, f"counting {first}..{last}")

    return _draw_on_side(draw, held_out)


_COUNT_PHRASES = (
    "Count from {a} to {b}.",
    "Count from {a} to {b}.",
    "Please count from {a} to {b}.",
    "Count from {a} up to {b}.",
    "List the numbers from {a} to {b}.",
    "Count from {a} to {b}",
)


def repeat_turn(rng: Random, held_out: bool | None = None, made_up: float = 0.0) -> Turn:
    """Saying a list of words again; a share `made_up` of the words is random letters or symbols."""

    def draw() -> Turn:
        text = ", ".join(_word_list(rng, made_up))
        return Turn("repeat", rng.choice(_REPEAT_PHRASES).format(text), text, f"repeat {text}")

    return _draw_on_side(draw, held_out)


_REPEAT_PHRASES = (
    "Repeat these words: {}",
    "Repeat: {}",
    "Please repeat this list: {}",
    "Say these words again: {}",
)


def reverse_turn(rng: Random, held_out: bool | None = None, made_up: float = 0.0) -> Turn:
    """Saying a list of words in the opposite order (the words themselves stay as they are)."""

    def draw() -> Turn:
        words = _word_list(rng, made_up)
        user = rng.choice(_REVERSE_PHRASES).format(", ".join(words))
        return Turn("reverse", user, ", ".join(reversed(words)), f"reverse {', '.join(words)}")

    return _draw_on_side(draw, held_out)


_REVERSE_PHRASES = (
    "Reverse the order of these words: {}",
    "Reverse: {}",
    "Please reverse this list: {}",
    "Say these words in reverse order: {}",
)


def _words_turn(rng: Random, held_out: bool | None = None, made_up: float = 0.0) -> Turn:
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
            words[_made_up_word(rng)] = None
        else:
            words[rng.choice(only or rng.choice(WORD_POOLS))] = None
    return list(words)


def _made_up_word(rng: Random) -> str:
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


def _draw_fact(rng: Random, taken: set[str], held_out: bool | None, made_up: float = 0.0) -> Fact:
    """A fact of a key not yet in `taken`, on the wanted side of the split.

    A share `made_up` of the facts is about anything and holds any word or number.
    """
    while True:
        if made_up and rng.random() < made_up:
            key = rng.choice(("", "favourite ", "new ", "old ")) + rng.choice(PLAIN)
            value = rng.choice((_made_up_word(rng), rng.choice(rng.choice(WORD_POOLS)), str(rng.randint(0, 9999))))
        elif rng.random() < 0.3:
            key, most = rng.choice(NUMBER_FACTS)
            value = str(rng.randint(most // 10 + 1, most))
        else:
            key, values = rng.choice(WORD_FACTS)
            value = rng.choice(values)
        fact = Fact(key, value)
        if key not in taken and (held_out is None or is_held_out(fact.content) == held_out):
            taken.add(key)
            return fact


def _tell_turn(facts: list[Fact], rng: Random) -> Turn:
    told = " and ".join(f"my {fact.key} is {fact.value}" for fact in facts)
    opening = rng.choice(("Remember: {}.", "Please remember that {}.", "Remember that {}.", "Note that {}."))
    return Turn("tell", opening.format(told), "OK, I will remember that.", "tell")


def _recall_turn(fact: Fact, rng: Random) -> Turn:
    phrase = rng.choice(("What is my {}?", "What is my {}?", "Tell me my {}.", "Do you remember my {}?"))
    return Turn("recall", phrase.format(fact.key), f"Your {fact.key} is {fact.value}.", fact.content)


def _casually(turn: Turn, rng: Random) -> Turn:
    """The turn, one time in eight as people type in haste: without a capital, a full stop or a question mark."""
    if rng.random() > 0.125:
        return turn
    user = turn.user.rstrip("?.!") if rng.random() < 0.7 else turn.user
    return replace(turn, user=user[:1].lower() + user[1:] if rng.random() < 0.7 else user)


def _small_talk(rng: Random) -> Turn:
    user, reply = rng.choice(_SMALL_TALK)
    return Turn("talk", user, reply, "talk")


_SKILLS = "I can add, subtract, count, repeat and reverse words, and remember what you tell me."
_SMALL_TALK = (
    ("Hello!", f"Hello! {_SKILLS}"),
    ("Hello", f"Hello! {_SKILLS}"),
    ("Hi", f"Hello! {_SKILLS}"),
    ("Who are you?", f"I am a small demo model. {_SKILLS}"),
    ("What can you do?", _SKILLS),
    ("Help", _SKILLS),
    ("How are you?", "I am well, thank you."),
    ("Thank you!", "You are welcome."),
    ("Thanks", "You are welcome."),
    ("Goodbye", "Goodbye!"),
    ("Bye", "Goodbye!"),
)


def _mixed_turns(rng: Random, budget: int, small_talk: bool) -> list[Turn]:
    """Turns of several kinds, about `budget` tokens together, on the training side of the split.

    Facts are told early and now and then; some are asked for between other turns, and all at the end.
    """
    taken: set[str] = set()
    facts = [_draw_fact(rng, taken, False, made_up=0.15) for _ in range(rng.randint(1, 4))]
    open_facts = list(facts)
    turns = _tell_turns(facts, rng)
    used = 0
    while used < budget:
        turn = _filler(rng, budget - used, small_talk)
        if rng.random() < 0.12 and len(taken) < 14:
            told = [_draw_fact(rng, taken, False, made_up=0.15) for _ in range(rng.randint(1, 2))]
            open_facts += told
            turn = _tell_turn(told, rng)
        elif rng.random() < 0.2 and open_facts:
            turn = _recall_turn(rng.choice(open_facts), rng)
        turns.append(turn)
        used += _turn_tokens(turn)
    rng.shuffle(open_facts)
    return turns + [_recall_turn(fact, rng) for fact in open_facts]


def _tell_turns(facts: list[Fact], rng: Random) -> list[Turn]:
    turns = []
    rest = list(facts)
    while rest:
        size = rng.randint(1, 3)
        turns.append(_tell_turn(rest[:size], rng))
        rest = rest[size:]
    return turns


def _filler(rng: Random, room: int, small_talk: bool) -> Turn:
    """A training-side turn of any kind; counting stays short where little room is left."""
    style = rng.random()
    if style < 0.4:
        return arithmetic_turn(rng, False)
    if style < 0.85:
        return _words_turn(rng, False)
    if style < 0.95 or not small_talk:
        return counting_turn(rng, False, span=max(5, min(150, room // 8)))
    return _small_talk(rng)


def _question(kind: str, rng: Random, held_out: bool) -> Question:
    if kind == "recall":
        return _recall_question(rng, held_out)
    if kind == "multi":
        return _multi_question(rng, held_out)
    makers: dict[str, Callable[[Random, bool], Turn]] = {
        "arithmetic": arithmetic_turn,
        "counting": counting_turn,
        "repeat": repeat_turn,
        "reverse": reverse_turn,
    }
    turn = makers[kind](rng, held_out)
    return _ask(kind, [turn], turn.assistant, rng)


def _recall_question(rng: Random, held_out: bool) -> Question:
    """A fact told among others at the start, asked for after 0 to MAX_HISTORY tokens of other turns."""
    taken: set[str] = set()
    facts = [_draw_fact(rng, taken, False) for _ in range(rng.randint(0, 4))]
    asked = _draw_fact(rng, taken, held_out)
    facts.insert(rng.randint(0, len(facts)), asked)
    turns = _tell_turns(facts, rng)
    used, budget = 0, rng.randint(0, MAX_HISTORY)
    while used < budget:
        turn = _filler(rng, budget - used, small_talk=False)
        if used + _turn_tokens(turn) > MAX_HISTORY:
            break
        turns.append(turn)
        used += _turn_tokens(turn)
    return _ask("recall", [*turns, _recall_turn(asked, rng)], asked.value, rng)


def _multi_question(rng: Random, held_out: bool) -> Question:
    """Several kinds in one conversation; the last turn is of any kind and the one that is graded."""
    taken: set[str] = set()
    asked = _draw_fact(rng, taken, held_out)
    other = [_draw_fact(rng, taken, False) for _ in range(rng.randint(0, 2))]
    turns = [arithmetic_turn(rng, False), _tell_turn([asked], rng), _words_turn(rng, False)]
    turns += [_filler(rng, 400, small_talk=False) for _ in range(rng.randint(0, 6))]
    turns += [_tell_turn([fact], rng) for fact in other]
    turns += [_recall_turn(fact, rng) for fact in other]
    rng.shuffle(turns)
    turns.sort(key=lambda turn: turn.kind == "recall")  # a fact is told before it is asked for
    last = rng.choice(("arithmetic", "counting", "repeat", "reverse", "recall"))
    if last == "recall":
        return _ask("multi", [*turns, _recall_turn(asked, rng)], asked.value, rng)
    final = _question(last, rng, held_out)
    turn = Turn(last, final.messages[-1]["content"], final.answer, "")
    return _ask("multi", [*turns, turn], final.expected, rng)


def _ask(kind: str, turns: list[Turn], expected: str, rng: Random) -> Question:
    last = turns[-1]
    return Question(kind, _messages(turns, rng)[:-1], last.assistant, last.kind, expected)


def _messages(turns: list[Turn], rng: Random) -> list[dict[str, str]]:
    messages = []
    if rng.random() < 0.2:
        messages.append({"role": "system", "content": "You are a helpful assistant."})
    for turn in turns:
        messages.append({"role": "user", "content": turn.user})
        messages.append({"role": "assistant", "content": turn.assistant})
    return messages


def _turn_tokens(turn: Turn) -> int:
    frame = 12  # role names and markers of a user and an assistant message
    return estimate_tokens(turn.user) + estimate_tokens(turn.assistant) + frame


def _operand(rng: Random) -> int:
    """Numbers of one, two and three digits, the long (harder, more) ones most often."""
    return rng.randint(0, rng.choice((9, 99, 999, 999, 999)))


def _draw_on_side(draw: Callable[[], Turn], held_out: bool | None) -> Turn:
    while True:
        turn = draw()
        if held_out is None or is_held_out(turn.content) == held_out:
            return turn


def _same_result(text: str, expected: str) -> bool:
    numbers = re.findall(r"-?\d+", text)
    return bool(numbers) and numbers[-1] == re.findall(r"-?\d+", expected)[-1]


def _same_numbers(text: str, expected: str) -> bool:
    return re.findall(r"\d+", text) == re.findall(r"\d+", expected)


def _same_text(text: str, expected: str) -> bool:
    return text.strip() == expected


def _holds_value(text: str, expected: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(expected)}(?!\w)", text) is not None


_CHECKS: dict[str, Callable[[str, str], bool]] = {
    "arithmetic": _same_result,
    "counting": _same_numbers,
    "repeat": _same_text,
    "reverse": _same_text,
    "recall": _holds_value,
}
