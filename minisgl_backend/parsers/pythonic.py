"""Tool calls in Python syntax: `[f(a=1, b="x"), g()]`. Llama 4 and 3.2 as the whole answer, LFM2 between tags.

Arguments are parsed by Python's own parser and never run: a call is only a function of the request with literal named
arguments.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from minisgl_backend.parsers.argument_types import as_json
from minisgl_backend.parsers.headers import MAX_HEADER, MORE, NONE, Header, Named, NameFinder, skip_space
from minisgl_backend.parsers.json_reader import SPACE
from minisgl_backend.parsers.parts import Part, content
from minisgl_backend.parsers.tagged import Outcome, TaggedParser

_MAX_CALLS = 100_000  # characters of consecutive calls; Python's parser needs a hundred times as much memory
_JSON = {"true": True, "false": False, "null": None}
_UNREADABLE = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)
_NAME = Header((), ("(",))
_QUOTES = ('"""', "'''", '"', "'")


class BracketReader:
    """Finds the end of a bracket in a text of Python that arrives in pieces: what stands within its strings is text."""

    def __init__(self, position: int = 0) -> None:
        """`position`: of the bracket."""
        self.depth = 0
        self.position = position  # all before it was read
        self._quote = ""  # of the string being read

    def feed(self, text: str, *, is_last: bool) -> bool:
        """`text`: all of it so far. True: the bracket ends before `position`."""
        while self.position < len(text):
            rest = text[self.position : self.position + 3]
            if not is_last and len(rest) < 3 and rest[0] in "\\\"'":  # perhaps three quotes
                return False
            if self._quote:
                if rest[0] == "\\":
                    self.position += 2
                elif rest.startswith(self._quote):
                    self.position += len(self._quote)
                    self._quote = ""
                else:
                    self.position += 1
                continue
            self._quote = next((quote for quote in _QUOTES if rest.startswith(quote)), "")
            self.position += len(self._quote) or 1
            self.depth += (rest[0] in "([{") - (rest[0] in ")]}")
            if self.depth <= 0:
                return True
        return False


class PythonicParser:
    """For an answer that begins with a list of calls; everything else is content."""

    TAGS = ("<|python_start|>", "<|python_end|>", "<|python_tag|>")

    def __init__(self, functions: Mapping[str, Mapping[str, Any]]) -> None:
        """`functions`: name -> JSON schema of the arguments."""
        self._functions = functions
        self._held: list[str] = []
        self._length = 0
        self._kind: str | None = None  # `calls`, `text`; None: undecided
        self.is_damaged = False

    def feed(self, text: str) -> list[Part]:
        self._held.append(text)
        self._length += len(text)
        if self._kind is None:
            self._kind = self._kind_of("".join(self._held))
        if self._length > _MAX_CALLS:
            self._kind = "text"
        if self._kind != "text":
            return []
        held, self._held = "".join(self._held), []
        return content(held)

    def finish(self, reason: str) -> list[Part]:
        text, self._held = "".join(self._held), []
        bare = text.strip()
        for tag in self.TAGS:
            bare = bare.removeprefix(tag).removesuffix(tag).strip()
        found = CallList(self._functions)
        is_list = self._kind == "calls" and bare.startswith("[") and found.feed(bare, is_last=True) == "calls"
        if not is_list or found.position < len(bare):
            self.is_damaged = self._kind == "calls"
            return content(text)
        parts: list[Part] = []
        for number, (name, arguments) in enumerate(found.calls):
            parts += [Part("call", name, number), Part("arguments", arguments, number)]
        return parts

    def _kind_of(self, text: str) -> str | None:
        """Whether a list of calls has begun: `[`, then the name of one of the functions and `(`."""
        rest = text.lstrip(SPACE)
        for tag in self.TAGS:
            if rest.startswith(tag):
                rest = rest.removeprefix(tag).lstrip(SPACE)
            elif tag.startswith(rest):
                return None
        if not rest or rest[0] != "[":
            return "text" if rest else None
        begins = [f"{name}(" for name in self._functions]
        inner = rest[1:]
        for begun in dict.fromkeys((inner, inner.lstrip(SPACE))):
            if begun.startswith(tuple(begins)):
                return "calls"
            if any(one.startswith(begun) for one in begins):
                return None
        return "text"


