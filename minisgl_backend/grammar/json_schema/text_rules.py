"""Grammar rules of strings and numbers, made of automata.

A string's rules include its closing quote. After a rule that ends before it anything might follow, so xgrammar would
test all tokens that are longer than the rest of the string, most of the vocabulary, one by one in every mask (1 to 4 ms
instead of 2 us with xgrammar 0.2.8).

    text  ::= "\\"" rest2
    rest2 ::= "\\"" | character rest1
    rest1 ::= "\\"" | character rest0
    rest0 ::= "\\""

A character is written raw or as an escape, such as a backslash and n, or \\u and four hex digits (beyond U+FFFF a
surrogate pair); each counts as one character. U+0000 to U+001F are always escaped, as in JSON. A notation may have no
escapes (`Notation`).
"""

from __future__ import annotations

import contextlib

from minisgl_backend.grammar.json_schema import regex as rx
from minisgl_backend.grammar.json_schema.automaton import Automaton, State, TooManyStatesError, automaton
from minisgl_backend.grammar.json_schema.notation import Notation
from minisgl_backend.grammar.json_schema.numbers import MAX_EXPONENT_DIGITS, MAX_FRACTION, NUMBER
from minisgl_backend.grammar.json_schema.regex import Kind, Ranges, Regex
from minisgl_backend.grammar.json_schema.rules import Choice, Ref, Rules, char_class, literal

UNROLLED = 48  # longer runs are counted in blocks: each state takes the compiler 20 ms with 150,000 tokens
BLOCK = 24  # characters
MAX_COUNTED = 1 << 16  # characters of a string with a length limit
MAX_NUMBER_STATES = 2500  # for all numbers of a grammar: with 3,500 its compilation exceeds the compiler's memory limit
_NOT_RAW: Ranges = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
_ANY_NUMBER: tuple[Choice, ...] = (
    (
        '"-"? ("0" | [1-9] [0-9]*)',
        f'("." [0-9]{{1, {MAX_FRACTION}}})?',
        f"([eE] [+\\-]? [0-9]{{1, {MAX_EXPONENT_DIGITS}}})?",
    ),
)
_HEX = "[0-9a-fA-F]"
_ASTRAL = (0x10000, rx.MAX_CHAR)
_PAIR = ("[dD]", "[89abAB]", _HEX, _HEX, literal("\\u"), "[dD]", "[c-fC-F]", _HEX, _HEX)
# Up to this number of ranges, characters may be written as \u; with more, only those without another form.
MAX_ESCAPED_RANGES = 8


