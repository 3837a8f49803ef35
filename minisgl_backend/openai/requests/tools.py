"""Functions that a model may call, and the grammar of an answer that must call one."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any, Literal

from minisgl_backend.openai.errors import invalid
from minisgl_backend.openai.requests.base import Constraint, Model
from minisgl_backend.openai.requests.messages import shown, wrong

MAX_TOOLS = 512
MAX_NAME = 128  # characters of a function's name


class FunctionDefinition(Constraint):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """Without a schema: a function without parameters."""
        return self.parameters or {"type": "object", "properties": {}}


class Tool(Model):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Constraint):
    name: str


class NamedTool(Model):
    type: Literal["function"]
    function: FunctionName


def check_name(name: str, field: str) -> None:
    """Raises ApiError for what is no name of a function; `field` is where it stands."""
    if not 1 <= len(name) <= MAX_NAME:
        raise wrong(field, f"has {len(name)} characters; allowed: 1 to {MAX_NAME}")
    if any(unicodedata.category(char) == "Cc" for char in name):
        raise wrong(field, f"is {shown(name)}; allowed: no control characters")


def find_function(tools: Sequence[Tool], name: str) -> FunctionDefinition:
    """Raises ApiError if none of the functions has that name."""
    for tool in tools:
        if tool.function.name == name:
            return tool.function
    raise invalid("tool_choice", f"tool_choice names {shown(name)}; allowed: one of the functions in tools")


def calls_schema(tools: Sequence[Tool], *, parallel: bool) -> dict[str, Any]:
    """The JSON schema of a list of calls, [{"name": ..., "parameters": {...}}, ...]; of one if not `parallel`."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "enum": [tool.function.name]},
                "parameters": _as_resource(tool.function.schema_of_arguments, number),
            },
            "required": ["name", "parameters"],
        }
        for number, tool in enumerate(tools)
    ]
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return schema if parallel else {**schema, "maxItems": 1}


def _as_resource(schema: dict[str, Any], number: int) -> dict[str, Any]:
    """Gives a schema its own `$id`, so that references in it start at its root, not at that of the list of calls."""
    return schema if isinstance(schema.get("$id"), str) else {**schema, "$id": f"function:{number}"}
