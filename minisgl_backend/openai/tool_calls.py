"""Tool calls in what a model writes -> calls with a name and arguments as JSON text, as the text arrives.

Incremental: the events add up to the same whatever places the text was cut at. A call is told once its name is known
and its arguments begin; what turns out to be none before that is content.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Literal, NamedTuple, Protocol

from minisgl_backend.openai.reasoning import partial_suffix

_SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")


class Event(NamedTuple):
    """`content`: text beside calls; `call`: call `number` begins, `text` is its name; `arguments`: more of it."""

    kind: Literal["content", "call", "arguments"]
    text: str
    number: int = 0


class ToolParser(Protocol):
    """One choice of one answer."""

    def feed(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


class _Call:
    """Reads one JSON object {"name": ..., "arguments": {...}}, character by character."""

    def __init__(self, index: int, names: Collection[str] | None, *, needs_arguments: bool) -> None:
        """`names`: only these are calls; None: any."""
        self._index = index
        self._names = names
        self._needs_arguments = needs_arguments
        self.state: Literal["open", "done", "failed"] = "open"
        self.raw = ""  # all that was read, until the call is told
        self.told = False
        self._expects = "object"
        self._key = ""
        self._value: list[str] = []  # of the value that is being read
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._name: str | None = None
        self._early: str | None = None  # arguments that came before the name
        self._streams = False  # the value being read is the arguments of a call that was told

    def feed(self, text: str, events: list[Event]) -> int:
        """How many characters were read: all, or up to the object's end."""
        fresh: list[str] = []  # arguments since the last event
        for number, character in enumerate(text):
            if not self.told:
                self.raw += character
            self._read(character, fresh, events)
            if self.state != "open":
                self._flush(fresh, events)
                return number + 1
        self._flush(fresh, events)
        return len(text)

    def _read(self, character: str, fresh: list[str], events: list[Event]) -> None:
        if self._expects == "value":
            self._read_value(character, fresh, events)
        elif self._expects == "key":
            self._read_key(character)
        elif character in _SPACE:
            pass
        elif self._expects == "object" and character == "{":
            self._expects = "first key"
        elif self._expects in ("first key", "next key") and character == '"':
            self._expects, self._key = "key", '"'
        elif self._expects == "colon" and character == ":":
            self._expects = "value begin"
        elif self._expects == "value begin":
            self._begin_value(character, fresh, events)
        elif self._expects == "comma" and character == ",":
            self._expects = "next key"
        elif self._expects in ("comma", "first key") and character == "}":
            self._end(fresh, events)
        else:
            self.state = "failed"

    def _read_key(self, character: str) -> None:
        self._key += character
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._key = _decode(self._key, "")
            self._expects = "colon"

    def _begin_value(self, character: str, fresh: list[str], events: list[Event]) -> None:
        if character in ",:]}":
            self.state = "failed"
            return
        self._expects, self._value, self._depth = "value", [], 0
        if character == "{" and self._key in _ARGUMENTS and self._name is not None and self._early is None:
            if not self._tell(events):
                return
            self._early, self._streams = "", True
        self._read_value(character, fresh, events)

    def _read_value(self, character: str, fresh: list[str], events: list[Event]) -> None:
        if not self._in_string and self._depth == 0 and self._value and character in ",}" + _SPACE:
            self._end_value(events)  # of a number or a word, which the next character ends
            if self.state == "open":
                self._read(character, fresh, events)
            return
        (fresh if self._streams else self._value).append(character)
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                if self._depth == 0:
                    self._end_value(events)
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value(events)

    def _end_value(self, events: list[Event]) -> None:
        self._expects = "comma"
        if self._streams:
            self._streams = False
            return
        text = "".join(self._value)
        if self._key == "name" and self._name is None:
            self._name = _decode(text, None)
            if not self._name:
                self.state = "failed"
        elif self._key in _ARGUMENTS and self._early is None:
            if text.startswith('"'):
                text = _decode(text, "") or "{}"
            self._early = text if text.startswith("{") else "{}"

    def _end(self, fresh: list[str], events: list[Event]) -> None:
        if self.told:
            self.state = "done"
            return
        if self._name is None or (self._needs_arguments and self._early is None):
            self.state = "failed"
        elif self._tell(events):
            self.state = "done"
            fresh.append(self._early or "{}")

    def _tell(self, events: list[Event]) -> bool:
        if self._names is not None and self._name not in self._names:
            self.state = "failed"
            return False
        self.told, self.raw = True, ""
        events.append(Event("call", self._name or "", self._index))
        return True

    def _flush(self, fresh: list[str], events: list[Event]) -> None:
        if fresh:
            events.append(Event("arguments", "".join(fresh), self._index))
            fresh.clear()


def _decode(text: str, otherwise: str | None) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        value = otherwise
    return value if isinstance(value, str) else (otherwise or "")


