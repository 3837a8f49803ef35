"""Builds the grammar of a schema: one rule for each set of schemas that a value must match together."""

from __future__ import annotations

from collections.abc import Iterable

from minisgl_backend.grammar.json_schema import numbers
from minisgl_backend.grammar.json_schema import regex as rx
from minisgl_backend.grammar.json_schema.automaton import TooManyStatesError, automaton
from minisgl_backend.grammar.json_schema.constraints import Constraints
from minisgl_backend.grammar.json_schema.containers import (
    Counter,
    NamedProperty,
    OtherProperties,
    Outcome,
    array_choice,
    object_choice,
)
from minisgl_backend.grammar.json_schema.document import Document, Node, SchemaError
from minisgl_backend.grammar.json_schema.formula import (
    FALSE,
    KINDS,
    TRUE,
    Branch,
    Closed,
    Contains,
    Exists,
    Formula,
    Item,
    Items,
    Kind,
    Properties,
    Property,
    Required,
    Size,
    Term,
    Truth,
    Unique,
    all_of,
    branches,
    evaluate,
    regex_of,
    terms_of_item,
    terms_of_property,
)
from minisgl_backend.grammar.json_schema.keywords import KEYWORDS
from minisgl_backend.grammar.json_schema.notation import ARGUMENT, Notation
from minisgl_backend.grammar.json_schema.regex import Regex
from minisgl_backend.grammar.json_schema.rules import Choice, Ref, Rules, literal
from minisgl_backend.grammar.json_schema.text_rules import TextRules

MAX_NAME_RULES = 6  # patterns of property names for one object: each may double the classes of names
MAX_COUNTERS = 3  # `contains` of one array: each multiplies the rules
MAX_DIFFERENT = 16  # properties without a known name that an object may require

Terms = tuple[Term, ...]


