"""Rules of strings and numbers, made of automata.

A string's rules hold its closing quote: a rule that ends before leaves open what may follow, and then all tokens that
are longer than what is left of the string, most of a vocabulary, are tried one by one whenever a mask is filled (1 to
4 ms instead of 2 us with xgrammar 0.2.8).

    text  ::= "\\"" rest2
    rest2 ::= "\\"" | character rest1
    rest1 ::= "\\"" | character rest0
    rest0 ::= "\\""

A character is itself or an escape, such as a backslash and n, or \\u and four digits, beyond U+FFFF two
times four; both count as one. What JSON does not take raw, U+0000 to U+001F, is only ever escaped. A notation may
have no escapes (`Notation`).
"""

from __future__ import annotations

import contextlib

from minisgl_backend.grammar.json_schema import regex as rx
from minisgl_backend.grammar.json_schema.automaton import Automaton, State, TooManyStatesError, automaton
from minisgl_backend.grammar.json_schema.notation import Notation
from minisgl_backend.grammar.json_schema.numbers import MAX_EXPONENT_DIGITS, MAX_FRACTION, NUMBER
from minisgl_backend.grammar.json_schema.regex import Kind, Ranges, Regex
from minisgl_backend.grammar.json_schema.rules import Choice, Ref, Rules, char_class, literal

UNROLLED = 48  # longer ones are counted in blocks: each state takes the compiler 20 ms with 150,000 tokens
BLOCK = 24  # characters
MAX_COUNTED = 1 << 16  # characters of a string whose length is bounded
MAX_NUMBER_STATES = 2500  # of all numbers of a grammar: with 3,500 its compilation exceeds the compiler's memory limit
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
# Of what ranges of characters \u is written one by one; beyond, only of what has no other form.
MAX_ESCAPED_RANGES = 8


class TextRules:
    """Of one grammar; equal ones are made once."""

    def __init__(self, rules: Rules, notation: Notation) -> None:
        self._rules = rules
        self._notation = notation
        self._quote = literal(notation.quote)
        self._not_raw = _NOT_RAW if notation.has_escapes else ((ord(notation.quote[0]),) * 2,)
        self._known: dict[object, str] = {}
        self._number_states = 0

    def string(self, regex: Regex, *, key: bool = False) -> str:
        """The rule of strings whose text is one of the regex's; `key`: names of properties, in which only what must
        be escaped is. Raises TooManyStatesError."""
        if (regex, key) not in self._known:
            self._known[regex, key] = self._string(regex, key)
        return self._known[regex, key]

    def bare(self, regex: Regex, behind: str) -> str:
        """The rule of texts without quotes, and what stands behind each."""
        return self._bare(rx.cat(regex, rx.literals([behind])))

    def number(self, regex: Regex) -> str:
        """The rule of numbers whose text is one of the regex's. Raises TooManyStatesError."""
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
        behind = self._escaped(regex, key) if self._notation.has_escapes else self._unescaped(regex)
        if behind is not None:
            self._rules.put(name, [(self._quote, Ref(behind))])
        return name

    def _escaped(self, regex: Regex, key: bool) -> str | None:
        """The rule of what follows the opening quote; None where no text is of the regex."""
        states = automaton(regex)
        return self._right_linear(states, key) if states else None

    def _unescaped(self, regex: Regex) -> str | None:
        """The same of texts that may hold anything but the closing quote. Where they have many states, which a part of
        a quote behind them would multiply, they do not hold its first character."""
        quote = rx.literals([self._notation.quote])
        whole = rx.cat(rx.both(regex, rx.complement(rx.cat(rx.ALL, quote, rx.ALL))), quote)
        with contextlib.suppress(TooManyStatesError):
            if len(states := automaton(whole)) <= UNROLLED:
                return self._right_linear(states, None) if states else None
        plain = rx.repeat(rx.chars(rx.without(rx.TEXT, self._not_raw)))
        return self._escaped(rx.both(regex, plain), False) or self._right_linear(automaton(whole), None)

    def _right_linear(self, states: Automaton, key: bool | None) -> str:
        """The rule of the first state; `key` None: of numbers, which have no quotes."""
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
        """Those of a state from which `run` equal steps lead on, in blocks; empty where they are too few."""
        behind = number
        for _ in range(min(run, BLOCK)):
            ((characters, behind),) = states[behind].moves
        if run >= BLOCK:
            ends = [(self._at_most(BLOCK - 1, characters, key),)] if states[number].accepts else []
            return [*ends, (self._block(characters, key), Ref(names[behind]))]
        if run and states[number].accepts and states[behind] == State(True, ()):
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
        """Any characters, and the quote."""
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
        """The rule of what follows the opening quote: characters that only their count constrains, in blocks."""
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
        """A character, and what follows it."""
        behind = () if rest is None else (rest,)
        raw, escape = rx.without(characters, self._not_raw), self._escape(characters, key)
        choices: list[Choice] = [(char_class(raw), *behind)] if raw else []
        return choices if escape is None else [*choices, (literal("\\"), Ref(escape), *behind)]

    def _at_most(self, most: int, characters: Ranges = rx.TEXT, key: bool = False) -> Ref:
        """So many characters, and the quote."""
        known = ("at most", most, characters, key)
        if known not in self._known:
            rest = [] if most == 0 else self._one(characters, key, self._at_most(most - 1, characters, key))
            self._known[known] = self._joined((self._quote,), *rest).name
        return Ref(self._known[known])

    def _block(self, characters: Ranges = rx.TEXT, key: bool = False) -> Ref:
        """BLOCK characters. What it says of what follows is never true, so no token reaches beyond its end: such
        tokens would be tried one by one as well."""
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
        """The rule of what follows a backslash to stand for one of the characters; None: nothing does."""
        if not self._notation.has_escapes:
            return None
        known = ("escape", ranges, key)
        if known not in self._known:
            short = [char for code, char in self._notation.escapes.items() if rx.common(ranges, ((code, code),))]
            if key:
                short = [char for char in short if char != "/"]
            spelt = rx.common(ranges, ((0, 0xFFFF),))
            if key or len(spelt) > MAX_ESCAPED_RANGES:
                spelt = rx.common(ranges, ((0, 7), (11, 11), (14, 31)))  # those without a short one
            choices: list[Choice] = []
            if short:
                choices.append((char_class(rx.merged((ord(char), ord(char)) for char in short)),))
            for low, high in spelt:
                choices += [(literal("u"), *digits) for digits in _hexadecimal(low, high)]
            if not key and self._notation.has_pairs and _ASTRAL in rx.common(ranges, (_ASTRAL,)):
                choices.append((literal("u"), *_PAIR))
            if not choices:
                return None
            self._known[known] = self._rules.new("escape")
            self._rules.put(self._known[known], choices)
        return self._known[known]


def _runs(states: Automaton) -> list[int]:
    """Of each state, how many characters may follow one another of which the next are of the same kind, and behind each
    of which, but for the last, the text may end or may not as it may here: counted repetitions."""
    runs = [0] * len(states)
    for begin in range(len(states)):
        path: list[int] = []
        number = begin
        while not runs[number] and number not in path and len(states[number].moves) == 1:
            path.append(number)
            ((_, number),) = states[number].moves
        if number in path:  # in a circle nothing is counted
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
    """Least and most characters, where nothing else is asked of strings, and they are too many to unroll."""
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
    """Classes of hexadecimal digits whose numbers are those from `low` to `high`."""
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