class HermesParser:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them: Hermes, Qwen2.5, Qwen3."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, names: Collection[str]) -> None:
        self._held = ""
        self._call: _Call | None = None
        self._num_calls = 0
        self._closing = False  # behind a call, before its closing tag

    def feed(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while self._step(events):
            pass
        return events

    def finish(self) -> list[Event]:
        """What was held back. A call that was never told is content."""
        text = ""
        if self._call is not None and not self._call.told:
            text = self.OPEN + self._call.raw
        elif self._call is None and not self._closing:
            text = self._held if self._num_calls == 0 else self._held.rstrip()
        self._held = ""
        return [Event("content", text)] if text else []

    def _step(self, events: list[Event]) -> bool:
        if self._call is not None:
            return self._read_call(self._call, events)
        if self._closing:
            end = self._held.find(self.CLOSE)
            if end < 0:
                self._held = self._held[len(self._held) - partial_suffix(self._held, self.CLOSE) :]
                return False
            self._held, self._closing = self._held[end + len(self.CLOSE) :], False
            return True
        start = self._held.find(self.OPEN)
        if start >= 0:
            _add_content(events, self._held[:start].rstrip())
            self._held = self._held[start + len(self.OPEN) :]
            self._call = _Call(self._num_calls, None, needs_arguments=False)
            return True
        # White space is kept until it is known whether a call follows.
        safe = self._held[: len(self._held) - partial_suffix(self._held, self.OPEN)].rstrip()
        _add_content(events, safe)
        self._held = self._held[len(safe) :]
        return False

    def _read_call(self, call: _Call, events: list[Event]) -> bool:
        read = call.feed(self._held, events)
        self._held = self._held[read:]
        if call.state == "open":
            return False
        self._call = None
        if call.told:
            self._num_calls += 1
            self._closing = True
        else:
            _add_content(events, self.OPEN + call.raw)
        return True


class LlamaParser:
    """`{"name": ..., "parameters": {...}}` as the whole answer, several with `;` between them: Llama 3.1 to 3.3.

    Only what names one of the request's tools is a call: other JSON may be the answer itself.
    """

    TAG = "<|python_tag|>"

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._held = ""
        self._call: _Call | None = None
        self._num_calls = 0
        self._is_text = False
        self._before = ""  # what stood before the object that is being read

    def feed(self, text: str) -> list[Event]:
        self._held += text
        events: list[Event] = []
        while self._held and self._step(events):
            pass
        return events

    def finish(self) -> list[Event]:
        text = self._held
        if self._call is not None:
            text = "" if self._call.told else self._before + self._call.raw
        elif self._num_calls:
            text = text.strip(_SPACE + ";,")
        self._held = ""
        return [Event("content", text)] if text else []

    def _step(self, events: list[Event]) -> bool:
        if self._is_text:
            _add_content(events, self._held)
            self._held = ""
            return False
        if self._call is not None:
            return self._read_call(self._call, events)
        rest = self._held.lstrip(_SPACE + (";," if self._num_calls else ""))
        if rest.startswith(self.TAG) and not self._num_calls:
            rest = rest[len(self.TAG) :].lstrip(_SPACE)
        if not rest or (not self._num_calls and self.TAG.startswith(rest)):
            return False
        if rest[0] != "{":
            self._is_text = True
            return True
        self._before = self._held[: len(self._held) - len(rest)]
        self._held = rest
        self._call = _Call(self._num_calls, self._names, needs_arguments=True)
        return True

    def _read_call(self, call: _Call, events: list[Event]) -> bool:
        read = call.feed(self._held, events)
        self._held = self._held[read:]
        if call.state == "open":
            return False
        self._call = None
        if call.told:
            self._num_calls += 1
        else:
            _add_content(events, self._before + call.raw)
            self._is_text = True
        return True


class CallListParser:
    """`[{"name": ..., "parameters": {...}}, ...]`: what a grammar makes of tool_choice `required`."""

    def __init__(self) -> None:
        self._call: _Call | None = None
        self._num_calls = 0

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            if self._call is None:
                text = text.lstrip(_SPACE + "[,]")
                if not text:
                    break
                self._call = _Call(self._num_calls, None, needs_arguments=False)
            text = text[self._call.feed(text, events) :]
            if self._call.state != "open":
                self._num_calls += self._call.told
                self._call = None
        return events

    def finish(self) -> list[Event]:
        return []


class ArgumentsParser:
    """The whole answer is the arguments of one function: what a grammar makes of a named tool."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._told = False

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        begin = [] if self._told else [Event("call", self._name)]
        self._told = True
        return [*begin, Event("arguments", text)]

    def finish(self) -> list[Event]:
        return []


def _add_content(events: list[Event], text: str) -> None:
    if text:
        events.append(Event("content", text))
