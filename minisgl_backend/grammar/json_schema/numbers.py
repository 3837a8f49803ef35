"""Regular expressions of numbers: decimal texts that are at least a bound, multiples, or one of some values.

A constrained number is written without an exponent. A non-integer has at most MAX_TEXT characters: with so few digits,
different decimal numbers are different doubles, so that parsing does not round a number across its bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal

from minisgl_backend.grammar.json_schema import regex as rx
from minisgl_backend.grammar.json_schema.regex import Kind, Ranges, Regex

MAX_TEXT = 16  # 15 digits and a point
MAX_DIGITS = 400  # of a bound or value; a double has at most 309 before the point
MAX_FRACTION = 20  # digits after the point of an unconstrained number
MAX_EXPONENT_DIGITS = 2
MAX_PERIOD = 500  # of multiples, whose automata have at least as many states


def _digits(low: int, high: int) -> Regex:
    ranges: Ranges = ((0x30 + low, 0x30 + high),)
    return rx.chars(ranges) if low <= high else rx.NOTHING


def _char(*chars: str) -> Regex:
    return rx.chars(rx.merged((ord(char), ord(char)) for char in chars))


_DIGIT = _digits(0, 9)
_MORE = rx.repeat(_DIGIT)
_POINT, _MINUS = _char("."), _char("-")
_NATURAL = rx.either([_char("0"), rx.cat(_digits(1, 9), _MORE)])
_MAYBE_MINUS = rx.repeat(_MINUS, 0, 1)
_SIGNED = rx.cat(_MAYBE_MINUS, _NATURAL)
_NO_ZERO = rx.complement(rx.cat(_MINUS, _char("0"), rx.repeat(rx.cat(_POINT, rx.repeat(_char("0"))), 0, 1)))
_FRACTION = rx.cat(_POINT, rx.repeat(_DIGIT, 1))
INTEGER = rx.both(_SIGNED, _NO_ZERO)
# Unconstrained numbers, with an exponent.
NUMBER = rx.cat(
    _SIGNED,
    rx.repeat(rx.cat(_POINT, rx.repeat(_DIGIT, 1, MAX_FRACTION)), 0, 1),
    rx.repeat(
        rx.cat(_char("e", "E"), rx.repeat(_char("+", "-"), 0, 1), rx.repeat(_DIGIT, 1, MAX_EXPONENT_DIGITS)), 0, 1
    ),
)
_SHORT = rx.both(rx.cat(_SIGNED, _FRACTION), rx.cat(_MAYBE_MINUS, rx.repeat(rx.either([_DIGIT, _POINT]), 0, MAX_TEXT)))
DECIMAL = rx.both(rx.either([INTEGER, _SHORT]), _NO_ZERO)
_OF_MULTIPLES = rx.both(rx.cat(_SIGNED, rx.repeat(rx.cat(_POINT, rx.repeat(_DIGIT, 1, MAX_TEXT - 1)), 0, 1)), _NO_ZERO)


def constrained(regex: Regex) -> Regex:
    """Numbers in the spelling of constrained ones that match the regex, which is made by functions of this module."""
    parts = regex.parts if regex.kind is Kind.AND else (regex,)
    has_multiple = any(part.kind is Kind.MULTIPLE for part in parts)  # with few digits, or only zeros, after the point
    return rx.both(_OF_MULTIPLES if has_multiple else DECIMAL, regex)


def at_least(bound: Decimal, strict: bool) -> Regex:
    """Texts of DECIMAL that are at least the bound, or above it if `strict`."""
    if bound > 0 or (bound == 0 and strict):
        return _magnitude(bound, strict)
    if bound == 0:
        return rx.cat(_digits(0, 9), rx.ALL)
    below = rx.complement(_magnitude(bound, not strict))  # of negative numbers
    return rx.either([rx.cat(_digits(0, 9), rx.ALL), rx.cat(_MINUS, rx.both(below, rx.cat(_NATURAL, rx.ALL)))])


def at_most(bound: Decimal, strict: bool) -> Regex:
    return rx.complement(at_least(bound, not strict))


def _magnitude(bound: Decimal, strict: bool) -> Regex:
    """Texts without a sign that are at least the bound's absolute value, or above it if `strict`."""
    whole, _, fraction = number_text(bound.copy_abs()).partition(".")
    maybe_fraction = rx.repeat(_FRACTION, 0, 1)
    least = rx.cat(_POINT, _fraction(fraction, strict)) if fraction or strict else maybe_fraction
    for number, digit in reversed([*enumerate(whole)]):
        left = len(whole) - number - 1
        more = rx.cat(_digits(int(digit) + 1, 9), rx.repeat(_DIGIT, left, left), maybe_fraction)
        least = rx.either([more, rx.cat(_char(digit), least)])
    longer = rx.cat(_digits(1, 9), rx.repeat(_DIGIT, len(whole), None), maybe_fraction)
    return rx.either([longer, least])


def _fraction(digits: str, strict: bool) -> Regex:
    """Digits after the point whose value is at least that of `digits`, or above it if `strict`."""
    least = rx.cat(_MORE, _digits(1, 9), _MORE) if strict else _MORE
    for digit in reversed(digits):
        least = rx.either([rx.cat(_digits(int(digit) + 1, 9), _MORE), rx.cat(_char(digit), least)])
    return least


def multiples(factor: Decimal) -> Regex | None:
    """Texts of DECIMAL that are multiples of the factor, which is above 0; None if its automaton would be too large."""
    whole, _, fraction = number_text(factor).partition(".")
    period = int(whole + fraction)
    return rx.multiple_of(period, len(fraction)) if period <= MAX_PERIOD else None


def among(values: Iterable[Decimal]) -> Regex:
    return rx.literals(map(number_text, values))


def none_of(values: Iterable[Decimal]) -> Regex:
    """Texts that are not one of the values in any spelling of DECIMAL."""
    zeros = rx.repeat(_char("0"))
    texts = []
    for value in values:
        text = number_text(value)
        more = zeros if "." in text else rx.repeat(rx.cat(_POINT, zeros), 0, 1)
        texts.append(rx.cat(*map(_char, text), more))
    return rx.complement(rx.either(texts))


def number_text(value: Decimal) -> str:
    """The number without exponent and trailing zeros."""
    text = f"{value:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text in ("-0", "") else text
