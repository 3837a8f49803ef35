"""A grammar for calls in a model's own format: free text, and calls whose arguments follow their functions' schemas.

Follows xgrammar's structural tags (https://xgrammar.mlc.ai/docs, «Structural Tag»): a call that has begun is a call of
one of the functions, written to its end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StrictCall:
    """How a call is written around its arguments; `{name}` stands for the function's name, `{json}` for its JSON."""

    trigger: str  # the text that every call, and nothing else, begins with
    begin: str  # including the trigger
    end: str
    style: str = "json"  # of the arguments: `gemma`, `python`, or xgrammar's names
    number: str = ""  # text after the call's number, which follows `begin`; "": no number
    around: tuple[str, str, str] | None = None  # what begins, separates and ends a list of calls
    is_whole_answer: bool = False  # calls with `around` are the whole answer; after any other beginning there is none

    @property
    def keeps_schemas(self) -> bool:
        """Whether every keyword of a schema is enforced, which xgrammar's own styles do not do."""
        return not self.style.endswith("_xml")

    def tag(self, name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        arguments = {"type": "json_schema", "json_schema": schema, "style": self.style, "max_whitespace_cnt": 1}
        content: dict[str, Any] = arguments
        if self.number:
            numbers = {"type": "regex", "pattern": "[0-9]{1,4}"}
            behind = {"type": "const_string", "value": self.number}
            content = {"type": "sequence", "elements": [numbers, behind, arguments]}
        return {"type": "tag", "begin": self.beginning(name), "content": content, "end": self.end}

    def beginning(self, name: str) -> str:
        """What a call of that function begins with."""
        as_json = json.dumps(name, ensure_ascii=False)
        return re.sub(r"\{(name|json)\}", lambda found: name if found[1] == "name" else as_json, self.begin)


def structural_tag(
    form: StrictCall,
    functions: Mapping[str, tuple[Mapping[str, Any], bool]],
    *,
    forced: bool = False,
    parallel: bool = True,
) -> dict[str, Any]:
    """`functions`: name -> (JSON schema of the arguments, whether to enforce it).

    `forced`: the answer begins with a call; without `parallel`, it is exactly one. Otherwise calls are optional.
    """
    tags = [form.tag(name, schema if strict else {"type": "object"}) for name, (schema, strict) in functions.items()]
    only = forced and not parallel
    if form.around is not None:
        begin, separator, end = form.around
        calls = {"type": "tags_with_separator", "tags": tags, "separator": separator, "at_least_one": True}
        tags = [{"type": "tag", "begin": begin, "content": {**calls, "stop_after_first": only}, "end": end}]
    if form.is_whole_answer:
        return {"type": "structural_tag", "format": tags[0] if forced else _or_text(form, tags[0], list(functions))}
    options = {"at_least_one": forced, "stop_after_first": only}
    found = {"type": "triggered_tags", "triggers": [form.trigger], "tags": tags, **options}
    return {"type": "structural_tag", "format": found}


def _or_text(form: StrictCall, calls: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Calls, or a text that does not begin like one."""
    begins = [form.trigger + form.beginning(name) for name in names]
    return {"type": "or", "elements": [calls, {"type": "regex", "pattern": _text_without(begins)}]}


def _text_without(begins: Sequence[str]) -> str:
    """A regular expression of texts that, after white space, begin with none of these."""
    tries: dict[str, Any] = {}
    for text in begins:
        node = tries
        for char in text:
            node = node.setdefault(char, {})
        node.clear()  # the shorter one covers all that continue it
    return rf"[ \t\r\n]*({_other(tries, is_first=True)})?"


def _other(tries: Mapping[str, Any], *, is_first: bool = False) -> str:
    """A text that leaves the tree before reaching one of its leaves."""
    taken = "".join(map(_escaped, tries)) + (r" \t\r\n" if is_first else "")
    ways = [rf"[^{taken}][\s\S]*"]
    ways += [f"{_escaped(char)}({_other(below)})?" for char, below in tries.items() if below]
    return "|".join(ways)


def _escaped(char: str) -> str:
    return rf"\u{{{ord(char):x}}}"
