"""The tables of schema keywords. Keywords that are not here, such as `title`, constrain nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from minisgl_backend.grammar.json_schema import numbers
from minisgl_backend.grammar.json_schema import regex as rx
from minisgl_backend.grammar.json_schema.array_keywords import ARRAY_KEYWORDS, unevaluated_items
from minisgl_backend.grammar.json_schema.constraints import Constraints, Handler, Keywords, kind_of
from minisgl_backend.grammar.json_schema.document import Node, json_text, preview
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
)
from minisgl_backend.grammar.json_schema.object_keywords import OBJECT_KEYWORDS, unevaluated_properties
from minisgl_backend.grammar.json_schema.pattern import pattern_regex
from minisgl_backend.grammar.json_schema.values import count_of, list_of, number_of

TYPES = (*KINDS, "integer")


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


_GENERAL: Mapping[str, Callable[[Constraints, Node, Kind], Formula]] = {
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
_OF_KIND: Mapping[Kind, Mapping[str, Handler]] = {
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
_LAST: Mapping[Kind, Mapping[str, Callable[[Constraints, Node, Formula], Formula]]] = {
    "array": {"unevaluatedItems": unevaluated_items},
    "object": {"unevaluatedProperties": unevaluated_properties},
}
KEYWORDS = Keywords(_GENERAL, _OF_KIND, _LAST)
_AUXILIARY = ("then", "else", "minContains", "maxContains", "additionalItems")  # read by other keywords
CONSTRAINING = frozenset((*_GENERAL, *_AUXILIARY)).union(*_OF_KIND.values(), *_LAST.values())  # all that constrain
