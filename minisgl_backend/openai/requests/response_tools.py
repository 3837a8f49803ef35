"""The tools of /v1/responses: functions, also in namespaces, and the names that the model calls them by.

Codex groups the tools of MCP servers in namespaces. The model sees `NAMESPACE__NAME`; the client gets `namespace` and
`name` back, by which it finds the function.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from minisgl_backend.openai.errors import invalid
from minisgl_backend.openai.requests.base import Constraint, Model
from minisgl_backend.openai.requests.messages import shown, wrong
from minisgl_backend.openai.requests.tools import MAX_TOOLS, FunctionDefinition, Tool, check_name
from minisgl_backend.openai.validation import from_validation

# Tools that only OpenAI's own servers run, and tools whose input is not JSON.
HOSTED = frozenset(
    {"web_search", "web_search_preview", "web_search_2025_08_26", "web_search_preview_2025_03_11", "file_search"}
    | {"code_interpreter", "image_generation", "computer", "computer_use_preview", "mcp", "local_shell", "shell"}
    | {"apply_patch", "custom", "tool_search"}
)
_DEFAULT_NAMESPACE = "functions"  # where Codex looks for calls without a namespace
ToolDicts = Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)]


class Function(Constraint):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None  # has no effect: all are shown to the model


class Namespace(Model):
    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: ToolDicts


class NamedFunction(Constraint):
    type: Literal["function"]
    name: str
    namespace: str | None = None


class AllowedFunctions(Model):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class CallableTools:
    """A request's tools that can be called here."""

    def __init__(self, given: Sequence[Mapping[str, Any]]) -> None:
        """Raises ApiError for an invalid tool."""
        self.tools: list[Tool] = []
        self.namespaces: dict[str, tuple[str, str]] = {}  # the model's name of a function -> namespace, name
        self.left_out: list[str] = []  # types of tools that this server cannot run
        for number, tool in enumerate(given):
            self._add(tool, f"tools[{number}]")
        if given and not self.tools:
            kinds = ", ".join(dict.fromkeys(self.left_out)) or "no function"
            raise invalid("tools", f"tools holds {kinds}, which this server cannot run; allowed: functions")
        if len(self.tools) > MAX_TOOLS:
            raise invalid("tools", f"tools has {len(self.tools)} functions; allowed: at most {MAX_TOOLS}")

    def _add(self, given: Mapping[str, Any], name: str, namespace: str | None = None) -> None:
        kind = given.get("type")
        if isinstance(kind, str) and kind in HOSTED:
            self.left_out.append(kind)
        elif kind == "namespace" and namespace is None:
            group = _validated(Namespace, given, name)
            for number, tool in enumerate(group.tools):
                self._add(tool, f"{name}.tools[{number}]", group.name)
        elif kind == "function":
            function = _validated(Function, given, name)
            called = flat_name(function.name, namespace)
            check_name(function.name, f"{name}.name")
            check_name(called, f"{name}.name (with its namespace)")
            if namespace is not None and called != function.name:
                self.namespaces[called] = (namespace, function.name)
            values = function.model_dump(include={"description", "parameters", "strict"})
            definition = FunctionDefinition.model_construct(name=called, **values)
            self.tools.append(Tool.model_construct(type="function", function=definition))
        else:
            raise wrong(f"{name}.type", f"is {shown(kind)}; allowed: function, namespace")


def flat_name(name: str, namespace: str | None) -> str:
    """The model's name of a function."""
    if not namespace or namespace == _DEFAULT_NAMESPACE:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def _validated(kind: Any, given: Mapping[str, Any], name: str) -> Any:
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        location = tuple(_location(name))
        raise from_validation([{**one, "loc": (*location, *one["loc"])} for one in error.errors()]) from None


def _location(name: str) -> Iterator[str | int]:
    """`tools[3].tools[1]` as pydantic's location."""
    for part in name.replace("]", "").replace("[", ".").split("."):
        yield int(part) if part.isdecimal() else part