class Lfm2Parser(TaggedParser):
    """`<|tool_call_start|>[f(a=1)]<|tool_call_end|>`."""

    BEGIN = ("<|tool_call_start|>",)
    AROUND = ("<|tool_call_end|>",)

    def begin(self, tag: str) -> None:
        self._list = CallList(self.functions)

    def read(self, text: str, parts: list[Part], *, is_last: bool) -> tuple[str, Outcome]:
        bare = text.lstrip(SPACE)
        if not bare:
            return text, "none" if is_last else "more"
        if bare[0] != "[":
            return text, "none"
        state = self._list.feed(bare, is_last=is_last)
        if state == "open" and not is_last and len(bare) <= _MAX_CALLS:
            return text, "more"
        if state not in ("calls", "other"):
            return self.opening + text, "damaged"
        end = self._list.position
        if state == "other":
            parts += content(self.opening + text[: len(text) - len(bare)] + bare[:end])
        else:
            for name, arguments in self._list.calls:
                self.emit_call(name, parts, arguments)
        return bare[end:], "read"


class CallList:
    """A list of calls in a text that arrives in pieces."""

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self._names = NameFinder(functions)
        self._list = BracketReader()  # finds the end of a list with calls of functions that were not offered
        self._bracket: BracketReader | None = None  # of the arguments being read
        self._begin = 0  # of these
        self._name = ""
        self._state: Literal["name", "arguments", "comma", "other"] = "name"
        self.position = 1  # all before it was read
        self.calls: list[tuple[str, str]] = []  # name, arguments as JSON

    def feed(self, text: str, *, is_last: bool) -> Literal["open", "calls", "other", "damaged"]:
        """`text`: all of it so far, from `[` on. `other`: a list with calls of functions that were not offered; at the
        end of a list `position` is behind it."""
        while True:
            if self._state == "other":
                if not self._list.feed(text, is_last=is_last):
                    return "open"
                self.position = self._list.position
                return "other" if _is_python(text[: self.position]) else "damaged"
            if self._state == "name" and self.calls and text.startswith("]", skip_space(text, self.position)):
                self._state = "comma"  # behind a last comma
            elif self._state == "name":
                if (found := self._name_at(text, is_last=is_last)) == MORE:
                    return "open"
                if isinstance(found, Named):
                    self._name, self._begin = found.name, self.position + found.end - 1
                    self._bracket, self._state = BracketReader(self._begin), "arguments"
                else:
                    self._state = "other"
            elif self._state == "arguments" and self._bracket is not None:
                if not self._bracket.feed(text, is_last=is_last):
                    return "open"
                self.position = self._bracket.position
                arguments = _arguments(text[self._begin : self.position])
                if arguments is None:
                    return "damaged"
                self.calls.append((self._name, arguments))
                self._state = "comma"
            else:
                self.position = skip_space(text, self.position)
                sign = text[self.position : self.position + 1]
                self.position += len(sign)
                if sign != ",":
                    return "calls" if sign == "]" else "damaged" if sign else "open"
                self._state = "name"

    def _name_at(self, text: str, *, is_last: bool) -> Named | int:
        """The next call's name and `(`."""
        rest = text[self.position : self.position + MAX_HEADER]
        bare = rest.lstrip()
        if not bare:
            return NONE if is_last else MORE
        return self._names.find(rest, _NAME, is_last=is_last)


def _is_python(text: str) -> bool:
    """Whether Python can read it."""
    try:
        _parsed(text)
    except _UNREADABLE:
        return False
    return True


def _parsed(text: str) -> ast.expr:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes that Python does not know
        return ast.parse(text, mode="eval").body


def _arguments(text: str) -> str | None:
    """The arguments in brackets as JSON; None if they are not named literals."""
    try:
        node = _parsed(f"f{text}")
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
            return None
        # `**{"a name": 1}` is Python's syntax for an argument whose name is not an identifier.
        given = [
            one.value if one.arg is None else ast.Dict([ast.Constant(one.arg)], [one.value]) for one in node.keywords
        ]
        if not all(isinstance(one, ast.Dict) for one in given):
            return None
        pairs = [pair for one in given for pair in _literal(one).items()]
        arguments = dict(pairs)
        return as_json(arguments) if len(arguments) == len(pairs) else None  # none twice
    except _UNREADABLE:
        return None


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _JSON:
        return _JSON[node.id]
    if isinstance(node, ast.List):
        return [_literal(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True)}
    value = ast.literal_eval(node)
    if not isinstance(value, (str, int, float, bool, type(None))) or value != value or value in (1e999, -1e999):
        raise ValueError("no value of JSON")
    return value


def _key(node: ast.expr | None) -> str:
    value = None if node is None else ast.literal_eval(node)
    if not isinstance(value, str):
        raise ValueError("no key of JSON")
    return value
