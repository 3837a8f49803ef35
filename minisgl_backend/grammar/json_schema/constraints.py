"""The constraints of schemas on values of each JSON type, from the tables of their keywords."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any

from minisgl_backend.grammar.json_schema import regex as rx
from minisgl_backend.grammar.json_schema.document import Document, Node, SchemaError, preview
from minisgl_backend.grammar.json_schema.formula import (
    FALSE,
    TRUE,
    Formula,
    Kind,
    Size,
    Term,
    all_of,
    negation,
    regex_of,
)
from minisgl_backend.grammar.json_schema.pattern import PatternError, pattern_regex
from minisgl_backend.grammar.json_schema.values import count_of


@dataclass(frozen=True)
class Keywords:
    """What the keywords of a schema say. The second argument is the schema; `last` gets the formula of all others."""

    general: Mapping[str, Callable[[Constraints, Node, Kind], Formula]]  # on values of any type
    of_kind: Mapping[Kind, Mapping[str, Handler]]  # on values of one type, which they imply
    last: Mapping[Kind, Mapping[str, Callable[[Constraints, Node, Formula], Formula]]]  # imply no type

    @cached_property
    def kinds(self) -> set[Kind]:
        """The types that keywords imply."""
        return {kind for kind, own in self.of_kind.items() if own}


class CyclicRefError(SchemaError):
    """A `$ref` that leads back to its own schema without going through a property or item."""


class Constraints:
    """The constraints of all schemas of a document, cached."""

    def __init__(self, document: Document, keywords: Keywords) -> None:
        self.document = document
        self._keywords = keywords
        self._known: dict[tuple[Term, Kind], Formula] = {}
        self._begun: set[tuple[Term, Kind]] = set()
        self._implied: dict[Node, tuple[set[Kind], list[Node]]] = {}

    def of(self, term: Term, kind: Kind) -> Formula:
        """The constraints on values of that type. Raises SchemaError."""
        if isinstance(term.node.schema, bool):
            return TRUE if term.node.schema is term.positive else FALSE
        key = term, kind
        if key not in self._known:
            if key in self._begun:
                raise CyclicRefError(
                    "$ref", term.node.pointer, "leads back to itself; allowed: below a property or an item"
                )
            self._begun.add(key)
            try:
                self._known[key] = self._of(term, kind)
            finally:
                self._begun.discard(key)
        return self._known[key]

    def _of(self, term: Term, kind: Kind) -> Formula:
        if not term.positive:
            return negation(self.of(Term(term.node), kind))
        node = term.node
        found = []
        for keyword in node.schema:  # in the schema's order, which becomes that of properties
            if keyword in self._keywords.general:
                found.append(self._keywords.general[keyword](self, node, kind))
            elif keyword in self._keywords.of_kind[kind]:
                found.append(self._keywords.of_kind[kind][keyword](self, node))
        formula = all_of(found)
        for keyword, apply in self._keywords.last.get(kind, {}).items():
            if keyword in node.schema:
                formula = apply(self, node, formula)
        return formula

    def subschema(self, node: Node, *path: str | int) -> Term:
        """The subschema at a path."""
        return Term(self.document.child(node, *path))

    def strings(self, term: Term) -> rx.Regex:
        """The strings that match the term."""
        return regex_of(self.of(term, "string"))

    def keywords(self, terms: Iterable[Term], kind: Kind) -> list[str]:
        """Keywords in these schemas that only apply to values of that type, for error messages."""
        schemas = [term.node.schema for term in terms if isinstance(term.node.schema, dict)]
        own = self._keywords.of_kind[kind].keys() | self._keywords.last.get(kind, {}).keys()
        return list(dict.fromkeys(keyword for one in schemas for keyword in one if keyword in own))

    def pattern(self, node: Node, keyword: str, pattern: Any) -> rx.Regex:
        if not isinstance(pattern, str):
            raise node.error(keyword, f"is {preview(pattern)}; allowed: a regular expression")
        try:
            return pattern_regex(pattern)
        except PatternError as error:
            raise node.error(keyword, f"{preview(pattern)} cannot be kept: {error}") from None

    def implied(self, term: Term) -> set[Kind]:
        """Types that the schema's keywords apply to, which a schema without `type` is assumed to mean."""
        found: set[Kind] = set()
        todo = [term.node] if term.positive else []
        seen = set(todo)
        while todo and not found >= self._keywords.kinds:
            node = todo.pop()
            if node not in self._implied:
                self._implied[node] = self._implied_by(node)
            kinds, inner = self._implied[node]
            found |= kinds
            todo += [one for one in inner if one not in seen]
            seen.update(inner)
        return found

    def _implied_by(self, node: Node) -> tuple[set[Kind], list[Node]]:
        """Types that the schema's own keywords apply to, and its subschemas for the same value."""
        if not isinstance(node.schema, dict):
            return set(), []
        kinds = {kind for kind, own in self._keywords.of_kind.items() if own.keys() & node.schema.keys()}
        parts = [(key, number) for key in ("allOf", "anyOf", "oneOf") for number in range(len(node[key] or ()))]
        inner = [self.document.child(node, *path) for path in parts]
        inner += [self.document.target(node)] if "$ref" in node.schema else []
        return kinds, list(dict.fromkeys(inner))


Handler = Callable[[Constraints, Node], Formula]


def at_least(keyword: str) -> Handler:
    """The keyword is the least number of items or properties."""

    def handler(constraints: Constraints, node: Node) -> Formula:
        least = count_of(node, keyword)
        return Size(least) if least else TRUE

    return handler


def at_most(keyword: str) -> Handler:
    return lambda constraints, node: Size(0, count_of(node, keyword))


def kind_of(value: Any) -> Kind:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, Decimal)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "null" if value is None else "array" if isinstance(value, list) else "object"
