"""Constraints of a schema on the values of one JSON type: a formula of facts, joined by «and» and «or».

Every fact can be negated, so `not`, `if`, `oneOf` and dependencies become formulas, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

from minisgl_backend.grammar.json_schema import regex as rx
from minisgl_backend.grammar.json_schema.document import Node
from minisgl_backend.grammar.json_schema.regex import Regex

MAX_BRANCHES = 512  # of a formula in disjunctive normal form: alternatives of one schema for one type

Kind = Literal["null", "boolean", "number", "string", "array", "object"]  # JSON's types
KINDS: tuple[Kind, ...] = ("object", "array", "string", "number", "boolean", "null")


@dataclass(frozen=True)
class Term:
    """A value matches a schema, or does not."""

    node: Node
    positive: bool = True

    @property
    def is_trivial(self) -> bool:
        """Obviously every value matches."""
        return self.node.schema is (self.positive) or (self.positive and self.node.schema == {})

    @property
    def is_never(self) -> bool:
        return self.node.schema is (not self.positive) or (not self.positive and self.node.schema == {})


@dataclass(frozen=True)
class Fact:
    """An elementary constraint on values of one type."""

    def negated(self) -> Formula:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class _Joined:
    """A conjunction or disjunction. Formulas share parts, as schemas do definitions, and results are cached per part.

    Otherwise each level of definitions that refer to the next one twice would double the work.
    """

    parts: tuple[Formula, ...]

    @cached_property
    def _hash(self) -> int:
        return hash((type(self).__name__, self.parts))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, _Joined) or type(self) is not type(other) or self._hash != other._hash:
            return False
        if self.parts is not other.parts:
            if self.parts != other.parts:
                return False
            object.__setattr__(other, "parts", self.parts)  # later comparisons stop at identical parts
        return True

    @cached_property
    def opposite(self) -> Formula:
        raise NotImplementedError

    @cached_property
    def alternatives(self) -> tuple[Branch, ...] | None:
        """The branches of the disjunctive normal form; None: more than MAX_BRANCHES."""
        raise NotImplementedError

    @cached_property
    def regex(self) -> Regex:
        """Only defined if all facts are `Text`."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class And(_Joined):
    @cached_property
    def opposite(self) -> Formula:
        return any_of(map(negation, self.parts))

    @cached_property
    def alternatives(self) -> tuple[Branch, ...] | None:
        joined: tuple[Branch, ...] | None = ((),)
        # Parts with few alternatives come first, so that contradictions are dropped early.
        for part in sorted(self.parts, key=lambda one: len(one.parts) if isinstance(one, Or) else 0):
            more = _alternatives(part)
            if more is None or joined is None:
                return None
            both = [tuple(dict.fromkeys(one + other)) for one in joined for other in more]
            joined = _minimal([one for one in both if not _contradicts(one)])
        return joined

    @cached_property
    def regex(self) -> Regex:
        return rx.both(*map(regex_of, self.parts))


@dataclass(frozen=True, eq=False)
class Or(_Joined):
    @cached_property
    def opposite(self) -> Formula:
        return all_of(map(negation, self.parts))

    @cached_property
    def alternatives(self) -> tuple[Branch, ...] | None:
        found: list[Branch] = []
        for part in self.parts:
            more = _alternatives(part)
            if more is None:
                return None
            found += more
        return _minimal(found)

    @cached_property
    def regex(self) -> Regex:
        return rx.either(map(regex_of, self.parts))


Formula = Fact | And | Or
Branch = tuple[Fact, ...]  # a conjunction
TRUE, FALSE = And(()), Or(())


@dataclass(frozen=True)
class Text(Fact):
    """The content of a string, or the text of a number, matches the regex."""

    regex: Regex

    def negated(self) -> Formula:
        return Text(rx.complement(self.regex))


@dataclass(frozen=True)
class NumberIn(Text):
    """A number equals one of some values; `others` matches the texts of all other numbers in any spelling."""

    others: Regex

    def negated(self) -> Formula:
        return Text(self.others)


@dataclass(frozen=True)
class Truth(Fact):
    """A boolean has this value."""

    value: bool

    def negated(self) -> Formula:
        return Truth(not self.value)


@dataclass(frozen=True)
class Size(Fact):
    """Number of items of an array, or of properties of an object."""

    least: int = 0
    most: int | None = None

    def negated(self) -> Formula:
        fewer = [Size(0, self.least - 1)] if self.least else []
        more = [] if self.most is None else [Size(self.most + 1)]
        return any_of([*fewer, *more])


@dataclass(frozen=True)
class Item(Fact):
    """The item at index `number`, if there is one, matches."""

    number: int
    term: Term
    evaluates: bool = True  # for `unevaluatedItems`, or `unevaluatedProperties`

    def negated(self) -> Formula:
        return all_of([Size(self.number + 1), Item(self.number, _opposite(self.term), False)])


@dataclass(frozen=True)
class Items(Fact):
    """All items from index `first` on match."""

    first: int
    term: Term
    evaluates: bool = True

    def negated(self) -> Formula:
        return Contains(self.first, _opposite(self.term), 1, None)


