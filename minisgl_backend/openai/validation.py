"""Converts pydantic's errors for a body into one error that names the field."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from minisgl_backend.openai.errors import ApiError, invalid
from minisgl_backend.openai.requests.base import CHANGES_NOTHING

_MAX_SHOWN = 60
# Names that other servers, or other endpoints of this one, use for what is served here: by which field, if the request
# has it. A text is true of every request.
_HERE: Mapping[str, Sequence[str] | str] = {
    "repeat_penalty": ("repetition_penalty, over all of prompt and answer",),
    "n_predict": ("max_tokens", "max_output_tokens"),
    "num_predict": ("max_tokens", "max_output_tokens"),
    "max_new_tokens": ("max_tokens", "max_output_tokens"),
    "max_tokens": ("max_output_tokens",),
    "max_completion_tokens": ("max_output_tokens", "max_tokens"),
    "max_output_tokens": ("max_completion_tokens", "max_tokens"),
    "stop_sequences": ("stop",),
    "grammar": ("guided_grammar",),
    "format": ("response_format", "text.format", "output_config.format"),
    "response_format": ("text.format", "output_config.format"),
    "reasoning_effort": ("reasoning.effort", "output_config.effort"),
    "function_call": ("tool_choice, with functions in tools",),
    "chat_template": ("chat_template_kwargs; the template is the model's own",),
    "messages": ("input", "prompt"),
    "input": ("messages", "prompt"),
    "prompt": ("messages", "input"),
    "system": ("instructions", "messages, with one of role system"),
    "instructions": ("system", "messages, with one of role system"),
    "nvext": "its options as fields of the request",
    "options": "its options as fields of the request",
}
_PLAIN = ("messages", "tools", "stream_options", "response_format", "structured_outputs", "text", "reasoning")
_ALTERNATIVES = ("str", "int", "float", "bool")  # what pydantic calls the members of a union


def from_validation(errors: Sequence[Mapping[str, Any]], known: Collection[str] | None = None) -> ApiError:
    """The first field's error, with all that pydantic reports for it. `known`: the fields of the request; None: any."""
    first = errors[0]
    location = _within(first["loc"])
    if first["type"] == "too_long" and not location:
        return invalid("body", f"the body has too many fields; allowed: {_allowed(first)}")
    if first["type"] in ("json_invalid", "json_type") or not location or isinstance(location[0], int):
        if isinstance(first.get("input"), bytes):  # FastAPI reads no JSON if the header does not declare it
            return invalid("body", "the body has another content type; allowed: Content-Type: application/json")
        reason = (first.get("ctx") or {}).get("error", "")
        return invalid("body", f"the body is no JSON object{f' ({reason})' if reason else ''}; allowed: a JSON object")
    name = str(location[0])
    is_nested = name in _PLAIN or first["type"] in ("extra_forbidden", "missing")
    path = _path(location) if is_nested else name
    if first["type"] == "extra_forbidden" and path in CHANGES_NOTHING:
        allowed = json.dumps(CHANGES_NOTHING[path])
        return invalid(path, f"{path} is {_shown(first.get('input'))}; allowed: {allowed}, which changes nothing here")
    if first["type"] == "extra_forbidden" and (hint := _hint(path, known)) is not None:
        return invalid(path, f"{path} is unknown; allowed: {hint}")
    if first["type"] == "extra_forbidden":
        return invalid(path, f"{path} is unknown; allowed: the fields of this API and those of docs/openai.md")
    if first["type"] == "missing":
        return invalid(path, f"{path} is missing")
    # Each member of a union has its own error.
    said = dict.fromkeys(_allowed(error) for error in errors if _within(error["loc"])[:1] == [name])
    return invalid(path, f"{path} is {_shown(first.get('input'))}; allowed: {'; or: '.join(said)}"[:600])


def _within(location: Sequence[str | int]) -> list[str | int]:
    """The location without where FastAPI has the value from."""
    return list(location[1:] if location[:1] and location[0] in ("body", "query", "path") else location)


def _hint(name: str, known: Collection[str] | None) -> str | None:
    """What is served in place of an unknown field; None: nothing."""
    hints = _HERE.get(name, ())
    if isinstance(hints, str):
        return hints
    return next((hint for hint in hints if known is None or _field_of(hint) in known), None)


def _field_of(hint: str) -> str:
    return re.split("[.,;]", hint)[0]


def _allowed(error: Mapping[str, Any]) -> str:
    if error["type"] == "too_short":
        return f"{error['ctx']['min_length']} or more entries"
    if error["type"] == "too_long":
        return f"at most {error['ctx']['max_length']} entries"
    said = str(error["msg"]).removeprefix("Input should be ").replace("a valid integer", "a whole number")
    return said.replace("a valid ", "a ").split(", got ")[0]


def _path(location: Sequence[Any]) -> str:
    text = str(location[0])
    for part in location[1:]:
        if isinstance(part, int):
            text += f"[{part}]"
        elif str(part).isidentifier() and part not in _ALTERNATIVES:
            text += f".{part}"
    return text


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        value = dict(itertools.islice(value.items(), _MAX_SHOWN))
    text = repr(value[:_MAX_SHOWN] if isinstance(value, (str, list)) else value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