class Builder:
    """Builds the grammar of one document."""

    def __init__(self, document: Document, notation: Notation) -> None:
        self._document = document
        self._notation = notation
        self._constraints = Constraints(document, KEYWORDS)
        self._rules = Rules()
        self._texts = TextRules(self._rules, notation)
        self._values: dict[frozenset[Term], str] = {}
        self._todo: list[tuple[str, Terms]] = []

    def grammar(self) -> str:
        """The grammar as EBNF; empty if no value matches. Raises SchemaError, TooManyRulesError."""
        terms = (Term(self._document.root),)
        if self._notation.root is None:
            root = self._value(terms)
        else:
            root = self._rules.new("root_value")
            formula = self._constraints.of(terms[0], self._notation.root)
            self._rules.put(root, self._choices(terms, self._notation.root, formula, is_root=True))
        self._finish()
        return self._rules.text(root)

    def _finish(self) -> None:
        while self._todo:
            name, terms = self._todo.pop()
            self._fill(name, terms)

    def _value(self, terms: Iterable[Term]) -> str:
        """The rule of values that match all terms."""
        needed = tuple(dict.fromkeys(term for term in terms if not term.is_trivial))
        key = frozenset(needed)
        if key not in self._values:
            self._values[key] = self._rules.new("value")
            self._todo.append((self._values[key], needed))
        return self._values[key]

    def _fill(self, name: str, terms: Terms) -> None:
        formulas = {kind: all_of([self._constraints.of(term, kind) for term in terms]) for kind in KINDS}
        kinds = [kind for kind in KINDS if formulas[kind] != FALSE]
        if len(kinds) == len(KINDS):
            implied = set[Kind]().union(*(self._constraints.implied(term) for term in terms))
            other_kinds = [kind for kind in kinds if kind not in implied]
            if implied and other_kinds:
                kinds = [kind for kind in kinds if kind in implied]
                self._rules.put_fallback(name, lambda: self._all_choices(terms, formulas, other_kinds, finish=True))
        self._rules.put(name, self._all_choices(terms, formulas, kinds))

    def _all_choices(
        self, terms: Terms, formulas: dict[Kind, Formula], kinds: list[Kind], *, finish: bool = False
    ) -> list[Choice]:
        found = [choice for kind in kinds for choice in self._choices(terms, kind, formulas[kind])]
        if finish:
            self._finish()
        return found

    def _choices(self, terms: Terms, kind: Kind, formula: Formula, *, is_root: bool = False) -> list[Choice]:
        """The alternatives of a rule for values of one type."""
        words = self._notation.words
        if formula == FALSE:
            return []
        if kind == "null":
            return [(literal(words[None]),)]
        if kind == "boolean":
            values = [it for it in (True, False) if evaluate(formula, {Truth(it)})]
            return [(literal(words[value]),) for value in values]
        if kind in ("string", "number"):
            return self._text_choices(terms, kind, formula)
        found = branches(formula, lambda: _too_many(terms))
        if kind == "array":
            return [self._array(branch, terms) for branch in found]
        return [self._object(branch, terms, is_call=is_root and self._notation.is_call) for branch in found]

    def _text_choices(self, terms: Terms, kind: Kind, formula: Formula) -> list[Choice]:
        try:
            if kind == "string":
                return [(Ref(self._texts.string(regex_of(formula))),)]
            regex = numbers.NUMBER if formula == TRUE else numbers.constrained(regex_of(formula))
            return [(Ref(self._texts.number(regex)),)]
        except TooManyStatesError:
            raise self._too_much(terms, kind) from None

    # Objects.

    def _object(self, branch: Branch, terms: Terms, *, is_call: bool) -> Choice:
        for fact in branch:
            if isinstance(fact, Exists):
                raise fact.rule.node.error(fact.rule.keyword, "cannot be negated; allowed: where no `not` concerns it")
        names = list(dict.fromkeys(fact.name for fact in branch if isinstance(fact, Property)))
        needed = dict.fromkeys(fact.name for fact in branch if isinstance(fact, Required))
        names += [name for name in needed if name not in names]
        named = []
        for name in names:
            prefix, suffix = self._notation.pair(name, is_argument=is_call)
            can_be = self._notation.can_write(name)
            value = self._value(terms_of_property(branch, name)) if can_be else self._rules.new("nothing")
            named.append(NamedProperty(prefix, value, suffix, name in needed))
        least, most = _size(branch)
        others = self._others(branch, names, terms, max(least - len(needed), 0), is_call)
        signs = ("" if is_call else "{", self._notation.comma, "" if is_call else "}")
        return object_choice(self._rules, named, others, least, most, signs)

    def _others(
        self, branch: Branch, names: list[str], terms: Terms, different: int, is_call: bool
    ) -> OtherProperties | None:
        """Properties other than `names`. `different`: how many of them an object may require."""
        if different > MAX_DIFFERENT:
            what = f"asks for {different} more properties than have names; allowed: at most {MAX_DIFFERENT}"
            raise _node_of(terms).error("minProperties", what)
        classes = self._name_classes(branch, names, terms, different)
        if not classes:
            return None
        made: dict[int | None, str] = {}

        def pairs(number: int | None) -> str:
            if number not in made:
                made[number] = self._rules.new("pair")
                lengths = rx.ALL if number is None else _length_is(number, different)
                choices = [self._pair(rx.both(regex, lengths), value, terms, is_call) for regex, value in classes]
                self._rules.put(made[number], choices)
            return made[number]

        return OtherProperties(pairs, different)

    def _pair(self, names: Regex, value: str, terms: Terms, is_call: bool) -> Choice:
        """A property whose name is in the regex `names`, with the rule `value`."""
        bare = rx.both(names, ARGUMENT if is_call else self._notation.bare)
        if self._has_text(bare, terms):
            return (Ref(self._texts.bare(bare, "=" if is_call else self._notation.colon)), Ref(value))
        key = (Ref(self._texts.string(names, key=True)), literal(self._notation.colon), Ref(value))
        return (literal("**{"), *key, literal("}")) if is_call else key

    def _name_classes(self, branch: Branch, names: list[str], terms: Terms, different: int) -> list[tuple[Regex, str]]:
        """Classes of all property names other than `names`: (regex of the names, rule of the value)."""
        about = list(dict.fromkeys(fact for fact in branch if isinstance(fact, Properties)))
        if len({fact.names for fact in about}) > MAX_NAME_RULES:
            raise _node_of(terms).error(
                about[0].keyword, f"cannot be kept: more than {MAX_NAME_RULES} rules about names concern one object"
            )
        base = rx.complement(rx.literals(names))
        if self._is_closed(branch, names, different):
            base = rx.both(base, rx.either(fact.names for fact in about if fact.evaluates and not fact.term.is_never))
        found: list[tuple[Regex, list[Term]]] = [(base, [])]
        for fact in about:
            split = []
            for regex, have in found:
                split.append((rx.both(regex, rx.complement(fact.names)), have))
                split.append((rx.both(regex, fact.names), [*have, fact.term]))
            found = [(regex, have) for regex, have in split if not any(term.is_never for term in have)]
            found = [(regex, have) for regex, have in found if self._has_text(regex, terms)]
        return [(regex, self._value(have)) for regex, have in found if self._has_text(regex, terms)]

    def _is_closed(self, branch: Branch, names: list[str], different: int) -> bool:
        """Whether other properties are left out: the schema names properties and does not mention others, unless none
        of the named ones can occur or the object requires more."""
        can_be = [name for name in names if not self._is_never(terms_of_property(branch, name))]
        hinted = any(isinstance(fact, Closed) and fact.items is None for fact in branch)
        return hinted and different <= len(can_be) and bool(can_be or not names)

    def _is_never(self, terms: list[Term]) -> bool:
        return any(all(self._constraints.of(term, kind) == FALSE for kind in KINDS) for term in terms)

    def _has_text(self, regex: Regex, terms: Terms) -> bool:
        if regex is rx.NOTHING:
            return False
        try:
            return bool(automaton(regex))
        except TooManyStatesError:
            raise self._too_much(terms, "object") from None

    def _too_much(self, terms: Terms, kind: Kind) -> SchemaError:
        keywords = " with ".join(self._constraints.keywords(terms, kind)) or "schemas"
        return _node_of(terms).error(keywords, "takes too much to keep; allowed: simpler patterns, or shorter texts")

    # Arrays.

    def _array(self, branch: Branch, terms: Terms) -> Choice:
        least, most = _size(branch)
        prefix = max((fact.number + 1 for fact in branch if isinstance(fact, Item)), default=0)
        hints = [fact.items for fact in branch if isinstance(fact, Closed) and fact.items is not None]
        is_open = any(isinstance(fact, Items) and not fact.term.is_never for fact in branch)
        counts = [fact for fact in branch if isinstance(fact, Contains)]
        if hints and not is_open and not counts and least <= max(*hints, prefix):
            most = max(*hints, prefix) if most is None else min(most, *hints, prefix)
        _check_unique(branch, most)
        if len(counts) > MAX_COUNTERS:
            what = f"cannot be kept more than {MAX_COUNTERS} times for one array"
            raise counts[0].term.node.error("contains", what)
        starts = [fact.first for fact in branch if isinstance(fact, (Items, Contains))]
        counters = [Counter(fact.first, fact.least, fact.most) for fact in counts]

        def item(number: int, outcome: Outcome) -> str:
            own = terms_of_item(branch, number)
            for fact, is_one in zip(counts, outcome, strict=bool(outcome)):
                if is_one is not None:
                    own.append(Term(fact.term.node, fact.term.positive == is_one))
            return self._value(own)

        return array_choice(self._rules, item, max([prefix, *starts]), least, most, counters, self._notation.comma)


def _size(branch: Branch) -> tuple[int, int | None]:
    sizes = [fact for fact in branch if isinstance(fact, Size)]
    bounds = [size.most for size in sizes if size.most is not None]
    return max((size.least for size in sizes), default=0), min(bounds, default=None)


def _check_unique(branch: Branch, most: int | None) -> None:
    for fact in branch:
        if isinstance(fact, Unique) and (fact.negative or most is None or most > 1):
            what = "cannot be kept; allowed: false, or true beside a maxItems of 1"
            raise fact.node.error("uniqueItems", what)


def _length_is(remainder: int, period: int) -> Regex:
    """Texts whose length modulo `period` is `remainder`."""
    return rx.cat(rx.repeat(rx.repeat(rx.ANY_CHAR, period, period)), rx.repeat(rx.ANY_CHAR, remainder, remainder))


def _node_of(terms: Terms) -> Node:
    return terms[0].node if terms else Node(True, "", "")


def _too_many(terms: Terms) -> SchemaError:
    return _node_of(terms).error("alternatives", "are too many; allowed: fewer anyOf, oneOf, not and dependencies")
