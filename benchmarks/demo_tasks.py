"""Generated conversations whose answers can be checked: what the demo model learns and is graded on."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from benchmarks.demo_talk import small_talk
from benchmarks.demo_tools import Toolbox, calls_in, draw_toolbox, system_prompt, tool_turn
from benchmarks.demo_turns import (
    Turn,
    arithmetic_turn,
    casually,
    counting_turn,
    is_held_out,
    made_up_word,
    repeat_turn,
    reverse_turn,
    words_turn,
)
from benchmarks.demo_words import NUMBER_FACTS, PLAIN, WORD_FACTS, WORD_POOLS

KINDS = ("arithmetic", "counting", "repeat", "reverse", "recall", "multi", "tool")

MAX_TOKENS = 2000
"""Room that every answer fits into, in tokens; the longest (300 numbers of three digits) needs 1,200."""

MAX_HISTORY = 3000
"""Longest way back to a fact that a question asks for, in estimated tokens."""


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


def training_conversation(rng: Random) -> list[dict[str, str]]:
    """One conversation for the trainer, at most some 3,800 tokens long, free of held-out contents."""
    style = rng.random()
    turns: list[Turn]
    if style < 0.14:
        return _tool_conversation(rng)
    if style < 0.45:
        turns = [arithmetic_turn(rng, False) for _ in range(rng.randint(1, 10))]
    elif style < 0.69:
        turns = [words_turn(rng, False, made_up=0.15) for _ in range(rng.randint(1, 4))]
    elif style < 0.77:
        before = _mixed_turns(rng, rng.randint(0, 600), talk=True) if rng.random() < 0.4 else []
        turns = [*before, counting_turn(rng, False)]
    elif style < 0.82:
        turns = [small_talk(rng) for _ in range(rng.randint(1, 3))]
    elif style < 0.92:
        turns = _mixed_turns(rng, budget=rng.randint(50, 700), talk=True)
    else:
        turns = _mixed_turns(rng, budget=rng.randint(500, 3300), talk=True)
    return _messages([casually(turn, rng) for turn in turns], rng)


def estimate_tokens(text: str) -> int:
    """About how many tokens of the demo model's tokenizer `text` takes."""
    return len(_PIECES.findall(text)) + (len(text.encode("utf-8")) - len(text)) // 2


_PIECES = re.compile(r", |\d|[^\W\d]+|[^\w\s]|\s")


def _draw_fact(rng: Random, taken: set[str], held_out: bool | None, made_up: float = 0.0) -> Fact:
    """A fact of a key not yet in `taken`, on the wanted side of the split.

    A share `made_up` of the facts is about anything and holds any word or number.
    """
    while True:
        if made_up and rng.random() < made_up:
            key = rng.choice(("", "favourite ", "new ", "old ")) + rng.choice(PLAIN)
            value = rng.choice((made_up_word(rng), rng.choice(rng.choice(WORD_POOLS)), str(rng.randint(0, 9999))))
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


def _mixed_turns(rng: Random, budget: int, talk: bool) -> list[Turn]:
    """Turns of several kinds, about `budget` tokens together, on the training side of the split.

    Facts are told early and now and then; some are asked for between other turns, and all at the end.
    """
    taken: set[str] = set()
    facts = [_draw_fact(rng, taken, False, made_up=0.15) for _ in range(rng.randint(1, 4))]
    open_facts = list(facts)
    turns = _tell_turns(facts, rng)
    used = 0
    while used < budget:
        turn = _filler(rng, budget - used, talk)
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


