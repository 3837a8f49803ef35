"""Regular expressions with union, intersection and complement, by Brzozowski's derivatives.

The derivative of a language by a character is the set of texts that may follow it (Brzozowski, «Derivatives of Regular
Expressions», 1964; with character classes, Owens, Reppy and Turon, «Regular-expression derivatives re-examined», 2009).
So a pattern, a length limit and excluded names can be combined into one automaton.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from functools import lru_cache
from math import lcm
from typing import Any

MAX_CHAR = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]  # code points, sorted, disjoint, both ends included
TEXT: Ranges = ((0, 0xD7FF), (0xE000, MAX_CHAR))  # Unicode without surrogates
# Pseudo characters for `^` and `$` of a pattern: a text is matched as if it stood between them.
BEGIN, END = MAX_CHAR + 1, MAX_CHAR + 2


class Kind(IntEnum):
    NOTHING = 0  # no text at all
    EMPTY = 1  # the empty text
    CHARS = 2  # one character of Ranges
    CAT = 3  # (first, rest)
    REPEAT = 4  # (regex, least, most or -1)
    OR = 5
    AND = 6
    NOT = 7
    LITERALS = 8  # one of these texts, sorted
    ANCHORED = 9  # texts that the regex matches between BEGIN, already consumed, and END
    MULTIPLE = 10  # numbers: (period, remainder, decimals, decimals consumed or -1), see `multiple_of`


class Regex:
    """Immutable, and only made by the functions of this module, which simplify."""

    __slots__ = ("_hash", "kind", "nullable", "parts")

    def __init__(self, kind: Kind, parts: tuple[Any, ...], nullable: bool) -> None:
        """`nullable`: whether it matches the empty text."""
        self.kind, self.parts, self.nullable = kind, parts, nullable
        self._hash = hash((int(kind), parts))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Regex)
            and self._hash == other._hash
            and self.kind == other.kind
            and self.parts == other.parts
        )


NOTHING = Regex(Kind.NOTHING, (), False)
EMPTY = Regex(Kind.EMPTY, (), True)
ALL = Regex(Kind.NOT, (NOTHING,), True)


@lru_cache(maxsize=1 << 16)  # so that equal ones are mostly identical, and fast to compare
def _node(kind: Kind, parts: tuple[Any, ...], nullable: bool) -> Regex:
    return Regex(kind, parts, nullable)


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The ranges sorted, with overlapping and adjacent ones merged."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(high, found[-1][1])
        elif low <= high:
            found.append((low, high))
    return tuple(found)


def intersect(one: Ranges, other: Ranges) -> Ranges:
    """Characters in both."""
    return merged(
        (max(low, least), min(high, most))
        for low, high in one
        for least, most in other
        if low <= most and least <= high
    )


def without(ranges: Ranges, taken: Ranges) -> Ranges:
    """Characters of `ranges` and TEXT that are not in `taken`."""
    rest, begin = [], 0
    for low, high in merged(taken):
        rest.append((begin, low - 1))
        begin = high + 1
    return intersect(ranges, merged([*rest, (begin, MAX_CHAR)]))


def chars(ranges: Ranges) -> Regex:
    return _node(Kind.CHARS, ranges, False) if ranges else NOTHING


ANY_CHAR = chars(TEXT)


def literals(texts: Iterable[str]) -> Regex:
    found = tuple(sorted(set(texts)))
    return _node(Kind.LITERALS, found, found[0] == "") if found else NOTHING


def anchored(regex: Regex) -> Regex:
    """Texts that the regex matches when END follows; BEGIN is already consumed."""
    return _node(Kind.ANCHORED, (regex,), derivative(regex, END).nullable)


def cat(*regexes: Regex) -> Regex:
    found = EMPTY
    for regex in reversed(regexes):
        if regex is NOTHING or found is NOTHING:
            return NOTHING
        if found is EMPTY:
            found = regex
        elif regex.kind is Kind.CAT:
            found = cat(regex.parts[0], cat(regex.parts[1], found))
        elif regex is not EMPTY:
            found = _node(Kind.CAT, (regex, found), regex.nullable and found.nullable)
    return found


def repeat(regex: Regex, least: int = 0, most: int | None = None) -> Regex:
    if most == 0 or regex is EMPTY:
        return EMPTY
    if regex is NOTHING:
        return NOTHING if least else EMPTY
    if regex is ALL or (least == most == 1):
        return regex
    if regex.nullable:
        least = 0
    return _node(Kind.REPEAT, (regex, least, -1 if most is None else most), least == 0)


def either(regexes: Iterable[Regex]) -> Regex:
    """Union: one of them matches."""
    found: dict[Regex, None] = {}
    ranges: list[tuple[int, int]] = []
    texts: list[str] = []
    for regex in _flat(Kind.OR, regexes):
        if regex is ALL:
            return ALL
        if regex.kind is Kind.CHARS:
            ranges.extend(regex.parts)
        elif regex.kind is Kind.LITERALS:
            texts.extend(regex.parts)
        elif regex is not NOTHING:
            found[regex] = None
    if ranges:
        found[chars(merged(ranges))] = None
    if texts:
        found[literals(texts)] = None
    return _of_several(Kind.OR, found, NOTHING)


def both(*regexes: Regex) -> Regex:
    """Intersection: all of them match."""
    found: dict[Regex, None] = {}
    texts: Regex | None = None
    multiple: Regex | None = None
    for regex in _flat(Kind.AND, regexes):
        if regex is NOTHING:
            return NOTHING
        if regex.kind is Kind.LITERALS:
            texts = regex if texts is None else literals(set(texts.parts) & set(regex.parts))
        elif regex.kind is Kind.MULTIPLE and multiple is not None:
            multiple = _common_multiple(multiple, regex)
        elif regex.kind is Kind.MULTIPLE:
            multiple = regex
        elif regex is not ALL:
            found[regex] = None
    if multiple is not None:
        found[multiple] = None
    if texts is not None:
        return literals(text for text in texts.parts if all(matches(regex, text) for regex in found))
    return _of_several(Kind.AND, found, ALL)


def complement(regex: Regex) -> Regex:
    if regex.kind is Kind.NOT:
        part: Regex = regex.parts[0]
        return part
    return ALL if regex is NOTHING else _node(Kind.NOT, (regex,), not regex.nullable)


def multiple_of(period: int, decimals: int) -> Regex:
    """Decimal numbers without exponent whose value times 10**decimals is a multiple of `period`."""
    return _multiple(period, 0, decimals, -1)


def _multiple(period: int, remainder: int, decimals: int, consumed: int) -> Regex:
    accepts = remainder * 10 ** (decimals - max(consumed, 0)) % period == 0
    return _node(Kind.MULTIPLE, (period, remainder, decimals, consumed), accepts)


def _common_multiple(one: Regex, other: Regex) -> Regex:
    """The intersection of two MULTIPLEs: that of their least common multiple if no digit is consumed yet."""
    (period, remainder, decimals, consumed), (period2, remainder2, decimals2, consumed2) = one.parts, other.parts
    if (remainder, consumed) != (0, -1) or (remainder2, consumed2) != (0, -1):
        return _node(Kind.AND, (one, other), one.nullable and other.nullable)
    most = max(decimals, decimals2)
    return multiple_of(lcm(period * 10 ** (most - decimals), period2 * 10 ** (most - decimals2)), most)


def _flat(kind: Kind, regexes: Iterable[Regex]) -> Iterable[Regex]:
    for regex in regexes:
        if regex.kind is kind:
            yield from regex.parts
        else:
            yield regex


def _of_several(kind: Kind, found: dict[Regex, None], neutral: Regex) -> Regex:
    if len(found) < 2:
        return next(iter(found), neutral)
    if any(complement(regex) in found for regex in found):
        return ALL if kind is Kind.OR else NOTHING
    # Sorted, so that A|B equals B|A and the automaton stays finite.
    parts = tuple(sorted(found, key=hash))
    nullables = [part.nullable for part in parts]
    return _node(kind, parts, any(nullables) if kind is Kind.OR else all(nullables))


@lru_cache(maxsize=1 << 16)
def derivative(regex: Regex, char: int) -> Regex:
    """The texts that may follow the character."""
    parts = regex.parts
    match regex.kind:
        case Kind.NOTHING | Kind.EMPTY:
            return NOTHING
        case Kind.CHARS:
            return EMPTY if any(low <= char <= high for low, high in parts) else NOTHING
        case Kind.CAT:
            followed = cat(derivative(parts[0], char), parts[1])
            return either([followed, derivative(parts[1], char)]) if parts[0].nullable else followed
        case Kind.REPEAT:
            most = None if parts[2] < 0 else parts[2] - 1
            return cat(derivative(parts[0], char), repeat(parts[0], max(parts[1] - 1, 0), most))
        case Kind.OR:
            return either([derivative(part, char) for part in parts])
        case Kind.AND:
            return both(*(derivative(part, char) for part in parts))
        case Kind.NOT:
            return complement(derivative(parts[0], char))
        case Kind.LITERALS:
            return literals(text[1:] for text in parts if text and ord(text[0]) == char)
        case Kind.ANCHORED:
            return anchored(derivative(parts[0], char))
        case Kind.MULTIPLE:
            return _next_digit(*parts, char=chr(char))


def _next_digit(period: int, remainder: int, decimals: int, consumed: int, *, char: str) -> Regex:
    if char == "-":
        return _multiple(period, remainder, decimals, consumed)
    if char == "." and consumed < 0:
        return _multiple(period, remainder, decimals, 0)
    if char not in "0123456789":
        return NOTHING
    if consumed == decimals:
        return _multiple(period, remainder, decimals, consumed) if char == "0" else NOTHING
    return _multiple(period, (remainder * 10 + int(char)) % period, decimals, consumed + (consumed >= 0))


@lru_cache(maxsize=1 << 14)
def boundaries(regex: Regex) -> frozenset[int]:
    """Code points at which the derivative may change: it is the same for all characters between two of them."""
    parts = regex.parts
    match regex.kind:
        case Kind.CHARS:
            return frozenset(end for low, high in parts for end in (low, high + 1))
        case Kind.CAT:
            return boundaries(parts[0]) | boundaries(parts[1]) if parts[0].nullable else boundaries(parts[0])
        case Kind.REPEAT | Kind.NOT | Kind.ANCHORED:
            return boundaries(parts[0])
        case Kind.OR | Kind.AND:
            return frozenset().union(*map(boundaries, parts))
        case Kind.LITERALS:
            return frozenset(end for text in parts if text for end in (ord(text[0]), ord(text[0]) + 1))
        case Kind.MULTIPLE:
            return frozenset(range(ord("-"), ord("9") + 2))
    return frozenset()


def matches(regex: Regex, text: str) -> bool:
    for char in text:
        regex = derivative(regex, ord(char))
        if regex is NOTHING:
            return False
    return regex.nullable
