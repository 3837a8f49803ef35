"""Checked values of schema keywords."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from minisgl_backend.grammar.json_schema.document import Node, preview
from minisgl_backend.grammar.json_schema.numbers import MAX_DIGITS

MAX_COUNT = 1 << 31


def count_of(node: Node, keyword: str, default: int = 0) -> int:
    """The keyword's value as a non-negative integer, at most MAX_COUNT. Raises SchemaError."""
    value = node.schema.get(keyword, default)
    if isinstance(value, bool) or not isinstance(value, (int, Decimal)) or value < 0 or value != int(value):
        raise node.error(keyword, f"is {preview(value)}; allowed: a count")
    return min(int(value), MAX_COUNT)


def list_of(node: Node, keyword: str, least: int = 0) -> list[Any]:
    value = node[keyword]
    if not isinstance(value, list) or len(value) < least:
        raise node.error(keyword, f"is {preview(value)}; allowed: a list{' that is not empty' if least else ''}")
    return value


def names_of(node: Node, keyword: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise node.error(keyword, f"is {preview(value)}; allowed: a list of names")
    return value


def map_of(node: Node, keyword: str) -> dict[str, Any]:
    value = node[keyword]
    if not isinstance(value, dict):
        raise node.error(keyword, f"is {preview(value)}; allowed: an object")
    return value


def number_of(node: Node, keyword: str, value: Any) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, (int, Decimal)):
        raise node.error(keyword, f"is {preview(value)}; allowed: a number")
    number = Decimal(value)
    exponent = number.as_tuple().exponent
    if number.adjusted() > MAX_DIGITS or not isinstance(exponent, int) or exponent < -MAX_DIGITS:
        raise node.error(keyword, f"is {preview(value)}; allowed: at most {MAX_DIGITS} digits")
    return number
