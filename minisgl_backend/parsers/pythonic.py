"""Tool calls in Python syntax: `[f(a=1, b="x"), g()]`. Llama 4 and 3.2 as the whole answer, LFM2 between tags.

Parsed by Python's own parser and never run: a call is only a function of the request with literal named arguments.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping
from typing import Any

from minisgl_backend.parsers.argument_types import as_json
from minisgl_backend.parsers.json_calls import SPACE
from minisgl_backend.parsers.parts import Part, content, partial_suffix
from minisgl_backend.parsers.tagged import Outcome, TaggedParser

_MAX_CALLS = 100_000  # characters of consecutive calls; Python's parser needs a hundred times as much memory
_JSON = {"true": True, "false": False, "null": None}


class PythonicParser:
    """For an answer that begins with a list of calls; everything else is content."""

    TAGS = ("<|python_start|>", "<|python_end|>", "<|python_tag|>")

    def __init__(self, functions: Mapping[str, Mapping[str, Any]]) -> None:
        """`functions`: name -> JSON schema of the arguments."""
        self._functions = functions
        self._held = ""
        self._is_text = False

    def feed(self, text: str) -> list[Part]:
        self._held += text
        if not self._is_text and self._may_be_calls():
            return []
        self._is_text = True
        text, self._held = self._held, ""
        return content(text)

    def finish(self, reason: str) -> list[Part]:
        text, self._held = self._held, ""
        bare = text.strip()
        for tag in self.TAGS:
            bare = bare.removeprefix(tag).removesuffix(tag).strip()
        calls = None if self._is_text else read_calls(bare, self._functions)
        if calls is None:
            return content(text)
        parts: list[Part] = []
        for number, (name, arguments) in enumerate(calls):
            parts += [Part("call", name, number), Part("arguments", arguments, number)]
        return parts

    def _may_be_calls(self) -> bool:
        """Whether a list of calls may have begun: `[`, then the name of one of the functions and `(`."""
        rest = self._held.lstrip(SPACE)
        for tag in self.TAGS:
            if rest.startswith(tag):
                rest = rest.removeprefix(tag).lstrip(SPACE)
            elif tag.startswith(rest):
                return True
        if not rest or len(self._held) > _MAX_CALLS:
            return not rest
        inner = rest[1:].lstrip(SPACE)
        begins = (f"{name}(" for name in self._functions)
        return rest[0] == "[" and any(one.startswith(inner) or inner.startswith(one) for one in begins)


class Lfm2Parser(TaggedParser):
    """`<|tool_call_start|>[f(a=1)]<|tool_call_end|>`."""

    BEGIN = ("<|tool_call_start|>",)
    END = "<|tool_call_end|>"

    def read(self, text: str, parts: list[Part], *, is_last: bool) -> tuple[str, Outcome]:
        body, found, rest = text.partition(self.END)
        if not found and not is_last:
            return text, "more"
        if not found:
            body = body[: len(body) - partial_suffix(body, self.END)]
        calls = read_calls(body.strip(), self.functions)
        if calls is None:
            return text, "none"
        for name, arguments in calls:
            self.emit_call(name, parts, arguments)
        return rest, "emitted"


def read_calls(text: str, functions: Mapping[str, Any]) -> list[tuple[str, str]] | None:
    """(name, arguments as JSON) of each call; None if the text is anything but a list of calls of these functions."""
    if not text.startswith("[") or len(text) > _MAX_CALLS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes that Python does not know
            tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        return [_call(node, functions) for node in tree.elts]
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _call(node: ast.expr, functions: Mapping[str, Any]) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments")
    name = ast.unparse(node.func)
    # `**{"a name": 1}` is Python's syntax for an argument whose name is not an identifier.
    given = [one.value if one.arg is None else ast.Dict([ast.Constant(one.arg)], [one.value]) for one in node.keywords]
    if name not in functions or not all(isinstance(one, ast.Dict) for one in given):
        raise ValueError("no call of a function of the request")
    pairs = [pair for one in given for pair in _literal(one).items()]
    arguments = dict(pairs)
    if len(arguments) < len(pairs):
        raise ValueError("an argument twice")
    return name, as_json(arguments)


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
