"""Rules of a context-free grammar without unproductive ones, and their text as xgrammar's EBNF."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

MAX_RULES = 20_000
_SHOWN = {'"': '\\"', "\\": "\\\\", "]": "\\]", "^": "\\^", "-": "\\-", "[": "\\["}


@dataclass(frozen=True)
class Ref:
    """A reference to a rule."""

    name: str


@dataclass(frozen=True)
class Times:
    """A counted repetition of a rule."""

    name: str
    least: int
    most: int | None


Symbol = str | Ref | Times  # str: a literal or character class in EBNF
Choice = tuple[Symbol, ...]


class TooManyRulesError(Exception):
    """A grammar has more than MAX_RULES."""


class Rules:
    """A grammar under construction."""

    def __init__(self) -> None:
        self._choices: dict[str, list[Choice]] = {}
        self._ends_tokens: set[str] = set()
        self._fallbacks: dict[str, Callable[[], list[Choice]]] = {}

    def __len__(self) -> int:
        return len(self._choices)

    def __contains__(self, name: str) -> bool:
        return name in self._choices

    def new(self, prefix: str) -> str:
        """Reserves a name for a rule. Raises TooManyRulesError."""
        if len(self._choices) >= MAX_RULES:
            raise TooManyRulesError
        name = f"{prefix}{len(self._choices)}"
        self._choices[name] = []
        return name

    def put(self, name: str, choices: Iterable[Choice]) -> None:
        self._choices[name] = list(dict.fromkeys(choices))

    def put_fallback(self, name: str, choices: Callable[[], list[Choice]]) -> None:
        """The rule's choices if those of `put` are unproductive; the callback may add further rules."""
        self._fallbacks[name] = choices

    def end_tokens(self, name: str) -> None:
        """No token may extend beyond the end of the rule."""
        self._ends_tokens.add(name)

    def text(self, root: str) -> str:
        """The grammar as EBNF; empty if the root derives no text."""
        while True:
            productive = self._productive()
            poor = [name for name in self._reached(root, None) if name in self._fallbacks and name not in productive]
            if not poor:
                break
            for name in poor:
                self.put(name, self._fallbacks.pop(name)())
        if root not in productive:
            return ""
        lines = [f"root ::= {root}", *(self._line(name, productive) for name in self._reached(root, productive))]
        return "\n".join(lines) + "\n"

    def _leads_somewhere(self, choice: Choice, productive: set[str]) -> bool:
        return all(isinstance(symbol, str) or symbol.name in productive for symbol in choice)

    def _productive(self) -> set[str]:
        """Rules that derive a text."""
        users: dict[str, list[tuple[str, Choice]]] = {}
        todo: list[str] = []
        for name, choices in self._choices.items():
            for choice in choices:
                names = {symbol.name for symbol in choice if not isinstance(symbol, str)}
                for used in names:
                    users.setdefault(used, []).append((name, choice))
                if not names:
                    todo.append(name)
        found: set[str] = set()
        while todo:
            name = todo.pop()
            if name in found:
                continue
            found.add(name)
            todo += [user for user, choice in users.get(name, ()) if self._leads_somewhere(choice, found)]
        return found

    def _reached(self, root: str, productive: set[str] | None) -> list[str]:
        found = {root: None}
        todo = [root]
        for name in todo:  # which grows in the loop
            for choice in self._choices[name]:
                if productive is not None and not self._leads_somewhere(choice, productive):
                    continue
                for symbol in choice:
                    if not isinstance(symbol, str) and symbol.name not in found:
                        found[symbol.name] = None
                        todo.append(symbol.name)
        return list(found)

    def _line(self, name: str, productive: set[str]) -> str:
        choices = [choice for choice in self._choices[name] if self._leads_somewhere(choice, productive)]
        text = " | ".join(" ".join(map(_shown, choice)) or EMPTY for choice in choices)
        # xgrammar uses lookahead assertions in masks only. This one never matches, since no text begins with \x01.
        return f'{name} ::= ({text}) (="\\x01")' if name in self._ends_tokens else f"{name} ::= {text}"


EMPTY = '""'


def _shown(symbol: Symbol) -> str:
    if isinstance(symbol, str):
        return symbol
    if isinstance(symbol, Ref):
        return symbol.name
    return f"{symbol.name}{{{symbol.least}, {'' if symbol.most is None else symbol.most}}}"


def literal(text: str) -> str:
    """The text as an EBNF literal."""
    return json.dumps(text, ensure_ascii=False)


def char_class(ranges: Iterable[tuple[int, int]]) -> str:
    return "[" + "".join(_char(low) + (f"-{_char(high)}" if high > low else "") for low, high in ranges) + "]"


def _char(code: int) -> str:
    char = chr(code)
    if char in _SHOWN:
        return _SHOWN[char]
    if 0x20 <= code < 0x7F:
        return char
    return f"\\x{code:02x}" if code < 0x20 else f"\\U{code:08x}"
