"""Tool calls of Mistral's models, old and new.

[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}, ...]        Mistral 7B v3, Nemo, Large 2
[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}                                 Small 3.1 and 3.2, Devstral, Ministral 3
"""

from __future__ import annotations

import re

from minisgl_backend.parsers.headers import MORE, Header, Named
from minisgl_backend.parsers.json_reader import SPACE
from minisgl_backend.parsers.parts import Part
from minisgl_backend.parsers.tagged import JsonArgumentsParser, JsonListParser, Outcome, TaggedParser

_TAG = "[TOOL_CALLS]"
_ID = re.compile(r"\[CALL_ID\]\s*(\w+)")


class _OfNames(JsonArgumentsParser):
    BEGIN = (_TAG,)
    HEADERS = (Header((), ("[CALL_ID]", re.compile(r"\w+"), "?[ARGS]")), Header((), ("?[ARGS]",)))
    ENDS = (_TAG,)

    def id_of(self, header: str) -> str:
        found = _ID.search(header)
        return "" if found is None else found[1]


class MistralParser(JsonListParser):
    """The first character after the tag tells which of the two formats it is, if no function's name begins so."""

    BEGIN = (_TAG,)

    def begin(self, tag: str) -> None:
        super().begin(tag)
        self._named: TaggedParser | None = None
        self._is_list = False

    def read(self, text: str, parts: list[Part], *, is_last: bool) -> tuple[str, Outcome]:
        if self._named is None and not self._is_list:
            named = self.names.find(text, Header(), is_last=is_last)
            first = text.lstrip(SPACE)[:1]
            if named == MORE or not first:
                return text, "none" if is_last else "more"
            if first in "[{" and not isinstance(named, Named):
                self._is_list = True
            else:
                self._named = _OfNames(self.functions)
                self._named.opening = self.opening
                self._named.begin(_TAG)
        if self._named is None:
            return super().read(text, parts, is_last=is_last)
        self._named.count = max(self._named.count, self.count)
        self._named.reason = self.reason
        rest, outcome = self._named.read(text, parts, is_last=is_last)
        self.count = self._named.count
        return rest, outcome
