"""Tool calls in Python syntax: `[f(a=1, b="x"), g()]`. Llama 4 and 3.2 as the whole answer, LFM2 between tags.

Arguments are parsed by Python's own parser and never run: a call is only a function of the request with literal named
arguments.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping
from typing import Any

from minisgl_backend.parsers.argument_types import as_json
from minisgl_backend.parsers.headers import NameFinder
from minisgl_backend.parsers.json_reader import SPACE
from minisgl_backend.parsers.parts import Part, content
from minisgl_backend.parsers.tagged import Outcome, TaggedParser

_MAX_CALLS = 100_000  # characters of consecutive calls; Python's parser needs a hundred times as much memory
_JSON = {"true": True, "false": False, "null": None}
_QUOTES = ('"""', "'''", '"', "'")


class BracketReader:
    """Finds the end of a bracket in a text of Python that arrives in pieces: what stands within its strings is text."""

    def __init__(self) -> None:
        self.depth = 0
        self.position = 0  # all before it was read
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
        calls = None if self._kind == "text" else read_calls(bare, self._functions)
        if calls is None:
            self.is_damaged = self._kind == "calls"
            return content(text)
        parts: list[Part] = []
        for number, (name, arguments) in enumerate(calls):
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
        self._list = BracketReader()

    def read(self, text: str, parts: list[Part], *, is_last: bool) -> tuple[str, Outcome]:
        bare = text.lstrip(SPACE)
        if not bare:
            return text, "none" if is_last else "more"
        if bare[0] != "[":
            return text, "none"
        if not self._list.feed(bare, is_last=is_last):
            return (self.opening + text, "damaged") if is_last or len(bare) > _MAX_CALLS else (text, "more")
        end = self._list.position
        calls = read_calls(bare[:end], self.functions)
        if calls is None and not _may_be_called(bare[1:end]):
            return self.opening + text, "damaged"
        if calls is None:  # of functions that were not offered: read to the end, as their arguments may quote calls
            parts += content(self.opening + text[: len(text) - len(bare)] + bare[:end])
        for name, arguments in calls or ():
            self.emit_call(name, parts, arguments)
        return bare[end:], "read"


def _may_be_called(text: str) -> bool:
    """Whether it is the inside of a list that Python can read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(f"[{text}", mode="eval")
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return False
    return True


def read_calls(text: str, functions: Mapping[str, Any]) -> list[tuple[str, str]] | None:
    """(name, arguments as JSON) of each call; None if the text is anything but a list of calls of these functions."""
    if not text.startswith("[") or len(text) > _MAX_CALLS:
        return None
    names, found, position = NameFinder(functions), [], 1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes that Python does not know
            while True:
                start = position
                name = names.longest(text, start, "(")
                if name is None:
                    start = len(text) - len(text[position:].lstrip())
                    name = names.longest(text, start, "(")
                if name is None:
                    return None
                bracket, begin = BracketReader(), start + len(name)
                if not bracket.feed(text[begin:], is_last=True):
                    return None
                position = begin + bracket.position
                found.append((name, _arguments(text[begin:position])))
                rest = text[position:].lstrip()
                if rest.startswith(","):
                    rest = rest[1:]
                    if rest.strip() == "]":
                        return found
                    position = len(text) - len(rest)
                else:
                    return found if rest == "]" else None
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _arguments(text: str) -> str:
    """The arguments in brackets as JSON."""
    node = ast.parse(f"f{text}", mode="eval").body
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        raise ValueError("no call with named arguments")
    # `**{"a name": 1}` is Python's syntax for an argument whose name is not an identifier.
    given = [one.value if one.arg is None else ast.Dict([ast.Constant(one.arg)], [one.value]) for one in node.keywords]
    if not all(isinstance(one, ast.Dict) for one in given):
        raise ValueError("no literal arguments")
    pairs = [pair for one in given for pair in _literal(one).items()]
    arguments = dict(pairs)
    if len(arguments) < len(pairs):
        raise ValueError("an argument twice")
    return as_json(arguments)


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
