"""Deterministic automata of regular expressions, with states that can still end only."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from minisgl_backend.grammar.json_schema.regex import (
    MAX_CHAR,
    NOTHING,
    TEXT,
    Ranges,
    Regex,
    boundaries,
    derivative,
    intersect,
    merged,
)

MAX_STATES = 2000
MINIMIZED_STATES = 256  # what has more keeps states that do the same


class TooManyStatesError(Exception):
    """A regular expression, or all numbers of a grammar, have automata of more states than are allowed."""


@dataclass(frozen=True)
class State:
    accepts: bool
    moves: tuple[tuple[Ranges, int], ...]  # characters, and the state that they lead to


Automaton = tuple[State, ...]  # which begins with the first state; without any for no text at all


def automaton(regex: Regex) -> Automaton:
    """Raises TooManyStatesError."""
    numbers = {regex: 0}
    moves: list[dict[int, Ranges]] = []
    todo = [regex]
    for one in todo:  # grows meanwhile
        found: dict[Regex, list[tuple[int, int]]] = {}
        ends = sorted({0, MAX_CHAR + 1} | {cut for cut in boundaries(one) if cut <= MAX_CHAR})
        for low, high in pairwise(ends):
            following = derivative(one, low)
            if following is not NOTHING:
                found.setdefault(following, []).append((low, high - 1))
        moves.append({})
        for following, ranges in found.items():
            allowed = intersect(merged(ranges), TEXT)
            if not allowed:
                continue
            if following not in numbers:
                if len(numbers) >= MAX_STATES:
                    raise TooManyStatesError
                numbers[following] = len(numbers)
                todo.append(following)
            moves[-1][numbers[following]] = allowed
    return _trimmed([one.nullable for one in todo], moves)


def _trimmed(accepts: list[bool], moves: list[dict[int, Ranges]]) -> Automaton:
    sources: dict[int, list[int]] = {}
    for source, targets in enumerate(moves):
        for target in targets:
            sources.setdefault(target, []).append(source)
    todo = [number for number, accepting in enumerate(accepts) if accepting]
    alive = set(todo)
    while todo:
        for source in sources.get(todo.pop(), ()):
            if source not in alive:
                alive.add(source)
                todo.append(source)
    if 0 not in alive:
        return ()
    block = dict.fromkeys(alive, 0) | {number: int(accepts[number]) for number in alive}
    if len(alive) <= MINIMIZED_STATES:
        block = _minimized(block, moves)
    else:
        block = {number: number for number in alive}
    names = {one: number for number, one in enumerate(dict.fromkeys(block[number] for number in sorted(alive)))}
    states: dict[int, State] = {}
    for number in sorted(alive):
        if names[block[number]] not in states:
            following = _grouped(moves[number], {to: names[block[to]] for to in alive})
            states[names[block[number]]] = State(accepts[number], tuple((one, to) for to, one in following.items()))
    return tuple(states[number] for number in range(len(states)))


def _grouped(moves: dict[int, Ranges], names: dict[int, int]) -> dict[int, Ranges]:
    found: dict[int, Ranges] = {}
    for target, ranges in moves.items():
        if target in names:
            found[names[target]] = merged([*found.get(names[target], ()), *ranges])
    return found


def _minimized(block: dict[int, int], moves: list[dict[int, Ranges]]) -> dict[int, int]:
    """State -> block of states that do the same (Moore's algorithm)."""
    count = 0
    while len(set(block.values())) != count:
        count = len(set(block.values()))
        numbers: dict[object, int] = {}
        block = {
            state: numbers.setdefault((block[state], frozenset(_grouped(moves[state], block).items())), len(numbers))
            for state in block
        }
    return block
