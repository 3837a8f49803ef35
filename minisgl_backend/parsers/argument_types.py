"""The JSON types that a function's schema allows its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

_Types = frozenset[str] | None  # None: nothing is known, any
_TEXT = frozenset({"string"})
_MAX_DEPTH = 64  # schemas within schemas, references followed


class ArgumentTypes:
    """Of one function. What is no valid schema says nothing."""

    def __init__(self, schema: Any) -> None:
        """`schema`: JSON schema of the arguments, an object."""
        self._root = schema
        given = schema.get("properties") if isinstance(schema, Mapping) else None
        self._properties: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
        self._found: dict[str, _Types] = {}  # by reference; each is followed once

    def of(self, name: str) -> _Types:
        """JSON types by their names in a schema; None: any. An argument that the schema does not name is a text."""
        return self._types(self._properties[name], 0) if name in self._properties else _TEXT

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
            self._found[reference] = None  # what refers to itself says nothing more
            self._found[reference] = self._types(self._at(reference), depth + 1)
        return self._found[reference]

    def _at(self, reference: str) -> Any:
        """What a JSON pointer within the schema points at; None where there is nothing."""
        start, *keys = reference.split("/")
        place = self._root if start == "#" else None
        for key in keys:
            if not isinstance(place, Mapping):
                return None
            place = place.get(unquote(key).replace("~1", "/").replace("~0", "~"))
        return place


def _named(given: Any) -> _Types:
    names = {given} if isinstance(given, str) else {one for one in _list(given) if isinstance(one, str)}
    if "number" in names:
        names.add("integer")
    return frozenset(names) or None


def _both(one: _Types, other: _Types) -> _Types:
    """What two schemas that both hold allow; None also where they contradict each other."""
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
