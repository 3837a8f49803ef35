"""The JSON types that a function's schema allows for its arguments, and values that models write without JSON
syntax."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from minisgl_backend.parsers.parts import without_surrogates

_Types = frozenset[str] | None  # None: unknown, so any type
_TEXT = frozenset({"string"})
_PYTHON = {"True": True, "False": False, "None": None}  # as models sometimes write them
_MAX_PYTHON = 20_000  # the longest value that is read as Python
_MAX_DEPTH = 64  # of nested schemas and references


class ArgumentTypes:
    """The argument types of one function. An invalid schema allows everything."""

    def __init__(self, schema: Any) -> None:
        """`schema`: JSON schema of the arguments, an object."""
        self._root = schema
        given = schema.get("properties") if isinstance(schema, Mapping) else None
        self._properties: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
        self._is_closed = (
            isinstance(schema, Mapping)
            and schema.get("additionalProperties") is False
            and "patternProperties" not in schema
        )
        self._found: dict[str, _Types] = {}  # by reference; each is resolved once

    def of(self, name: str) -> _Types:
        """The names of the allowed JSON types; None: any. An argument that the schema does not name is a string."""
        return self._types(self._properties[name], 0) if name in self._properties else _TEXT

    def may_have(self, name: str) -> bool:
        """Whether the schema names the argument, or names none at all."""
        return not self._properties or name in self._properties

    def refuses(self, name: str) -> bool:
        """Whether the schema has no room for that argument."""
        return self._is_closed and name not in self._properties

    def has_choices(self, name: str) -> bool:
        """Whether the argument has a list of allowed strings."""
        return bool(self._choices(name))

    def chosen(self, name: str, text: str) -> str:
        """The text without surrounding white space, if that is one of the argument's allowed strings."""
        stripped = text.strip()
        return stripped if stripped in self._choices(name) else text

    def _choices(self, name: str) -> Sequence[Any]:
        schema = self._properties.get(name)
        return _list(schema.get("enum")) if isinstance(schema, Mapping) else ()

    def _types(self, schema: Any, depth: int) -> _Types:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return None
        found = _named(schema.get("type"))
        if isinstance(reference := schema.get("$ref"), str):
            found = _both(found, self._referred(reference, depth))
        for one in _list(schema.get("allOf")):
            found = _both(found, self._types(one, depth + 1))
        for key in ("anyOf", "oneOf"):
            found = _both(found, _either([self._types(one, depth + 1) for one in _list(schema.get(key))]))
        if "const" in schema:
            found = _both(found, _type_of(schema["const"]))
        return _both(found, _either([_type_of(value) for value in _list(schema.get("enum"))]))

    def _referred(self, reference: str, depth: int) -> _Types:
        if reference not in self._found:
            self._found[reference] = None  # a self-reference adds nothing
            self._found[reference] = self._types(self._at(reference), depth + 1)
        return self._found[reference]

    def _at(self, reference: str) -> Any:
        """The value at a JSON pointer within the schema; None if there is none."""
        start, *keys = reference.split("/")
        found = self._root if start == "#" else None
        for key in keys:
            if not isinstance(found, Mapping):
                return None
            found = found.get(unquote(key).replace("~1", "/").replace("~0", "~"))
        return found


def _named(given: Any) -> _Types:
    names = {given} if isinstance(given, str) else {one for one in _list(given) if isinstance(one, str)}
    if "number" in names:
        names.add("integer")
    return frozenset(names) or None


def _both(one: _Types, other: _Types) -> _Types:
    """The types allowed by both of two schemas; None also if they contradict each other."""
    if one is None or other is None:
        return other if one is None else one
    return one & other or None


def _either(ways: Sequence[_Types]) -> _Types:
    found: frozenset[str] = frozenset()
    for way in ways:
        if way is None:
            return None
        found |= way
    return found or None


def _type_of(value: Any) -> _Types:
    if value is None:
        return frozenset({"null"})
    kinds = {bool: "boolean", str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return _named(kinds.get(type(value)))


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def as_json(value: Any) -> str:
    """JSON text, characters as they are."""
    return without_surrogates(json.dumps(value, ensure_ascii=False))


def converted(text: str, types: frozenset[str] | None) -> str:
    """A value as JSON: a string if it may be one, or if it is not valid JSON.

    `types`: the JSON types that it may have; None: any, then it is a string only if it is not valid JSON.
    """
    if types is not None and "string" in types:
        return "null" if "null" in types and text.strip() == "null" else as_json(text)
    try:
        return as_json(json.loads(text, parse_constant=_finite, parse_float=_finite))
    except (ValueError, RecursionError):
        return as_json(_of_python(text))


def _of_python(text: str) -> Any:
    """Objects and lists in Python syntax; otherwise the text."""
    stripped = text.strip()
    if stripped in _PYTHON:
        return _PYTHON[stripped]
    if stripped[:1] in ("{", "[") and len(stripped) <= _MAX_PYTHON:
        try:
            value = ast.literal_eval(stripped)
            json.dumps(value, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return text
        return value if isinstance(value, (dict, list)) else text
    return text


def _finite(text: str) -> float:
    """JSON has finite numbers only."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no JSON")
    return value
