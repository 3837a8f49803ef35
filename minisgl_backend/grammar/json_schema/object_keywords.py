"""Schema keywords of objects."""

from __future__ import annotations

from collections.abc import Mapping

from minisgl_backend.grammar.json_schema import regex as rx
from minisgl_backend.grammar.json_schema.constraints import Constraints, Handler, at_least, at_most
from minisgl_backend.grammar.json_schema.document import Node
from minisgl_backend.grammar.json_schema.formula import (
    TRUE,
    Closed,
    Formula,
    Properties,
    Property,
    Required,
    all_of,
    any_of,
    branches,
)
from minisgl_backend.grammar.json_schema.values import map_of, names_of

_ABOUT_NAMES = ("properties", "patternProperties", "additionalProperties")


def _properties(constraints: Constraints, node: Node) -> Formula:
    names = list(map_of(node, "properties")) if "properties" in node.schema else []
    facts: list[Formula] = [Property(name, constraints.subschema(node, "properties", name)) for name in names]
    known = [rx.literals(names)]
    for pattern in map_of(node, "patternProperties") if "patternProperties" in node.schema else ():
        regex = constraints.pattern(node, "patternProperties", pattern)
        known.append(regex)
        term = constraints.subschema(node, "patternProperties", pattern)
        facts.append(Properties(regex, term, node, "patternProperties"))
    if "additionalProperties" in node.schema:
        rest = rx.complement(rx.either(known))
        term = constraints.subschema(node, "additionalProperties")
        facts.append(Properties(rest, term, node, "additionalProperties"))
    elif "unevaluatedProperties" not in node.schema:
        facts.append(Closed())
    return all_of(facts)


def _once(keyword: str) -> Handler:
    """The keywords of _ABOUT_NAMES are handled together, at the first that the schema has."""

    def handler(constraints: Constraints, node: Node) -> Formula:
        first = next(one for one in _ABOUT_NAMES if one in node.schema)
        return _properties(constraints, node) if keyword == first else TRUE

    return handler


def _required(constraints: Constraints, node: Node) -> Formula:
    return all_of(Required(name) for name in names_of(node, "required", node["required"]))


def _property_names(constraints: Constraints, node: Node) -> Formula:
    allowed = constraints.strings(constraints.subschema(node, "propertyNames"))
    if allowed is rx.ALL:
        return TRUE
    return Properties(rx.complement(allowed), Required.never, node, "propertyNames", False)


def _dependent_required(constraints: Constraints, node: Node) -> Formula:
    return all_of(
        _if_present(name, all_of(Required(other) for other in names_of(node, "dependentRequired", others)))
        for name, others in map_of(node, "dependentRequired").items()
    )


def _dependent_schemas(constraints: Constraints, node: Node) -> Formula:
    return all_of(
        _if_present(name, constraints.of(constraints.subschema(node, "dependentSchemas", name), "object"))
        for name in map_of(node, "dependentSchemas")
    )


def _dependencies(constraints: Constraints, node: Node) -> Formula:
    """Draft 7's keyword for `dependentRequired` and `dependentSchemas`."""
    found = []
    for name, value in map_of(node, "dependencies").items():
        if isinstance(value, list):
            needed = all_of(Required(other) for other in names_of(node, "dependencies", value))
        else:
            needed = constraints.of(constraints.subschema(node, "dependencies", name), "object")
        found.append(_if_present(name, needed))
    return all_of(found)


def _if_present(name: str, needed: Formula) -> Formula:
    return any_of([all_of([Required(name), needed]), Property(name, Required.never, False)])


def unevaluated_properties(constraints: Constraints, node: Node, formula: Formula) -> Formula:
    """`formula`, which is that of all other keywords, with `unevaluatedProperties` applied to properties that they do
    not evaluate."""
    rest = constraints.subschema(node, "unevaluatedProperties")
    found = []
    for branch in branches(formula, lambda: node.error("unevaluatedProperties", "is beside too many alternatives")):
        names = [fact.name for fact in branch if isinstance(fact, Property) and fact.evaluates]
        regexes = [fact.names for fact in branch if isinstance(fact, Properties) and fact.evaluates]
        others = rx.complement(rx.either([rx.literals(names), *regexes]))
        found.append(all_of([*branch, Properties(others, rest, node, "unevaluatedProperties")]))
    return any_of(found)


OBJECT_KEYWORDS: Mapping[str, Handler] = {
    "properties": _once("properties"),
    "patternProperties": _once("patternProperties"),
    "additionalProperties": _once("additionalProperties"),
    "required": _required,
    "minProperties": at_least("minProperties"),
    "maxProperties": at_most("maxProperties"),
    "propertyNames": _property_names,
    "dependentRequired": _dependent_required,
    "dependentSchemas": _dependent_schemas,
    "dependencies": _dependencies,
}
