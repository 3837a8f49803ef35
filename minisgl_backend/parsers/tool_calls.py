"""Tool calls in model output -> calls with a name and arguments as JSON text, while the text arrives.

Incremental: the parts do not depend on how the text is split into pieces. A call is emitted once its name is known and
its arguments begin; what turns out before that not to be a call is content.
"""

from __future__ import annotations

from collections.abc import Collection

from minisgl_backend.parsers.json_calls import Calls
from minisgl_backend.parsers.json_reader import SPACE, JsonReader
from minisgl_backend.parsers.parts import HoldingParser, Part, content, partial_suffix


class HermesParser(HoldingParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them: Hermes, Qwen2.5, Qwen3."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, names: Collection[str]) -> None:
        """`names`: of the request's functions."""
        super().__init__()
        self._calls = Calls(names)
        self._opening = ""  # a tag that has not begun a call yet, and the white space before that
        self._closing = False  # after a call, before its closing tag
        self.is_damaged = False

    def _advance(self, parts: list[Part]) -> None:
        while self._held and self._step(parts):
            pass

    def _ignores_space(self) -> bool:
        return not (self._calls.is_open or self.is_damaged)

    def _end(self, parts: list[Part], reason: str) -> None:
        """A call that was never emitted is content."""
        if self._calls.is_open:
            self.is_damaged = self._calls.finish(parts) == "damaged"
        elif not self._closing:
            text = self._opening + self._held
            parts += content(text if self._calls.count == 0 or self.is_damaged else text.rstrip())

    def _step(self, parts: list[Part]) -> bool:
        if self.is_damaged:
            parts += content(self._held)
            self._held = ""
            return False
        if self._calls.is_open:
            self._held, outcome = self._calls.read(self._held, parts)
            self._closing, self.is_damaged = outcome == "emitted", outcome == "damaged"
            return outcome != "open"
        if self._closing:
            # Models forget a brace, or the tag itself: what comes then is the text after the call.
            rest = self._held.lstrip(SPACE + "}],")
            if rest != self.CLOSE and self.CLOSE.startswith(rest):
                self._held = rest
                return False
            self._held, self._closing = rest.removeprefix(self.CLOSE), False
            if rest.startswith("{"):  # another call within the same tags
                self._calls.begin()
            return True
        if self._opening:
            return self._opened(parts)
        start = self._held.find(self.OPEN)
        if start >= 0:
            before, end = self._held[:start].rstrip(), start + len(self.OPEN)
            parts += content(before)
            self._opening, self._held = self._held[len(before) : end], self._held[end:]
            return True
        # White space is kept until it is known whether a call follows.
        safe = self._held[: len(self._held) - partial_suffix(self._held, self.OPEN)].rstrip()
        parts += content(safe)
        self._held = self._held[len(safe) :]
        return False

    def _opened(self, parts: list[Part]) -> bool:
        rest = self._held.lstrip(SPACE)
        if not rest:
            return False
        if rest[0] == "{":
            self._calls.begin(self._opening + self._held[: len(self._held) - len(rest)])
            self._held = rest
        else:  # a text about the tag
            parts += content(self._opening)
        self._opening = ""
        return True


class LlamaParser(HoldingParser):
    """`{"name": ..., "parameters": {...}}` as the whole answer, several with `;` between them: Llama 3.1 to 3.3.

    Only an object that names one of the request's tools is a call: other JSON may be the answer itself.
    """

    TAG = "<|python_tag|>"

    def __init__(self, names: Collection[str]) -> None:
        """`names`: of the request's functions."""
        super().__init__()
        self._calls = Calls(names, needs_arguments=True)
        self._is_text = False
        self.is_damaged = False

    def _advance(self, parts: list[Part]) -> None:
        while self._held and self._step(parts):
            pass

    def _ignores_space(self) -> bool:
        return not (self._calls.is_open or self._is_text)

    def _end(self, parts: list[Part], reason: str) -> None:
        if self._calls.is_open:
            self.is_damaged = self._calls.finish(parts) == "damaged"
        else:
            parts += content(self._held.strip(SPACE + ";,") if self._calls.count else self._held)

    def _step(self, parts: list[Part]) -> bool:
        if self._is_text:
            parts += content(self._held)
            self._held = ""
            return False
        if self._calls.is_open:
            self._held, outcome = self._calls.read(self._held, parts)
            self._is_text, self.is_damaged = outcome in ("none", "damaged"), outcome == "damaged"
            return outcome != "open"
        rest = self._held.lstrip(SPACE + (";," if self._calls.count else ""))
        if rest.startswith(self.TAG) and not self._calls.count:
            rest = rest[len(self.TAG) :].lstrip(SPACE)
        if not rest or (not self._calls.count and self.TAG.startswith(rest)):
            return False
        if rest[0] != "{":
            self._is_text = True
            return True
        self._calls.begin(self._held[: len(self._held) - len(rest)])
        self._held = rest
        return True


class CallListParser:
    """`[{"name": ..., "parameters": {...}}, ...]`: what a grammar makes of tool_choice `required`."""

    def __init__(self, names: Collection[str] | None = None) -> None:
        """`names`: of the request's functions; None: any."""
        self._calls = Calls(names)
        self._before = ""  # the text before the first call
        self._has_begun = False
        self.is_damaged = False

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        while text:
            if self.is_damaged:
                return parts + content(text)
            if not self._calls.is_open:
                self._before += text[: len(text) - len(text.lstrip(SPACE + "[,]"))]
                text = text.lstrip(SPACE + "[,]")
                if not text:
                    break
                self._calls.begin("" if self._has_begun else self._before)
                self._has_begun = True
            text, outcome = self._calls.read(text, parts)
            self.is_damaged = outcome == "damaged"
        return parts

    def finish(self, reason: str) -> list[Part]:
        parts: list[Part] = []
        if self._calls.is_open:
            self.is_damaged = self._calls.finish(parts) == "damaged"
        return parts


class ArgumentsParser:
    """The whole answer is the arguments of one function: what a grammar makes of a named tool."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._reader: JsonReader | None = None
        self._raw: list[str] = []
        self._is_text = False
        self.is_damaged = False

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        if self._reader is None and not self._is_text:
            self._raw.append(text)
            text = "".join(self._raw)
            bare = text.lstrip(SPACE)
            if not bare:
                return []
            self._is_text = bare[0] != "{"  # no function takes it
            if not self._is_text:
                self._raw, text = [text[: len(text) - len(bare)]], bare
                self._reader = JsonReader()
                parts.append(Part("call", self._name))
        if self._reader is not None and not self._is_text:
            end, told = self._reader.feed(text)
            self._raw.append(text[:end])
            text = text[end:]
            parts += [Part("arguments", told)] if told else []
            if self._reader.state == "broken":
                self._is_text = self.is_damaged = True
                parts.append(Part("broken", "".join(self._raw)))
        return parts + content(text) if self._is_text else parts

    def finish(self, reason: str) -> list[Part]:
        if self._is_text or (self._reader is not None and self._reader.state == "done"):
            return []
        self.is_damaged, raw = self._reader is not None, "".join(self._raw)
        return [Part("broken", raw)] if self.is_damaged else content(raw)