def _filler(rng: Random, room: int, talk: bool) -> Turn:
    """A training-side turn of any kind; counting stays short where little room is left."""
    style = rng.random()
    if style < 0.4:
        return arithmetic_turn(rng, False)
    if style < 0.85:
        return words_turn(rng, False)
    if style < 0.95 or not talk:
        return counting_turn(rng, False, span=max(5, min(150, room // 8)))
    return small_talk(rng)


def _tool_conversation(rng: Random) -> list[dict[str, str]]:
    """Turns with tools, of which one adds in three conversations of four; sums without it are told at once."""
    toolbox = draw_toolbox(rng, with_adder=rng.random() < 0.75)
    turns = [casually(_turn_with_tools(toolbox, rng), rng) for _ in range(rng.randint(1, 5))]
    if rng.random() < 0.2:
        others = _mixed_turns(rng, budget=rng.randint(50, 300), talk=True)
        turns += [turn for turn in others if not (toolbox.adder and _is_sum(turn))]
        turns.append(_turn_with_tools(toolbox, rng))
    return _messages(turns, rng, toolbox)


def _turn_with_tools(toolbox: Toolbox, rng: Random) -> Turn:
    style = rng.random()
    if style < 0.6 and toolbox.adder:
        return tool_turn(toolbox, rng, False)
    if style < 0.75:
        while True:  # a sum is the adder's
            turn = arithmetic_turn(rng, False)
            if not (toolbox.adder and _is_sum(turn)):
                return turn
    return small_talk(rng) if style < 0.88 else words_turn(rng, False)


def _is_sum(turn: Turn) -> bool:
    return turn.kind == "arithmetic" and " + " in turn.assistant


def _tool_question(rng: Random, held_out: bool) -> Question:
    """A sum with a tool at hand: half of them ask for the call, half for the answer once the tool has told its."""
    toolbox = draw_toolbox(rng, with_adder=True)
    before = [tool_turn(toolbox, rng, False) for _ in range(rng.randint(0, 2))]
    turn = tool_turn(toolbox, rng, held_out)
    messages = _messages([*before, turn], rng, toolbox)
    if rng.random() < 0.5:
        return Question("tool", messages[:-3], turn.call, "call", turn.call)
    return Question("tool", messages[:-1], turn.assistant, "arithmetic", turn.assistant)


def _question(kind: str, rng: Random, held_out: bool) -> Question:
    if kind == "tool":
        return _tool_question(rng, held_out)
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
        turn = _filler(rng, budget - used, talk=False)
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
    turns = [arithmetic_turn(rng, False), _tell_turn([asked], rng), words_turn(rng, False)]
    turns += [_filler(rng, 400, talk=False) for _ in range(rng.randint(0, 6))]
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


def _messages(turns: list[Turn], rng: Random, toolbox: Toolbox | None = None) -> list[dict[str, str]]:
    messages = []
    system = "You are a helpful assistant." if rng.random() < 0.2 else ""
    if toolbox is not None:
        told = [system_prompt(rng)] if rng.random() < 0.5 else []
        system = "\n\n".join([*told, toolbox.text])
    if system:
        messages.append({"role": "system", "content": system})
    for turn in turns:
        messages.append({"role": "user", "content": turn.user})
        if turn.call:
            messages.append({"role": "assistant", "content": turn.call})
            messages.append({"role": "tool", "content": turn.result})
        messages.append({"role": "assistant", "content": turn.assistant})
    return messages


def _turn_tokens(turn: Turn) -> int:
    frame = 12  # role names and markers of a user and an assistant message
    return estimate_tokens(turn.user) + estimate_tokens(turn.assistant) + frame


def _same_result(text: str, expected: str) -> bool:
    numbers = re.findall(r"-?\d+", text)
    return bool(numbers) and numbers[-1] == re.findall(r"-?\d+", expected)[-1]


def _same_call(text: str, expected: str) -> bool:
    return calls_in(text) == calls_in(expected)


def _same_numbers(text: str, expected: str) -> bool:
    return re.findall(r"\d+", text) == re.findall(r"\d+", expected)


def _same_text(text: str, expected: str) -> bool:
    return text.strip() == expected


def _holds_value(text: str, expected: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(expected)}(?!\w)", text) is not None


_CHECKS: dict[str, Callable[[str, str], bool]] = {
    "arithmetic": _same_result,
    "call": _same_call,
    "counting": _same_numbers,
    "repeat": _same_text,
    "reverse": _same_text,
    "recall": _holds_value,
}
