"""Tool calls in model output -> calls with a name and arguments as JSON text, while the text arrives.

Incremental: the parts do not depend on how the text is split into pieces. A call is emitted once its name is known and
its arguments begin; what turns out before that not to be a call is content.
"""

from __future__ import annotations

from collections.abc import Collection

from minisgl_backend.parsers.json_calls import SPACE, Calls
from minisgl_backend.parsers.parts import Part, content, partial_suffix


class HermesParser:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them: Hermes, Qwen2.5, Qwen3."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, names: Collection[str]) -> None:
        self._held = ""
        self._calls = Calls()
        self._opening = ""  # the tag before a call, and the white space before that
        self._closing = False  # after a call, before its closing tag

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def finish(self, reason: str) -> list[Part]:
        """What was held back. A call that was never emitted is content."""
        text = ""
        if self._calls.is_open:
            text = "" if self._calls.pending is None else self._opening + self._calls.pending
        elif not self._closing:
            text = self._held if self._calls.count == 0 else self._held.rstrip()
        self._held = ""
        return content(text)

    def _step(self, parts: list[Part]) -> bool:
        if self._calls.is_open:
            self._held, outcome = self._calls.read(self._held, parts)
            if outcome == "none":
                parts += content(f"{self._opening}{self._calls.pending}")
            self._closing = outcome == "emitted"
            return outcome != "open"
        if self._closing:
            # Models forget a brace, or the tag itself: what comes then is the text after the call.
            rest = self._held.lstrip(SPACE + "}],")
            if rest != self.CLOSE and self.CLOSE.startswith(rest):
                self._held = rest
                return False
            self._held, self._closing = rest.removeprefix(self.CLOSE), False
            if rest.startswith("{"):  # another call within the same tags
                self._opening = ""
                self._calls.begin()
            return True
        start = self._held.find(self.OPEN)
        if start >= 0:
            before, end = self._held[:start].rstrip(), start + len(self.OPEN)
            parts += content(before)
            self._opening, self._held = self._held[len(before) : end], self._held[end:]
            self._calls.begin()
            return True
        # White space is kept until it is known whether a call follows.
        safe = self._held[: len(self._held) - partial_suffix(self._held, self.OPEN)].rstrip()
        parts += content(safe)
        self._held = self._held[len(safe) :]
        return False


class LlamaParser:
    """`{"name": ..., "parameters": {...}}` as the whole answer, several with `;` between them: Llama 3.1 to 3.3.

    Only an object that names one of the request's tools is a call: other JSON may be the answer itself.
    """

    TAG = "<|python_tag|>"

    def __init__(self, names: Collection[str]) -> None:
        self._held = ""
        self._calls = Calls(frozenset(names), needs_arguments=True)
        self._is_text = False
        self._before = ""  # the text before the object being read

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._held and self._step(parts):
            pass
        return parts

    def finish(self, reason: str) -> list[Part]:
        text = self._held
        if self._calls.is_open:
            text = "" if self._calls.pending is None else self._before + self._calls.pending
        elif self._calls.count:
            text = text.strip(SPACE + ";,")
        self._held = ""
        return content(text)

    def _step(self, parts: list[Part]) -> bool:
        if self._is_text:
            parts += content(self._held)
            self._held = ""
            return False
        if self._calls.is_open:
            self._held, outcome = self._calls.read(self._held, parts)
            if outcome == "none":
                parts += content(f"{self._before}{self._calls.pending}")
                self._is_text = True
            return outcome != "open"
        rest = self._held.lstrip(SPACE + (";," if self._calls.count else ""))
        if rest.startswith(self.TAG) and not self._calls.count:
            rest = rest[len(self.TAG) :].lstrip(SPACE)
        if not rest or (not self._calls.count and self.TAG.startswith(rest)):
            return False
        if rest[0] != "{":
            self._is_text = True
            return True
        self._before = self._held[: len(self._held) - len(rest)]
        self._held = rest
        self._calls.begin()
        return True


class CallListParser:
    """`[{"name": ..., "parameters": {...}}, ...]`: what a grammar makes of tool_choice `required`."""

    def __init__(self) -> None:
        self._calls = Calls()

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        while text:
            if not self._calls.is_open:
                text = text.lstrip(SPACE + "[,]")
                if not text:
                    break
                self._calls.begin()
            text, _ = self._calls.read(text, parts)
        return parts

    def finish(self, reason: str) -> list[Part]:
        return []


class ArgumentsParser:
    """The whole answer is the arguments of one function: what a grammar makes of a named tool."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._emitted = False

    def feed(self, text: str) -> list[Part]:
        if not text:
            return []
        begin = [] if self._emitted else [Part("call", self._name)]
        self._emitted = True
        return [*begin, Part("arguments", text)]

    def finish(self, reason: str) -> list[Part]:
        return []
