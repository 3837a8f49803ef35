"""A grammar for calls in a model's own format: free text, and calls whose arguments keep their functions' schemas.

As xgrammar's structural tags have it (https://xgrammar.mlc.ai/docs, «Structural Tag»): once a call has begun, it is one
of the functions, written to its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StrictCall:
    """How a call is written around its arguments; `{name}` stands for the function's."""

    trigger: str  # what every call begins with, and nothing else
    begin: str  # the trigger included
    end: str
    style: str = "json"  # of the arguments, by xgrammar's names
    number: str = ""  # what follows the number of the call behind `begin`; "": there is none
    around: tuple[str, str, str] | None = None  # of a list of calls: what begins, separates and ends it

    @property
    def keeps_json(self) -> bool:
        """Every keyword of a schema is kept, as arguments are JSON."""
        return self.style == "json"

    def tag(self, name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        arguments = {"type": "json_schema", "json_schema": schema, "style": self.style, "max_whitespace_cnt": 1}
        content: dict[str, Any] = arguments
        if self.number:
            numbers = {"type": "regex", "pattern": "[0-9]{1,4}"}
            behind = {"type": "const_string", "value": self.number}
            content = {"type": "sequence", "elements": [numbers, behind, arguments]}
        return {"type": "tag", "begin": self.begin.replace("{name}", name), "content": content, "end": self.end}


def structural_tag(
    form: StrictCall,
    functions: Mapping[str, tuple[Mapping[str, Any], bool]],
    *,
    forced: bool = False,
    parallel: bool = True,
) -> dict[str, Any]:
    """`functions`: name -> (JSON schema of the arguments, whether it is to be kept).

    `forced`: the answer begins with a call; without `parallel`, it is exactly one. Else calls need not be made.
    """
    tags = [form.tag(name, schema if strict else {"type": "object"}) for name, (schema, strict) in functions.items()]
    only = forced and not parallel
    if form.around is not None:
        begin, separator, end = form.around
        calls = {"type": "tags_with_separator", "tags": tags, "separator": separator, "at_least_one": True}
        tags = [{"type": "tag", "begin": begin, "content": {**calls, "stop_after_first": only}, "end": end}]
    options = {"at_least_one": forced, "stop_after_first": only}
    found = {"type": "triggered_tags", "triggers": [form.trigger], "tags": tags, **options}
    return {"type": "structural_tag", "format": found}
