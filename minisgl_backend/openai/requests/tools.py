"""Functions that a model may call, and the grammar of an answer that has to call one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from minisgl_backend.openai.errors import invalid
from minisgl_backend.openai.requests.base import Model

MAX_TOOLS = 512


class FunctionDefinition(Model):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        return self.parameters or {"type": "object"}


class Tool(Model):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Model):
    name: str


class NamedTool(Model):
    type: Literal["function"]
    function: FunctionName


def find_function(tools: Sequence[Tool], name: str) -> FunctionDefinition:
    """Raises ApiError where none of the functions has that name."""
    for tool in tools:
        if tool.function.name == name:
            return tool.function
    raise invalid("tool_choice", f"tool_choice names {name!r}; allowed: one of the functions in tools")


def calls_schema(tools: Sequence[Tool], *, parallel: bool) -> dict[str, Any]:
    """The JSON schema of calls, [{"name": ..., "parameters": {...}}, ...]; without `parallel`, of exactly one."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "enum": [tool.function.name]},
                "parameters": tool.function.schema_of_arguments,
            },
            "required": ["name", "parameters"],
        }
        for tool in tools
    ]
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **_definitions(tools)}
    return schema if parallel else {**schema, "maxItems": 1}


def _definitions(tools: Sequence[Tool]) -> dict[str, dict[str, Any]]:
    """What functions' schemas define for themselves: references start at the root, which is now that of the list."""
    found: dict[str, dict[str, Any]] = {}
    for tool in tools:
        for key in ("$defs", "definitions"):
            given = tool.function.schema_of_arguments.get(key)
            if not isinstance(given, dict):
                continue
            together = found.setdefault(key, {})
            for name, schema in given.items():
                if together.setdefault(name, schema) != schema:
                    reason = f"{key}.{name} is not the same in all functions; allowed with tool_choice required: one"
                    raise invalid("tools", f"tools: {reason}")
    return found
