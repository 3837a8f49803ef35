"""What a schema asks of the values of one JSON type: facts, joined by «and» and «or».

Facts are negated one by one, so that `not`, `if`, `oneOf` and dependencies become facts as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

from minisgl_backend.grammar.json_schema import regex as rx
from minisgl_backend.grammar.json_schema.document import Node
from minisgl_backend.grammar.json_schema.regex import Regex

MAX_BRANCHES = 512  # alternatives of one schema for one type

Kind = Literal["null", "boolean", "number", "string", "array", "object"]  # JSON's types
KINDS: tuple[Kind, ...] = ("object", "array", "string", "number", "boolean", "null")


@dataclass(frozen=True)
class Term:
    """That a value matches a schema, or does not."""

    node: Node
    positive: bool = True

    @property
    def is_trivial(self) -> bool:
        """Every value matches, as anybody sees."""
        return self.node.schema is (self.positive) or (self.positive and self.node.schema == {})

    @property
    def is_never(self) -> bool:
        return self.node.schema is (not self.positive) or (not self.positive and self.node.schema == {})


@dataclass(frozen=True)
class Fact:
    """Of one type of values."""

    def negated(self) -> Formula:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class _Joined:
    """Parts are shared, as definitions are by those who refer to them: what follows from one is found once.

    Else each level of definitions that name the next one twice would double the work.
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
            object.__setattr__(other, "parts", self.parts)  # equal ones are compared part by part once
        return True

    @cached_property
    def opposite(self) -> Formula:
        raise NotImplementedError

    @cached_property
    def alternatives(self) -> tuple[Branch, ...] | None:
        """None: more than MAX_BRANCHES."""
        raise NotImplementedError

    @cached_property
    def regex(self) -> Regex:
        """Where all parts are about texts."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class And(_Joined):
    @cached_property
    def opposite(self) -> Formula:
        return any_of(map(negation, self.parts))

    @cached_property
    def alternatives(self) -> tuple[Branch, ...] | None:
        joined: tuple[Branch, ...] | None = ((),)
        # The parts with fewer alternatives first: what contradicts them is gone early.
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
Branch = tuple[Fact, ...]  # facts that hold together
TRUE, FALSE = And(()), Or(())


@dataclass(frozen=True)
class Text(Fact):
    """A string, without quotes, or the text of a number, is one of the regex's."""

    regex: Regex

    def negated(self) -> Formula:
        return Text(rx.complement(self.regex))


@dataclass(frozen=True)
class NumberIn(Text):
    """The text of a number stands for one of some values; `others`: all texts that do not, however they are written."""

    others: Regex

    def negated(self) -> Formula:
        return Text(self.others)


@dataclass(frozen=True)
class Truth(Fact):
    """A boolean is this one."""

    value: bool

    def negated(self) -> Formula:
        return Truth(not self.value)


@dataclass(frozen=True)
class Size(Fact):
    """Items of an array, or properties of an object."""

    least: int = 0
    most: int | None = None

    def negated(self) -> Formula:
        fewer = [Size(0, self.least - 1)] if self.least else []
        more = [] if self.most is None else [Size(self.most + 1)]
        return any_of([*fewer, *more])


@dataclass(frozen=True)
class Item(Fact):
    """The item at a place, where there is one."""

    number: int
    term: Term
    evaluates: bool = True  # what `unevaluatedItems` heeds; so for others

    def negated(self) -> Formula:
        return all_of([Size(self.number + 1), Item(self.number, _opposite(self.term), False)])


@dataclass(frozen=True)
class Items(Fact):
    """All items from a place on."""

    first: int
    term: Term
    evaluates: bool = True

    def negated(self) -> Formula:
        return Contains(self.first, _opposite(self.term), 1, None)


@dataclass(frozen=True)
class Contains(Fact):
    """So many items from a place on match."""

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
    """No two items are equal, or (`negative`) some are."""

    node: Node
    negative: bool = False

    def negated(self) -> Formula:
        return replace(self, negative=not self.negative)


@dataclass(frozen=True)
class Property(Fact):
    """The property, where there is one."""

    name: str
    term: Term
    evaluates: bool = True

    def negated(self) -> Formula:
        return all_of([Required(self.name), Property(self.name, _opposite(self.term), False)])


@dataclass(frozen=True)
class Required(Fact):
    """There is the property."""

    name: str
    never: ClassVar[Term]  # which no value matches

    def negated(self) -> Formula:
        return Property(self.name, Required.never, False)


@dataclass(frozen=True)
class Properties(Fact):
    """All properties whose names are among the regex's."""

    names: Regex
    term: Term
    node: Node
    keyword: str
    evaluates: bool = True

    def negated(self) -> Formula:
        return FALSE if self.term.is_trivial else Exists(replace(self, evaluates=False))


@dataclass(frozen=True)
class Exists(Fact):
    """Some property breaks that rule. A grammar cannot say so: the name might come again, with another value."""

    rule: Properties

    def negated(self) -> Formula:
        return self.rule


@dataclass(frozen=True)
class Closed(Fact):
    """No rule: a hint that whoever names properties, or the first items, expects no others."""

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
    """Alternatives; raises what `too_many` makes where there are more than MAX_BRANCHES."""
    found = _alternatives(formula)
    if found is None:
        raise too_many()
    return found


def _alternatives(formula: Formula) -> tuple[Branch, ...] | None:
    return ((formula,),) if isinstance(formula, Fact) else formula.alternatives


def _minimal(found: list[Branch]) -> tuple[Branch, ...] | None:
    """Without those that ask for more than another one does; None: more than MAX_BRANCHES."""
    if len(found) < 2:
        return tuple(found)
    if len(found) > 4 * MAX_BRANCHES:
        return None
    sets = {frozenset(one): one for one in reversed(found)}
    kept = tuple(one for facts, one in reversed(sets.items()) if not any(other < facts for other in sets))
    return kept if len(kept) <= MAX_BRANCHES else None


def _contradicts(facts: Branch) -> bool:
    """No value has them all; where that takes a closer look, False."""
    least, most = 0, None
    for fact in facts:
        if isinstance(fact, Size):
            least = max(least, fact.least)
            most = fact.most if most is None or (fact.most is not None and fact.most < most) else most
        elif isinstance(fact, Property) and fact.term.is_never and Required(fact.name) in facts:
            return True
    return most is not None and least > most


def evaluate(formula: Formula, facts: set[Fact]) -> bool:
    """Whether it holds where these facts hold, and no others."""
    known: dict[Formula, bool] = {}

    def holds(part: Formula) -> bool:
        if isinstance(part, Fact):
            return part in facts
        if part not in known:
            known[part] = (all if isinstance(part, And) else any)(map(holds, part.parts))
        return known[part]

    return holds(formula)


def regex_of(formula: Formula) -> Regex:
    """Of strings or numbers: the texts that it allows."""
    if isinstance(formula, Fact):
        assert isinstance(formula, Text)
        return formula.regex
    return formula.regex