class TextRules:
    """The string and number rules of one grammar; equal ones are shared."""

    def __init__(self, rules: Rules, notation: Notation) -> None:
        self._rules = rules
        self._notation = notation
        self._quote = literal(notation.quote)
        self._not_raw = _NOT_RAW if notation.has_escapes else ((ord(notation.quote[0]),) * 2,)
        self._known: dict[object, str] = {}
        self._number_states = 0

    def string(self, regex: Regex, *, key: bool = False) -> str:
        """The rule of strings whose content matches the regex. `key`: property names, which only use escapes where
        necessary. Raises TooManyStatesError."""
        if (regex, key) not in self._known:
            self._known[regex, key] = self._string(regex, key)
        return self._known[regex, key]

    def bare(self, regex: Regex, suffix: str) -> str:
        """The rule of texts without quotes, each followed by the text `suffix`."""
        return self._bare(rx.cat(regex, rx.literals([suffix])))

    def number(self, regex: Regex) -> str:
        """The rule of numbers whose text matches the regex. Raises TooManyStatesError."""
        before = len(self._rules)
        rule = self._bare(regex)
        self._number_states += len(self._rules) - before
        if self._number_states > MAX_NUMBER_STATES:
            raise TooManyStatesError
        return rule

    def _bare(self, regex: Regex) -> str:
        if (regex, "number") not in self._known:
            if regex.kind is Kind.LITERALS:
                name = self._rules.new("number")
                self._rules.put(name, [(literal(text),) for text in regex.parts])
            elif regex == NUMBER:
                name = self._rules.new("number")
                self._rules.put(name, _ANY_NUMBER)
            else:
                name = self._right_linear(automaton(regex), None)
            self._known[regex, "number"] = name
        return self._known[regex, "number"]

    def _string(self, regex: Regex, key: bool) -> str:
        name = self._rules.new("string")
        if regex.kind is Kind.LITERALS:
            texts = filter(self._notation.can_write, regex.parts)
            self._rules.put(name, [(literal(self._notation.text(text)),) for text in texts])
            return name
        lengths = _long_lengths(regex)
        if lengths is not None:
            self._rules.put(name, [(self._quote, self._long(*lengths))])
            return name
        following = self._escaped(regex, key) if self._notation.has_escapes else self._unescaped(regex)
        if following is not None:
            self._rules.put(name, [(self._quote, Ref(following))])
        return name

    def _escaped(self, regex: Regex, key: bool) -> str | None:
        """The rule of the text after the opening quote; None if the regex matches nothing."""
        states = automaton(regex)
        return self._right_linear(states, key) if states else None

    def _unescaped(self, regex: Regex) -> str | None:
        """As `_escaped`, for a notation without escapes, whose strings contain anything but the closing quote. If that
        takes many states, which the parts of a quote multiply, strings do not contain its first character either."""
        quote = rx.literals([self._notation.quote])
        whole = rx.cat(rx.both(regex, rx.complement(rx.cat(rx.ALL, quote, rx.ALL))), quote)
        with contextlib.suppress(TooManyStatesError):
            if len(states := automaton(whole)) <= UNROLLED:
                return self._right_linear(states, None) if states else None
        plain = rx.repeat(rx.chars(rx.without(rx.TEXT, self._not_raw)))
        return self._escaped(rx.both(regex, plain), False) or self._right_linear(automaton(whole), None)

    def _right_linear(self, states: Automaton, key: bool | None) -> str:
        """The rule of the start state; `key` None: for numbers, which have no quotes."""
        names: list[str] = []
        for number, state in enumerate(states):
            is_any = key is not None and state.accepts and state.moves == ((rx.TEXT, number),)
            names.append(self._rest() if is_any else self._rules.new("number" if key is None else "rest"))
        runs = _runs(states)
        is_counted = key is not None and max(runs, default=0) > UNROLLED
        for number, (name, state) in enumerate(zip(names, states, strict=True)):
            if name != self._known.get("rest"):
                counted = self._counted(states, number, runs[number], names, bool(key)) if is_counted else []
                self._rules.put(name, counted or self._choices(state, names, key))
        return names[0] if names else self._rules.new("number")

    def _counted(self, states: Automaton, number: int, run: int, names: list[str], key: bool) -> list[Choice]:
        """Choices of a state with a run of `run` equal transitions, counted in blocks; empty if the run is short."""
        following = number
        for _ in range(min(run, BLOCK)):
            ((characters, following),) = states[following].moves
        if run >= BLOCK:
            ends = [(self._at_most(BLOCK - 1, characters, key),)] if states[number].accepts else []
            return [*ends, (self._block(characters, key), Ref(names[following]))]
        if run and states[number].accepts and states[following] == State(True, ()):
            return [(self._at_most(run, characters, key),)]
        return []

    def _choices(self, state: State, names: list[str], key: bool | None) -> list[Choice]:
        end: Choice = () if key is None else (self._quote,)
        choices: list[Choice] = [end] if state.accepts else []
        for ranges, target in state.moves:
            if key is None:
                choices.append((char_class(ranges), Ref(names[target])))
            else:
                choices += self._one(ranges, key, Ref(names[target]))
        return choices

    def _rest(self) -> str:
        """The rule of any characters and the closing quote."""
        if "rest" not in self._known:
            if not self._notation.has_escapes:
                self._known["rest"] = self._unescaped(rx.ALL) or ""
                return self._known["rest"]
            name = self._known["rest"] = self._rules.new("rest")
            escape = self._escape(rx.TEXT, False)
            assert escape is not None
            anything = char_class(rx.without(rx.TEXT, self._not_raw))
            self._rules.put(name, [(self._quote,), (anything, Ref(name)), (literal("\\"), Ref(escape), Ref(name))])
        return self._known["rest"]

    def _long(self, least: int, most: int | None) -> Ref:
        """The rule after the opening quote of strings that are only constrained in length, counted in blocks."""
        if most is None:
            found = Ref(self._rest())
        else:
            most = min(most, max(least, MAX_COUNTED))
            found = self._at_most((most - least) % BLOCK)
            for _ in range((most - least) // BLOCK):
                found = self._joined((self._at_most(BLOCK - 1),), (self._block(), found))
        for _ in range(least % BLOCK):
            found = self._joined(*self._one(rx.TEXT, False, found))
        for _ in range(least // BLOCK):
            found = self._joined((self._block(), found))
        return found

    def _joined(self, *choices: Choice) -> Ref:
        name = self._rules.new("long")
        self._rules.put(name, choices)
        return Ref(name)

    def _one(self, characters: Ranges, key: bool, rest: Ref | None) -> list[Choice]:
        """The choices of one character, followed by `rest`."""
        following = () if rest is None else (rest,)
        raw, escape = rx.without(characters, self._not_raw), self._escape(characters, key)
        choices: list[Choice] = [(char_class(raw), *following)] if raw else []
        return choices if escape is None else [*choices, (literal("\\"), Ref(escape), *following)]

    def _at_most(self, most: int, characters: Ranges = rx.TEXT, key: bool = False) -> Ref:
        """Up to `most` characters, and the closing quote."""
        known = ("at most", most, characters, key)
        if known not in self._known:
            rest = [] if most == 0 else self._one(characters, key, self._at_most(most - 1, characters, key))
            self._known[known] = self._joined((self._quote,), *rest).name
        return Ref(self._known[known])

    def _block(self, characters: Ranges = rx.TEXT, key: bool = False) -> Ref:
        """BLOCK characters. A lookahead that never matches prevents tokens that extend beyond the block, since xgrammar
        would test those one by one in masks."""
        known = ("block", characters, key)
        if known not in self._known:
            found: Ref | None = None
            for _ in range(BLOCK):
                found = self._joined(*self._one(characters, key, found))
                self._rules.end_tokens(found.name)
            assert found is not None
            self._known[known] = found.name
        return Ref(self._known[known])

    def _escape(self, ranges: Ranges, key: bool) -> str | None:
        """The rule of the text after the backslash of escapes of these characters; None: there are none."""
        if not self._notation.has_escapes:
            return None
        known = ("escape", ranges, key)
        if known not in self._known:
            short = [char for code, char in self._notation.escapes.items() if rx.intersect(ranges, ((code, code),))]
            if key:
                short = [char for char in short if char != "/"]
            spelt = rx.intersect(ranges, ((0, 0xFFFF),))
            if key or len(spelt) > MAX_ESCAPED_RANGES:
                spelt = rx.intersect(ranges, ((0, 7), (11, 11), (14, 31)))  # control characters without a short escape
            choices: list[Choice] = []
            if short:
                choices.append((char_class(rx.merged((ord(char), ord(char)) for char in short)),))
            for low, high in spelt:
                choices += [(literal("u"), *digits) for digits in _hexadecimal(low, high)]
            if not key and self._notation.has_pairs and _ASTRAL in rx.intersect(ranges, (_ASTRAL,)):
                choices.append((literal("u"), *_PAIR))
            if not choices:
                return None
            self._known[known] = self._rules.new("escape")
            self._rules.put(self._known[known], choices)
        return self._known[known]


def _runs(states: Automaton) -> list[int]:
    """The length of the run of equal transitions from each state: the same characters each time, and states of which,
    except the last, all accept or none does. Such runs are counted repetitions."""
    runs = [0] * len(states)
    for begin in range(len(states)):
        path: list[int] = []
        number = begin
        while not runs[number] and number not in path and len(states[number].moves) == 1:
            path.append(number)
            ((_, number),) = states[number].moves
        if number in path:  # a cycle is not counted
            path = path[: path.index(number)]
        for number in reversed(path):
            ((characters, following),) = states[number].moves
            after = states[following]
            alike = (
                len(after.moves) == 1 and after.moves[0][0] == characters and after.accepts == states[number].accepts
            )
            runs[number] = 1 + (runs[following] if alike else 0)
    return runs


def _long_lengths(regex: Regex) -> tuple[int, int | None] | None:
    """(least, most) characters, if the regex only constrains the length, and they are too many to unroll."""
    parts = regex.parts if regex.kind is Kind.AND else (regex,)
    least, most = 0, None
    for part in parts:
        if part.kind is not Kind.REPEAT or part.parts[0] != rx.ANY_CHAR:
            return None
        least = max(least, part.parts[1])
        if part.parts[2] >= 0:
            most = part.parts[2] if most is None else min(most, part.parts[2])
    if (most is not None and most < least) or least > MAX_COUNTED:
        return None
    return (least, most) if max(least, most or 0) > UNROLLED else None


def _hexadecimal(low: int, high: int, digits: int = 4) -> list[tuple[str, ...]]:
    """Sequences of hex digit classes that match the numbers from `low` to `high`."""
    if digits == 0:
        return [()]
    unit = 16 ** (digits - 1)
    found: list[tuple[str, ...]] = []
    first, last = low // unit, high // unit
    if first == last:
        tails = _hexadecimal(low % unit, high % unit, digits - 1)
        return [(_hex_class(first, first), *tail) for tail in tails]
    if low % unit:
        found += [(_hex_class(first, first), *tail) for tail in _hexadecimal(low % unit, unit - 1, digits - 1)]
        first += 1
    end = []
    if high % unit != unit - 1:
        end = [(_hex_class(last, last), *tail) for tail in _hexadecimal(0, high % unit, digits - 1)]
        last -= 1
    if first <= last:
        found.append((_hex_class(first, last), *[_HEX] * (digits - 1)))
    return found + end


def _hex_class(first: int, last: int) -> str:
    digits = "0123456789abcdef"[first : last + 1]
    both = sorted({*digits, *digits.upper()})
    return char_class(rx.merged((ord(digit), ord(digit)) for digit in both))
