"""Tool calls of Mistral's models, old and new.

[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}, ...]        Mistral 7B v3, Nemo, Large 2
[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}                                 Small 3.1 and 3.2, Devstral, Ministral 3
"""

from __future__ import annotations

import re

from minisgl_backend.parsers.headers import MORE, Header, Named
from minisgl_backend.parsers.json_reader import SPACE
from minisgl_backend.parsers.parts import Part
from minisgl_backend.parsers.tagged import JsonArgumentsParser, JsonListParser, Outcome

_TAG = "[TOOL_CALLS]"
_ID = re.compile(r"\[CALL_ID\]\s*(\w+)")


class MistralParser(JsonArgumentsParser, JsonListParser):
    """The first character after the tag tells which of the two formats it is, if no function's name begins so."""

    BEGIN = (_TAG,)
    HEADERS = (Header((), ("[CALL_ID]", re.compile(r"\w+"), "?[ARGS]")), Header((), ("?[ARGS]",)))
    ENDS = (_TAG,)

    def begin(self, tag: str) -> None:
        JsonArgumentsParser.begin(self, tag)
        JsonListParser.begin(self, tag)
        self._is_list: bool | None = None  # None: undecided

    def id_of(self, header: str) -> str:
        found = _ID.search(header)
        return "" if found is None else found[1]

    def read(self, text: str, parts: list[Part], *, is_last: bool) -> tuple[str, Outcome]:
        if self._is_list is None:
            named = self.names.find(text, Header(), is_last=is_last)
            first = text.lstrip(SPACE)[:1]
            if named == MORE or not first:
                return text, "none" if is_last else "more"
            self._is_list = first in "[{" and not isinstance(named, Named)
        form = JsonListParser if self._is_list else JsonArgumentsParser
        return form.read(self, text, parts, is_last=is_last)