@dataclass(frozen=True)
class Contains(Fact):
    """`least` to `most` of the items from index `first` on match."""

    first: int
    term: Term
    least: int
    most: int | None

    def negated(self) -> Formula:
        counts = Size(self.least, self.most).negated()
        sizes = counts.parts if isinstance(counts, Or) else (counts,)
        return any_of(replace(self, least=size.least, most=size.most) for size in sizes if isinstance(size, Size))


@dataclass(frozen=True)
class Unique(Fact):
    """No two items are equal, or, if `negative`, some are."""

    node: Node
    negative: bool = False

    def negated(self) -> Formula:
        return replace(self, negative=not self.negative)


@dataclass(frozen=True)
class Property(Fact):
    """The property `name`, if there is one, matches."""

    name: str
    term: Term
    evaluates: bool = True

    def negated(self) -> Formula:
        return all_of([Required(self.name), Property(self.name, _opposite(self.term), False)])


@dataclass(frozen=True)
class Required(Fact):
    """There is a property `name`."""

    name: str
    never: ClassVar[Term]  # matches no value

    def negated(self) -> Formula:
        return Property(self.name, Required.never, False)


@dataclass(frozen=True)
class Properties(Fact):
    """All properties whose names match the regex match the term."""

    names: Regex
    term: Term
    node: Node
    keyword: str
    evaluates: bool = True

    def negated(self) -> Formula:
        return FALSE if self.term.is_trivial else Exists(replace(self, evaluates=False))


@dataclass(frozen=True)
class Exists(Fact):
    """Some property violates the rule. A grammar cannot express this, since the name might come again with another
    value."""

    rule: Properties

    def negated(self) -> Formula:
        return self.rule


@dataclass(frozen=True)
class Closed(Fact):
    """No constraint, but a hint: a schema that lists properties, or the first items, likely expects no others."""

    items: int | None = None  # None: properties

    def negated(self) -> Formula:
        return FALSE


Required.never = Term(Node(False, "", ""))


def _opposite(term: Term) -> Term:
    return Term(term.node, not term.positive)


def all_of(formulas: Iterable[Formula]) -> Formula:
    found: dict[Formula, None] = {}
    for formula in formulas:
        if formula == FALSE:
            return FALSE
        found |= dict.fromkeys(formula.parts if isinstance(formula, And) else (formula,))
    return next(iter(found)) if len(found) == 1 else And(tuple(found))


def any_of(formulas: Iterable[Formula]) -> Formula:
    found: dict[Formula, None] = {}
    for formula in formulas:
        if formula == TRUE:
            return TRUE
        found |= dict.fromkeys(formula.parts if isinstance(formula, Or) else (formula,))
    return next(iter(found)) if len(found) == 1 else Or(tuple(found))


def negation(formula: Formula) -> Formula:
    return formula.negated() if isinstance(formula, Fact) else formula.opposite


def branches(formula: Formula, too_many: Callable[[], Exception]) -> tuple[Branch, ...]:
    """The branches of the disjunctive normal form; raises what `too_many` returns above MAX_BRANCHES."""
    found = _alternatives(formula)
    if found is None:
        raise too_many()
    return found


def _alternatives(formula: Formula) -> tuple[Branch, ...] | None:
    return ((formula,),) if isinstance(formula, Fact) else formula.alternatives


def _minimal(found: list[Branch]) -> tuple[Branch, ...] | None:
    """Drops branches that imply another one; None: more than MAX_BRANCHES are left."""
    if len(found) < 2:
        return tuple(found)
    if len(found) > 4 * MAX_BRANCHES:
        return None
    sets = {frozenset(one): one for one in reversed(found)}
    kept = tuple(one for facts, one in reversed(sets.items()) if not any(other < facts for other in sets))
    return kept if len(kept) <= MAX_BRANCHES else None


def _contradicts(facts: Branch) -> bool:
    """Whether the facts obviously contradict each other."""
    least, most = 0, None
    for fact in facts:
        if isinstance(fact, Size):
            least = max(least, fact.least)
            most = fact.most if most is None or (fact.most is not None and fact.most < most) else most
        elif isinstance(fact, Property) and fact.term.is_never and Required(fact.name) in facts:
            return True
    return most is not None and least > most


def evaluate(formula: Formula, facts: set[Fact]) -> bool:
    """Whether the formula holds if exactly these facts hold."""
    known: dict[Formula, bool] = {}

    def holds(part: Formula) -> bool:
        if isinstance(part, Fact):
            return part in facts
        if part not in known:
            known[part] = (all if isinstance(part, And) else any)(map(holds, part.parts))
        return known[part]

    return holds(formula)


def regex_of(formula: Formula) -> Regex:
    """The texts that a formula about strings or numbers allows."""
    if isinstance(formula, Fact):
        assert isinstance(formula, Text)
        return formula.regex
    return formula.regex


def terms_of_property(branch: Branch, name: str) -> list[Term]:
    """What the value of the property `name` must match."""
    own = [fact.term for fact in branch if isinstance(fact, Property) and fact.name == name]
    return own + [fact.term for fact in branch if isinstance(fact, Properties) and rx.matches(fact.names, name)]


def terms_of_item(branch: Branch, number: int) -> list[Term]:
    """What the item at index `number` must match."""
    own = [fact.term for fact in branch if isinstance(fact, Item) and fact.number == number]
    return own + [fact.term for fact in branch if isinstance(fact, Items) and fact.first <= number]
