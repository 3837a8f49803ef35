"""Grammar rules of objects and arrays. Properties come in the order of the schema."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from minisgl_backend.grammar.json_schema.rules import Choice, Ref, Rules, Times, literal

MAX_UNROLLED_ITEMS = 64  # longer runs of equal items become a counted repetition of the matcher
MAX_SKIPPED_ITEMS = 16  # items before or between those that `contains` requires
Key = tuple[int, ...]


@dataclass(frozen=True)
class NamedProperty:
    """A property with a known name: the rule of its value, the text before and after it, and whether it is required."""

    prefix: str
    value: str
    suffix: str
    required: bool


@dataclass(frozen=True)
class OtherProperties:
    """Properties without a known name. `pairs(number)` gives the rule of a name and value, such that pairs of different
    numbers have different names; `pairs(None)` that of any pair."""

    pairs: Callable[[int | None], str]
    different: int  # numbers are below this


class StateMachine:
    """Right-linear rules: each state is a rule, whose alternatives end with the rule of the next state."""

    def __init__(self, rules: Rules, prefix: str, choices: Callable[[StateMachine, Key], list[Choice]]) -> None:
        self._rules = rules
        self._prefix = prefix
        self._choices = choices
        self._names: dict[Key, str] = {}
        self._todo: list[Key] = []

    def at(self, *key: int) -> Ref:
        """The rule of a state."""
        if key not in self._names:
            self._names[key] = self._rules.new(self._prefix)
            self._todo.append(key)
        return Ref(self._names[key])

    def finish(self) -> None:
        while self._todo:
            key = self._todo.pop()
            self._rules.put(self._names[key], self._choices(self, key))


def object_choice(
    rules: Rules,
    named: list[NamedProperty],
    others: OtherProperties | None,
    least: int,
    most: int | None,
    signs: tuple[str, str, str] = ("{", ", ", "}"),
) -> Choice:
    """The rule body of an object with `least` to `most` properties. `signs`: its opening, separator and closing.

    A state is (named properties passed, properties written, other properties written). Counts are capped to what
    `least` and `most` need.
    """
    needed = sum(one.required for one in named)
    if most is not None and others is None and most >= len(named):
        most = None
    least = 0 if least <= needed else least
    cap = max(1, least, 0 if most is None else most)
    begin, separator, end = signs

    def choices(machine: StateMachine, key: Key) -> list[Choice]:
        number, count, further = key
        comma = [literal(separator)] if count else []
        found: list[Choice] = []
        is_full = most is not None and count >= most
        if number < len(named):
            one = named[number]
            if not is_full:
                value = (literal(one.prefix), Ref(one.value), *_sign(one.suffix))
                found.append((*comma, *value, machine.at(number + 1, min(count + 1, cap), 0)))
            if not one.required:
                found.append((machine.at(number + 1, count, 0),))
            return found
        if count >= least:
            found.append(_sign(end))
        if others is not None and not is_full:
            is_needed = least > 1 and count < least
            if not is_needed:
                pair_rule = others.pairs(None)
            elif further < others.different:
                pair_rule = others.pairs(further)
            else:
                return found
            after = machine.at(number, min(count + 1, cap), further + 1 if is_needed else 0)
            found.append((*comma, Ref(pair_rule), after))
        return found

    machine = StateMachine(rules, "object", choices)
    first = machine.at(0, 0, 0)
    machine.finish()
    return (*_sign(begin), first)


def _sign(text: str) -> Choice:
    return (literal(text),) if text else ()


@dataclass(frozen=True)
class Counter:
    """A `contains`: from item `first` on, at least `least` and at most `most` items match."""

    first: int
    least: int
    most: int | None


# For each counter, whether the item matches; None: it no longer matters, or not yet.
Outcome = tuple[bool | None, ...]


def array_choice(
    rules: Rules,
    item: Callable[[int, Outcome], str],
    uniform_from: int,
    least: int,
    most: int | None,
    counters: list[Counter],
    comma: str = ", ",
) -> Choice:
    """The rule body of an array. `item` gives the rule of an item by its index; the index does not matter from
    `uniform_from` on."""
    same = max(uniform_from, 1)
    are_counted = not counters and max(least, most or 0) - same > MAX_UNROLLED_ITEMS
    needed_by = (
        sum(counter.least for counter in counters) + max((one.first for one in counters), default=0) + MAX_SKIPPED_ITEMS
    )
    last = same if are_counted else max(same, least, most or 0, needed_by if counters else 0)

    def choices(machine: StateMachine, key: Key) -> list[Choice]:
        number, *counts = key
        if are_counted and number == same:
            more = rules.new("more")
            rules.put(more, [(literal(comma), Ref(item(uniform_from, ())))])
            return [(Times(more, max(least - same, 0), None if most is None else most - same), literal("]"))]
        found: list[Choice] = []
        enough = all(counter.least <= count for counter, count in zip(counters, counts, strict=True))
        if number >= least and enough:
            found.append((literal("]"),))
        if most is not None and number >= most:
            return found
        before = [literal(comma)] if number else []
        for outcome, following in _outcomes(counters, number, counts):
            missing = sum(max(one.least - count, 0) for one, count in zip(counters, following, strict=True))
            if missing > max(needed_by - number - 1, 0):
                continue
            rule = Ref(item(min(number, uniform_from), outcome))
            found.append((*before, rule, machine.at(min(number + 1, last), *following)))
        return found

    machine = StateMachine(rules, "array", choices)
    first = machine.at(0, *[0] * len(counters))
    machine.finish()
    return (literal("["), first)


def _outcomes(counters: list[Counter], number: int, counts: list[int]) -> list[tuple[Outcome, list[int]]]:
    """All combinations of counters that the next item can match, with the counts after it."""
    found: list[tuple[Outcome, list[int]]] = [((), [])]
    for counter, count in zip(counters, counts, strict=True):
        ways: list[tuple[bool | None, int]]
        if number < counter.first or (counter.most is None and count >= counter.least):
            ways = [(None, count)]
        elif counter.most is None or count < counter.most:
            ways = [(False, count), (True, count + 1)]
        else:
            ways = [(False, count)]
        found = [((*outcome, way), [*after, then]) for outcome, after in found for way, then in ways]
    return found
