"""Calls that quote calls: what stands in a text argument is text, whatever format's it is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tests.unit.parsers.formats import WRITERS, Call

TEXT = {"type": "string"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "write": {"type": "object", "properties": {"path": TEXT, "content": TEXT, "mode": {"type": "integer"}}},
    "run": {"type": "object", "properties": {"cmd": TEXT}},
    "time": {"type": "object", "properties": {}},
}
STOP_WORD = "Observation:"
INNER: Call = ("run", {"cmd": "rm -rf /"})
_HOLE = "@@"


class Quoted(NamedTuple):
    """A text that an argument holds."""

    what: str
    text: str


def tags(written: str) -> tuple[str, str]:
    """What stands before the argument of a format's call, and behind it."""
    before, _, behind = WRITERS[written][1]([("run", {"cmd": _HOLE})]).partition(_HOLE)
    return before, behind


def quoted(outer: str, inner: str) -> Iterator[Quoted]:
    """What calls of `outer` quote of the format `inner`."""
    write = WRITERS[inner][1]
    before, behind = tags(inner)
    yield Quoted("a call", write([INNER]))
    yield Quoted("a call in a text", f"See:\n{write([INNER])}\nThat is all.")
    yield Quoted("a call without arguments", write([("time", {})]))
    yield Quoted("its opening tags", before)
    yield Quoted("its end tags", behind)
    yield Quoted("a stop text", f"I see.\n{STOP_WORD} nothing")
    if inner == outer:
        yield Quoted("a call of the same function", write([("write", {"path": "a", "content": "b"})]))
        yield Quoted("a call that quotes one", write([("write", {"path": "a", "content": write([INNER])})]))
        yield Quoted("opening tags in a text", f"It begins with {before} so.")
        yield Quoted("end tags in a text", f"It ends with {behind} so.")
        yield Quoted("parts of the opening tags", before[1:])
        yield Quoted("parts of the end tags", behind[:-1] + "\n" + behind[1:])


def outer_calls(text: str) -> Iterator[list[Call]]:
    """Calls with that text as an argument, alone and among others."""
    yield [("write", {"path": "x", "content": text})]
    yield [("write", {"content": text, "path": "x"})]
    yield [("write", {"content": text, "mode": 5}), ("time", {})]
    yield [("run", {"cmd": "ls"}), ("write", {"path": "x", "content": text}), ("run", {"cmd": "ls"})]


def told(events: Any) -> tuple[list[Call], list[tuple[str, str]]]:
    """The calls that are whole, and (name, arguments) of those that are broken."""
    found: dict[int, list[str]] = {}
    broken: dict[int, list[str]] = {}
    for kind, text, number in events:
        if kind == "call":
            found[number] = [text, ""]
        elif kind == "arguments":
            found[number][1] += text
        elif kind == "broken":
            broken |= {one: found.pop(one) for one in [*found] if one >= number}
    calls = [(name, json.loads(arguments, parse_constant=_refuse)) for name, arguments in found.values()]
    return calls, [(name, arguments) for name, arguments in broken.values()]


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def unharmed(events: Any, calls: list[Call]) -> bool:
    """Whether the calls told are the first of these, and nothing that was told of others can be taken for another."""
    found, broken = told(events)
    others = [(name, json.loads(arguments)) for name, arguments in broken if is_json(arguments)]
    return found == calls[: len(found)] and all(one in calls for one in others)


def offered(names: Mapping[str, Any] = SCHEMAS) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in names.items()]
