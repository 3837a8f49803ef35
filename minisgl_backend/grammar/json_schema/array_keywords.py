"""Schema keywords of arrays."""

from __future__ import annotations

from collections.abc import Mapping

from minisgl_backend.grammar.json_schema.constraints import Constraints, Handler, at_least, at_most
from minisgl_backend.grammar.json_schema.document import Node, preview
from minisgl_backend.grammar.json_schema.formula import (
    TRUE,
    Branch,
    Closed,
    Contains,
    Formula,
    Item,
    Items,
    Term,
    Unique,
    all_of,
    any_of,
    branches,
)
from minisgl_backend.grammar.json_schema.values import count_of, list_of


def _items(constraints: Constraints, node: Node) -> Formula:
    """`prefixItems` and `items`, or draft 7's `items` with a list and `additionalItems`."""
    keyword = "items" if isinstance(node["items"], list) else "prefixItems"
    prefix = list_of(node, keyword) if keyword in node.schema else []
    facts: list[Formula] = [Item(number, constraints.subschema(node, keyword, number)) for number in range(len(prefix))]
    rest = "additionalItems" if keyword == "items" else "items"
    if rest in node.schema:
        return all_of([*facts, Items(len(prefix), constraints.subschema(node, rest))])
    return all_of([*facts, Closed(len(prefix))]) if prefix and "unevaluatedItems" not in node.schema else all_of(facts)


def _once(constraints: Constraints, node: Node) -> Formula:
    return TRUE if "prefixItems" in node.schema else _items(constraints, node)


def _contains(constraints: Constraints, node: Node) -> Formula:
    least = count_of(node, "minContains", 1)
    most = count_of(node, "maxContains") if "maxContains" in node.schema else None
    if least == 0 and most is None:
        return TRUE
    return Contains(0, constraints.subschema(node, "contains"), least, most)


def _unique_items(constraints: Constraints, node: Node) -> Formula:
    if not isinstance(node["uniqueItems"], bool):
        raise node.error("uniqueItems", f"is {preview(node['uniqueItems'])}; allowed: true, false")
    return Unique(node) if node["uniqueItems"] else TRUE


def unevaluated_items(constraints: Constraints, node: Node, formula: Formula) -> Formula:
    """`formula`, which is that of all other keywords, with `unevaluatedItems` applied to items they do not evaluate."""
    rest = constraints.subschema(node, "unevaluatedItems")
    found = []
    for branch in branches(formula, lambda: node.error("unevaluatedItems", "is beside too many alternatives")):
        looked_at = 1 + max((fact.number for fact in branch if isinstance(fact, Item) and fact.evaluates), default=-1)
        all_are = any(isinstance(fact, Items) and fact.evaluates and fact.first <= looked_at for fact in branch)
        found.append(
            all_of(branch if all_are else [*branch, Items(looked_at, _or_contained(constraints, rest, branch))])
        )
    return any_of(found)


def _or_contained(constraints: Constraints, rest: Term, branch: Branch) -> Term:
    """Items that match `contains` count as evaluated, so the others' schema becomes an alternative to it."""
    seen = [fact.term.node for fact in branch if isinstance(fact, Contains) and fact.term.positive and fact.least]
    if not seen:
        return rest
    schema = {"anyOf": [rest.node.schema, *(node.schema for node in seen)]}
    return Term(constraints.document.synthetic(schema, rest.node.pointer, key=("contained", rest.node, *seen)))


ARRAY_KEYWORDS: Mapping[str, Handler] = {
    "prefixItems": _items,
    "items": _once,
    "minItems": at_least("minItems"),
    "maxItems": at_most("maxItems"),
    "contains": _contains,
    "uniqueItems": _unique_items,
}
