"""The constraints of schema keywords on each JSON type. Keywords that are not here, such as `title`, have none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any

from minisgl_backend.grammar.json_schema import numbers
from minisgl_backend.grammar.json_schema import regex as rx
from minisgl_backend.grammar.json_schema.array_keywords import ARRAY_KEYWORDS, unevaluated_items
from minisgl_backend.grammar.json_schema.document import Document, Node, SchemaError, json_text, preview
from minisgl_backend.grammar.json_schema.emptiness import is_empty
from minisgl_backend.grammar.json_schema.formats import FORMATS, UNSUPPORTED_FORMATS
from minisgl_backend.grammar.json_schema.formula import (
    FALSE,
    KINDS,
    TRUE,
    Formula,
    Item,
    Kind,
    NumberIn,
    Properties,
    Property,
    Required,
    Size,
    Term,
    Text,
    Truth,
    all_of,
    any_of,
    negation,
    regex_of,
)
from minisgl_backend.grammar.json_schema.object_keywords import OBJECT_KEYWORDS, unevaluated_properties
from minisgl_backend.grammar.json_schema.pattern import PatternError, pattern_regex
from minisgl_backend.grammar.json_schema.values import count_of, list_of, number_of

TYPES = (*KINDS, "integer")


class CyclicRefError(SchemaError):
    """A `$ref` that leads back to its own schema without going through a property or item."""


class Constraints:
    """The constraints of all schemas of a document, cached."""

    def __init__(self, document: Document) -> None:
        self.document = document
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
            if keyword in _GENERAL:
                found.append(_GENERAL[keyword](self, node, kind))
            elif keyword in _OF_KIND[kind]:
                found.append(_OF_KIND[kind][keyword](self, node))
        formula = all_of(found)
        if kind == "object" and "unevaluatedProperties" in node.schema:
            return unevaluated_properties(self, node, formula)
        if kind == "array" and "unevaluatedItems" in node.schema:
            return unevaluated_items(self, node, formula)
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
        return list(dict.fromkeys(keyword for one in schemas for keyword in one if keyword in _OF_KIND[kind]))

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
        while todo and not found >= _WITH_KEYWORDS:
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
        own = node.schema.keys() - _TYPE_NEUTRAL
        kinds = {kind for kind, keywords in _OF_KIND.items() if keywords.keys() & own}
        parts = [(key, number) for key in ("allOf", "anyOf", "oneOf") for number in range(len(node[key] or ()))]
        inner = [self.document.child(node, *path) for path in parts]
        inner += [self.document.target(node)] if "$ref" in node.schema else []
        return kinds, list(dict.fromkeys(inner))


def _type(constraints: Constraints, node: Node, kind: Kind) -> Formula:
    names = node["type"] if isinstance(node["type"], list) else [node["type"]]
    if not names or any(not isinstance(name, str) or name not in TYPES for name in names):
        raise node.error("type", f"is {preview(node['type'])}; allowed: {', '.join(TYPES)}, or a list of these")
    if kind == "number" and "number" not in names:
        return Text(numbers.INTEGER) if "integer" in names else FALSE
    return TRUE if kind in names else FALSE


def _enum(constraints: Constraints, node: Node, kind: Kind) -> Formula:
    return _one_of(constraints, node, "enum", list_of(node, "enum"), kind)


def _const(constraints: Constraints, node: Node, kind: Kind) -> Formula:
    return _one_of(constraints, node, "const", [node["const"]], kind)


def _one_of(constraints: Constraints, node: Node, keyword: str, values: list[Any], kind: Kind) -> Formula:
    of_kind = [value for value in values if kind_of(value) == kind]
    if not of_kind:
        return FALSE
    if kind == "null":
        return TRUE
    if kind == "boolean":
        return any_of(Truth(value) for value in of_kind)
    if kind == "string":
        return Text(rx.literals(of_kind))
    if kind == "number":
        exact = [number_of(node, keyword, value) for value in of_kind]
        return NumberIn(numbers.among(exact), numbers.none_of(exact))
    return any_of(_exactly(constraints, node, value) for value in of_kind)


def _exactly(constraints: Constraints, node: Node, value: Any) -> Formula:
    """The array or object equals `value`."""

    def only(part: Any) -> Term:
        return Term(constraints.document.synthetic({"const": part}, node.pointer, key=("const", json_text(part))))

    if isinstance(value, list):
        return all_of([Size(len(value), len(value)), *(Item(n, only(part)) for n, part in enumerate(value))])
    facts = [fact for name, part in value.items() for fact in (Property(name, only(part)), Required(name))]
    return all_of([*facts, Properties(rx.complement(rx.literals(value)), Required.never, node, "const")])


def kind_of(value: Any) -> Kind:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, Decimal)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "null" if value is None else "array" if isinstance(value, list) else "object"


def _ref(constraints: Constraints, node: Node, kind: Kind) -> Formula:
    return constraints.of(Term(constraints.document.target(node)), kind)


def _dynamic_ref(constraints: Constraints, node: Node, kind: Kind) -> Formula:
    target = constraints.document.target(node, "$dynamicRef")
    name = target["$dynamicAnchor"]
    by_name = str(node["$dynamicRef"]).endswith(f"#{name}")
    if by_name and isinstance(name, str) and constraints.document.dynamic.get(name, 0) > 1:
        raise node.error("$dynamicRef", "cannot be kept where several schemas have the anchor; allowed: $ref")
    return constraints.of(Term(target), kind)


def _recursive_ref(constraints: Constraints, node: Node, kind: Kind) -> Formula:
    raise node.error("$recursiveRef", "cannot be kept; allowed: $ref")


def _parts(constraints: Constraints, node: Node, keyword: str) -> list[Term]:
    return [constraints.subschema(node, keyword, number) for number in range(len(list_of(node, keyword, least=1)))]


def _all_of(constraints: Constraints, node: Node, kind: Kind) -> Formula:
    return all_of([constraints.of(term, kind) for term in _parts(constraints, node, "allOf")])


def _any_of(constraints: Constraints, node: Node, kind: Kind) -> Formula:
    return any_of([constraints.of(term, kind) for term in _parts(constraints, node, "anyOf")])


def _one_of_schemas(constraints: Constraints, node: Node, kind: Kind) -> Formula:
    terms = _parts(constraints, node, "oneOf")
    own = {key: value for key, value in node.schema.items() if key not in _NO_NEIGHBOURS}
    # Sibling keywords can also make the alternatives exclusive, such as a required property that differs in each.
    siblings = [Term(constraints.document.synthetic(own, node.pointer, key=("beside", node)))] if own else []
    found = []
    for number, term in enumerate(terms):
        others = [
            negation(constraints.of(other, kind))
            for position, other in enumerate(terms)
            if position != number and not is_empty(constraints, (term, other, *siblings), kind)
        ]
        found.append(all_of([constraints.of(term, kind), *others]))
    return any_of(found)


_NO_NEIGHBOURS = ("oneOf", "anyOf", "allOf", "$ref", "$dynamicRef", "not", "if", "then", "else", "$defs", "definitions")


def _not(constraints: Constraints, node: Node, kind: Kind) -> Formula:
    return negation(constraints.of(constraints.subschema(node, "not"), kind))


def _if(constraints: Constraints, node: Node, kind: Kind) -> Formula:
    if "then" not in node.schema and "else" not in node.schema and not _is_annotated(node):
        return TRUE
    condition = constraints.of(constraints.subschema(node, "if"), kind)
    then = constraints.of(constraints.subschema(node, "then"), kind) if "then" in node.schema else TRUE
    otherwise = constraints.of(constraints.subschema(node, "else"), kind) if "else" in node.schema else TRUE
    return any_of([all_of([condition, then]), all_of([negation(condition), otherwise])])


def _is_annotated(node: Node) -> bool:
    return "unevaluatedItems" in node.schema or "unevaluatedProperties" in node.schema


def _bound(keyword: str, exclusive: str, regex: Callable[[Decimal, bool], rx.Regex]) -> Callable[..., Formula]:
    def handler(constraints: Constraints, node: Node) -> Formula:
        if isinstance(node[keyword], bool) and keyword == exclusive:  # draft 4, where it modifies the other keyword
            return TRUE
        strict = keyword == exclusive or node[exclusive] is True
        return Text(regex(number_of(node, keyword, node[keyword]), strict))

    return handler


def _multiple_of(constraints: Constraints, node: Node) -> Formula:
    factor = number_of(node, "multipleOf", node["multipleOf"])
    if factor <= 0:
        raise node.error("multipleOf", f"is {preview(node['multipleOf'])}; allowed: above 0")
    found = numbers.multiples(factor)
    if found is None:
        what = f"has too many digits to be kept; allowed: at most {numbers.MAX_PERIOD}, or so many of its last digit"
        raise node.error("multipleOf", f"is {preview(node['multipleOf'])} and {what}")
    return Text(found)


def _min_length(constraints: Constraints, node: Node) -> Formula:
    return Text(rx.repeat(rx.ANY_CHAR, count_of(node, "minLength"), None))


def _max_length(constraints: Constraints, node: Node) -> Formula:
    return Text(rx.repeat(rx.ANY_CHAR, 0, count_of(node, "maxLength")))


def _pattern(constraints: Constraints, node: Node) -> Formula:
    return Text(constraints.pattern(node, "pattern", node["pattern"]))


def _format(constraints: Constraints, node: Node) -> Formula:
    name = node["format"]
    if name in UNSUPPORTED_FORMATS:
        raise node.error("format", f"is {preview(name)}, which cannot be kept; allowed: {', '.join(FORMATS)}")
    return Text(pattern_regex(FORMATS[name])) if name in FORMATS else TRUE


_TYPE_NEUTRAL = {"unevaluatedItems", "unevaluatedProperties"}  # do not imply a type
_General = Callable[[Constraints, Node, Kind], Formula]
_GENERAL: Mapping[str, _General] = {
    "type": _type,
    "enum": _enum,
    "const": _const,
    "allOf": _all_of,
    "$ref": _ref,
    "$dynamicRef": _dynamic_ref,
    "$recursiveRef": _recursive_ref,
    "anyOf": _any_of,
    "oneOf": _one_of_schemas,
    "not": _not,
    "if": _if,
}
_OF_KIND: Mapping[Kind, Mapping[str, Callable[[Constraints, Node], Formula]]] = {
    "null": {},
    "boolean": {},
    "number": {
        "minimum": _bound("minimum", "exclusiveMinimum", numbers.at_least),
        "maximum": _bound("maximum", "exclusiveMaximum", numbers.at_most),
        "exclusiveMinimum": _bound("exclusiveMinimum", "exclusiveMinimum", numbers.at_least),
        "exclusiveMaximum": _bound("exclusiveMaximum", "exclusiveMaximum", numbers.at_most),
        "multipleOf": _multiple_of,
    },
    "string": {"minLength": _min_length, "maxLength": _max_length, "pattern": _pattern, "format": _format},
    "array": ARRAY_KEYWORDS,
    "object": OBJECT_KEYWORDS,
}
_WITH_KEYWORDS = frozenset(kind for kind, keywords in _OF_KIND.items() if keywords)
_AUXILIARY_KEYWORDS = ("then", "else", "minContains", "maxContains", "additionalItems")  # read by other keywords
KEYWORDS = frozenset((*_GENERAL, *_AUXILIARY_KEYWORDS)).union(*_OF_KIND.values())  # all that constrain values
