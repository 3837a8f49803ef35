"""Whether schemas obviously have no value in common, as is usual for the alternatives of a `oneOf`."""

from __future__ import annotations

from minisgl_backend.grammar.json_schema.automaton import TooManyStatesError, automaton
from minisgl_backend.grammar.json_schema.constraints import Constraints
from minisgl_backend.grammar.json_schema.document import SchemaError
from minisgl_backend.grammar.json_schema.formula import (
    KINDS,
    Branch,
    Kind,
    Required,
    Size,
    Term,
    Truth,
    all_of,
    branches,
    evaluate,
    regex_of,
    terms_of_item,
    terms_of_property,
)

DEPTH = 3  # levels of nesting that are examined
ITEMS = 8  # of an array, the first ones


def is_empty(constraints: Constraints, terms: tuple[Term, ...], kind: Kind, depth: int = DEPTH) -> bool:
    """Whether no value of that type matches all terms. False if that is not obvious."""
    try:
        formula = all_of([constraints.of(term, kind) for term in terms])
        if kind in ("string", "number"):
            return not automaton(regex_of(formula))
        if kind in ("null", "boolean"):
            return not any(evaluate(formula, {Truth(it)}) for it in (True, False))
        found = branches(formula, TooManyStatesError)
    except (SchemaError, TooManyStatesError):  # a cyclic reference, or too complex
        return False
    lacks = _lacks_property if kind == "object" else _lacks_item
    return all(depth > 0 and lacks(constraints, branch, depth) for branch in found)


def _nothing(constraints: Constraints, terms: list[Term], depth: int) -> bool:
    return all(is_empty(constraints, tuple(dict.fromkeys(terms)), kind, depth - 1) for kind in KINDS)


def _lacks_property(constraints: Constraints, branch: Branch, depth: int) -> bool:
    for needed in branch:
        if isinstance(needed, Required) and _nothing(constraints, terms_of_property(branch, needed.name), depth):
            return True
    return False


def _lacks_item(constraints: Constraints, branch: Branch, depth: int) -> bool:
    least = max((fact.least for fact in branch if isinstance(fact, Size)), default=0)
    return any(_nothing(constraints, terms_of_item(branch, number), depth) for number in range(min(least, ITEMS)))
