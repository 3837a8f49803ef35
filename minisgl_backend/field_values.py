"""Values of a request's fields, as clients write them, in the form that the engine takes.

Each function takes the field's name and the value, and raises InvalidRequestError naming both and what is allowed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from minisgl_backend.errors import InvalidRequestError


def refuse(name: str, value: object, allowed: str) -> NoReturn:
    raise InvalidRequestError(f"{name} is {value}; allowed: {allowed}")


def integer(name: str, value: Any) -> int:
    """Accepts Python's and NumPy's integers, and floats without a fraction."""
    if type(value) is int:
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        refuse(name, repr(value), "an integer")


def number(name: str, value: Any) -> float:
    if type(value) is float:
        return value
    if isinstance(value, (str, bytes, bool)) or not hasattr(value, "__float__"):
        refuse(name, repr(value), "a number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        refuse(name, repr(value), "a number")


def instance(kind: type, allowed: str) -> Callable[[str, Any], Any]:
    def checked(name: str, value: Any) -> Any:
        return value if isinstance(value, kind) else refuse(name, repr(value), allowed)

    return checked


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        refuse(name, repr(value), "a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        refuse(name, repr(value), "Unicode text, without lone surrogates")
    return str(value)


def seed(name: str, value: Any) -> int | None:
    """A negative seed is the unsigned number with the same 64 bits; -1 means any, as in vLLM."""
    found = integer(name, value)
    if found == -1:
        return None
    return found + (1 << 64) if -(1 << 63) <= found < 0 else found


def budget(name: str, value: Any) -> int | None:
    """-1 means no limit, as vLLM spells it."""
    found = integer(name, value)
    return None if found == -1 else found


def top_k(name: str, value: Any) -> int:
    """-1 means off, as vLLM spells it."""
    found = integer(name, value)
    return 0 if found == -1 else found


def top_p(name: str, value: Any) -> float:
    """Clients of LlamaIndex and LangChain send 0 for "not set"."""
    found = number(name, value)
    return 1.0 if found <= 0.0 else found


def items(name: str, value: Any, allowed: str) -> tuple[Any, ...]:
    if type(value) is tuple:
        return value
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Iterable):
        refuse(name, repr(value), allowed)
    return tuple(value)


def words(name: str, value: Any) -> tuple[str, ...]:
    found = (value,) if isinstance(value, str) else items(name, value, "a text or a list of texts")
    for word in found:
        if not isinstance(word, str):
            refuse(name, repr(word), "a text or a list of texts")
    return found if all(found) else tuple(filter(None, found))


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str):
        refuse(name, repr(value), "a list of token ids")
    values = items(name, value, "a list of token ids") if isinstance(value, Iterable) else (value,)
    return values if all(type(one) is int for one in values) else tuple(integer(name, one) for one in values)


def words_of_ids(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(token_ids(name, word) for word in items(name, value, "a list of lists of token ids"))


def bias(name: str, value: Any) -> dict[int, float]:
    """JSON objects have text keys, so a token id may be a text."""
    if not isinstance(value, Mapping):
        refuse(name, repr(value), "a mapping of token id to bias")
    found = {}
    for key, given in value.items():
        digits = isinstance(key, str) and key.strip().isascii() and key.strip().isdigit()
        found[int(key) if digits else integer(name, key)] = number(name, given)
    return found


flag = instance(bool, "True or False")
