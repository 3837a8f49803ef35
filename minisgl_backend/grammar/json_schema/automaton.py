"""Deterministic automata of regular expressions, without dead states."""

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
MINIMIZED_STATES = 256  # larger automata are not minimized


class TooManyStatesError(Exception):
    """The automaton of a regular expression, or those of all numbers of a grammar, have too many states."""


@dataclass(frozen=True)
class State:
    accepts: bool
    moves: tuple[tuple[Ranges, int], ...]  # transitions: characters, index of the next state


Automaton = tuple[State, ...]  # the first is the start state; empty if nothing is accepted


def automaton(regex: Regex) -> Automaton:
    """Raises TooManyStatesError."""
    numbers = {regex: 0}
    moves: list[dict[int, Ranges]] = []
    todo = [regex]
    for one in todo:  # which grows in the loop
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
    """State -> number of its block of equivalent states (Moore's algorithm)."""
    count = 0
    while len(set(block.values())) != count:
        count = len(set(block.values()))
        numbers: dict[object, int] = {}
        block = {
            state: numbers.setdefault((block[state], frozenset(_grouped(moves[state], block).items())), len(numbers))
            for state in block
        }
    return block
