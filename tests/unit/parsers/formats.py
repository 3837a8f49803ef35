"""What models write in each format of calls: whole answers, as their chat templates show them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "array"},
            "where": {"type": "object"},
            "flag": {"type": "boolean"},
            "share": {"type": "number"},
        },
    },
    "time": {"type": "object", "properties": {"hour": {"type": ["integer", "null"]}}},
}
Call = tuple[str, dict[str, Any]]
CALLS: list[Call] = [
    ("weather", {"city": 'Köln "am" {Rhein}\\', "days": [1, {"x": None}], "where": {"a": "<b>, [c]"}, "flag": True}),
    ("time", {}),
    ("time", {"hour": 7}),
    ("weather", {"city": "a\nb = [1]", "share": -0.5}),
]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def deepseek_v3(calls: Sequence[Call]) -> str:
    written = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Sequence[Call]) -> str:
    written = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def deepseek_v32(calls: Sequence[Call]) -> str:
    written = "".join(
        f'<｜DSML｜invoke name="{name}">\n'
        + "".join(
            f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">{_plain(value)}'
            "</｜DSML｜parameter>\n"
            for key, value in arguments.items()
        )
        + "</｜DSML｜invoke>\n"
        for name, arguments in calls
    )
    return f"<｜DSML｜function_calls>\n{written}</｜DSML｜function_calls>"


def kimi_k2(calls: Sequence[Call]) -> str:
    written = "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def minimax_m2(calls: Sequence[Call]) -> str:
    written = "".join(
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{key}">{_plain(value)}</parameter>\n' for key, value in arguments.items())
        + "</invoke>\n"
        for name, arguments in calls
    )
    return f"<minimax:tool_call>\n{written}</minimax:tool_call>"


def glm45(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>\n" for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def glm47(calls: Sequence[Call]) -> str:
    return "".join(
        f"<tool_call>{name}"
        + "".join(f"<arg_key>{key}</arg_key><arg_value>{_plain(value)}</arg_value>" for key, value in arguments.items())
        + "</tool_call>"
        for name, arguments in calls
    )


def qwen3_coder(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def gemma4(calls: Sequence[Call]) -> str:
    def value(one: Any) -> str:
        if isinstance(one, str):
            return f'<|"|>{one}<|"|>'
        if isinstance(one, list):
            return "[" + ",".join(map(value, one)) + "]"
        if isinstance(one, dict):
            return "{" + ",".join(f"{key}:{value(item)}" for key, item in one.items()) + "}"
        return _json(one)

    return "".join(f"<|tool_call>call:{name}{value(arguments)}<tool_call|>" for name, arguments in calls)


def mistral_old(calls: Sequence[Call]) -> str:
    return "[TOOL_CALLS]" + _json([{"name": name, "arguments": arguments} for name, arguments in calls])


def mistral_new(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)


def mistral_ids(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[CALL_ID]abcdef123[ARGS]{_json(arguments)}" for name, arguments in calls)


def granite(calls: Sequence[Call]) -> str:
    return "<|tool_call|>" + _json([{"name": name, "arguments": arguments} for name, arguments in calls])


def apriel(calls: Sequence[Call]) -> str:
    return (
        "<tool_calls>" + _json([{"name": name, "arguments": arguments} for name, arguments in calls]) + "</tool_calls>"
    )


def minimax(calls: Sequence[Call]) -> str:
    written = "\n".join(_json({"name": name, "arguments": arguments}) for name, arguments in calls)
    return f"<tool_calls>\n{written}\n</tool_calls>"


def hermes(calls: Sequence[Call]) -> str:
    written = (_json({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in written)


def llama3_json(calls: Sequence[Call]) -> str:
    return "; ".join(_json({"name": name, "parameters": arguments}) for name, arguments in calls)


def pythonic(calls: Sequence[Call], show: Callable[[Any], str] = repr) -> str:
    written = (f"{name}({', '.join(f'{key}={show(value)}' for key, value in given.items())})" for name, given in calls)
    return f"[{', '.join(written)}]"


def pythonic_double(calls: Sequence[Call]) -> str:
    def show(one: Any) -> str:
        if isinstance(one, list):
            return "[" + ", ".join(map(show, one)) + "]"
        if isinstance(one, dict):
            return "{" + ", ".join(f"{show(key)}: {show(value)}" for key, value in one.items()) + "}"
        return _json(one) if isinstance(one, str) else repr(one)

    return pythonic(calls, show)


def lfm2(calls: Sequence[Call]) -> str:
    return f"<|tool_call_start|>{pythonic_double(calls)}<|tool_call_end|>"


def harmony(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}<|call|>"
        for name, arguments in calls
    )


def harmony_template(calls: Sequence[Call]) -> str:
    """As its chat template writes history."""
    return "<|start|>assistant".join(
        f" to=functions.{name}<|channel|>commentary json<|message|>{_json(arguments)}<|call|>"
        for name, arguments in calls
    )


# (name in the table, how it is written)
WRITERS: dict[str, tuple[str, Callable[[Sequence[Call]], str]]] = {
    "harmony": ("harmony", harmony),
    "harmony of the template": ("harmony", harmony_template),
    "deepseek_v3": ("deepseek_v3", deepseek_v3),
    "deepseek_v31": ("deepseek_v31", deepseek_v31),
    "deepseek_v32": ("deepseek_v32", deepseek_v32),
    "kimi_k2": ("kimi_k2", kimi_k2),
    "minimax_m2": ("minimax_m2", minimax_m2),
    "glm45": ("glm45", glm45),
    "glm47": ("glm45", glm47),
    "qwen3_coder": ("qwen3_coder", qwen3_coder),
    "gemma4": ("gemma4", gemma4),
    "mistral, a list": ("mistral", mistral_old),
    "mistral, names": ("mistral", mistral_new),
    "mistral, ids": ("mistral", mistral_ids),
    "granite": ("granite", granite),
    "minimax": ("minimax", minimax),
    "apriel": ("minimax", apriel),
    "hermes": ("hermes", hermes),
    "llama3_json": ("llama3_json", llama3_json),
    "pythonic": ("pythonic", pythonic_double),
    "pythonic, single quotes": ("pythonic", pythonic),
    "lfm2": ("lfm2", lfm2),
}
# These are the whole answer: a text before them makes them text.
ALONE = frozenset({"llama3_json", "pythonic", "pythonic, single quotes"})
