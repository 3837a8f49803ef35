"""Calls whose arguments are tags of their own, with values as they are: GLM, MiniMax-M2, DeepSeek V3.2, Qwen3-Coder.

A value may quote tags, a whole call among them, so where it ends has to be concluded:

- Its closing tag ends it if another argument or the call's end follows.
- Arguments that are opened within it have their own closing tags.
- The call's end was quoted, too, if a closing tag follows that belongs to no call.

A text that is letter by letter that of two calls, or of a call with one more argument, is that. What can be read in
several other ways is content. So all from the first call on is told at the answer's end, unless the format STREAMS:
then texts are told as they are written, and may turn out to be broken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from minisgl_backend.parsers.headers import MORE, NONE, Named, skip_space
from minisgl_backend.parsers.parts import STOP, STOP_TEXT, Part, partial_suffix
from minisgl_backend.parsers.tag_calls import TagCalls
from minisgl_backend.parsers.tag_reader import MAX_TAG
from minisgl_backend.parsers.tagged import Outcome


class TagValuesParser(TagCalls):
    """One choice of one answer."""

    TAGS: ClassVar[tuple[str, ...]] = ()  # those that count in a value, if not CLOSE and OPEN alone

    def __init__(self, functions: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(functions)
        self._tags = self.TAGS or (self.CLOSE, self.OPEN)
        self._in_values = re.compile("|".join(map(re.escape, self._tags)))
        closing = [tag for tag in self._tags if tag.strip() == self.CLOSE]
        self._behind_calls = re.compile("|".join(map(re.escape, (*closing, *self.BEGIN))))

    def read(self, text: str, parts: list[Part], *, is_last: bool) -> tuple[str, Outcome]:
        self._text, self._at = text, 0
        steps = {"header": self._header, "between": self._between, "value": self._in_value, "end": self._behind_end}
        outcome: Outcome | None = None
        while outcome is None:
            outcome = steps[self._stage](is_last)
        if self.STREAMS or outcome != "more":
            parts += self._told
            self._told = []
        return self._text[self._at :], outcome

    # The steps. Each returns None to go on, `more` if more text decides, or how all ended.

    def _header(self, is_last: bool) -> Outcome | None:
        found = self._named(self._at, self._tag, is_last)
        if isinstance(found, int):
            return "more" if found == MORE else "none"
        self._raw.append(self.opening)
        self._begin_call(found)
        return None

    def _between(self, is_last: bool) -> Outcome | None:
        start = skip_space(self._text, self._at)
        key = self._key_at(start, is_last)
        if isinstance(key, int):
            if key == MORE:
                return "more"
        elif key["key"] in self._keys or self._types.refuses(key["key"]):
            return self._damage(-1 if key["key"] in self._keys else 0)
        else:
            self._take(key.end())
            self._begin_value(key)
            return None
        for tag in self.ENDS:
            if self._text.startswith(tag, start):
                self._end_call(start + len(tag), "")
                return None
        if self._may_begin(start, (self.OPEN, *self.ENDS)):
            return self._at_last() if is_last else "more"
        return self._odd_text(start, is_last)

    def _at_last(self) -> Outcome:
        """The answer ends here, behind a value or before the first."""
        self._take(len(self._text))
        return self._commit() if self.reason == STOP else self._damage()

    def _odd_text(self, start: int, is_last: bool) -> Outcome | None:
        """What belongs to no call stands between its arguments."""
        return self._damage()

    def _in_value(self, is_last: bool) -> Outcome | None:
        found = self._in_values.search(self._text, self._at)
        if found is not None:
            self._take_value(found.start())
            is_closing = found[0].strip() == self.CLOSE
            return self._closing(found, is_last) if is_closing else self._other_tag(found, is_last)
        begun = max(partial_suffix(self._text[-MAX_TAG:], tag) for tag in self._tags)
        if not is_last:
            self._take_value(max(self._at, len(self._text) - begun))
            return "more"
        is_whole = self.reason == STOP and self._may_end_alone()
        self._take_value(max(self._at, len(self._text) - begun * is_whole))
        self._take(len(self._text))
        return self._commit() if is_whole else self._damage()

    def _may_end_alone(self) -> bool:
        """Whether the answer may end here, in a value."""
        return False

    def _other_tag(self, found: re.Match[str], is_last: bool) -> Outcome | None:
        """A tag stands in a value that does not end it."""
        self._value.open_argument()
        self._take_value(found.end())
        return None

    def _closing(self, found: re.Match[str], is_last: bool) -> Outcome | None:
        """The tag that ends values stands here; what follows tells whether it ends this one."""
        start = skip_space(self._text, found.end())
        key = self._key_at(start, is_last)
        if not isinstance(key, int):
            return self._key_behind(found, key)
        if key == MORE:
            return "more"
        for tag in self.ENDS:
            if self._text.startswith(tag, start):
                return self._end_behind(found, start + len(tag), is_last)
        if self._may_begin(start, (self.OPEN, *self.ENDS)):
            if not is_last:
                return "more"
            if self._may_be_last():
                return self._at_last()
            self._take(len(self._text))
            return self._damage()
        if self._text.startswith(self.OPEN, start) and not self._value.may_be_text:
            self._take(found.end())  # it is no text, so that an odd argument follows
            self._close_value()
        else:
            self._quote(found.end(), is_end=self._value.depth == 0)
        return None

    def _key_behind(self, found: re.Match[str], key: re.Match[str]) -> Outcome | None:
        """The header of another argument follows."""
        if self._value.depth:
            self._quote(found.end(), is_end=True)
        elif self._types.refuses(key["key"]):
            return self._damage(0)
        elif key["key"] not in self._keys:
            self._take(key.start())
            self._close_value()
        elif len(self._keys) == 1:
            self._take_value(key.end())
        else:
            return self._damage()  # either of the two with that name is quoted
        return None

    def _end_behind(self, found: re.Match[str], end: int, is_last: bool) -> Outcome | None:
        """The end of a call follows."""
        if not self._value.depth:
            self._end_call(end, self._text[found.start() : end])
            return None
        around = (self.BEHIND, *self.AROUND) if self.BEHIND else self.AROUND
        behind = skip_space(self._text, end)
        while (tag := next((tag for tag in around if self._text.startswith(tag, behind)), "")) != "":
            behind = skip_space(self._text, behind + len(tag))
        if behind < len(self._text) and (is_last or not self._may_begin(behind, around)):
            self._quote(found.end(), is_end=True)
            return None
        if not is_last:
            return "more"
        self._take(end)
        return self._commit() if self.reason == STOP and self._may_be_last() else self._damage()

    def _may_be_last(self) -> bool:
        """Whether a closing tag at the answer's end is that of the call, although an argument was opened in its value:
        only if there is no other way to read it."""
        return not self._value.depth or (not self._value.num_ends and len(self._calls) == 1)

    def _behind_end(self, is_last: bool) -> Outcome | None:
        """Behind what is probably the end of a call: until the next call, a closing tag, or the answer's end."""
        value = self._value
        if self._expects_behind:
            start = skip_space(self._text, self._at)
            if (
                not is_last
                and self._text[start : start + MAX_TAG] != self.BEHIND
                and self._may_begin(start, (self.BEHIND,))
            ):
                return "more"
            self._expects_behind = False
            if self._text.startswith(self.BEHIND, start):
                value.complete_end(self._text[self._at : start + len(self.BEHIND)])
                self._take(start + len(self.BEHIND))
        if self.STREAMS and not value.is_open:
            return self._commit()
        if value.is_odd_end and (outcome := self._behind_odd_end(is_last)) != "read":
            return outcome
        found = self._behind_calls.search(self._text, self._at + self._searched)
        if found is None:
            if is_last:
                whole = (STOP,) if value.is_odd_end else (STOP, STOP_TEXT)
                return self._commit() if self.reason in whole else self._damage()
            self._searched = max(0, len(self._text) - self._at - MAX_TAG)
            return "more"
        if found[0].strip() == self.CLOSE:
            if not value.is_open or len(self._calls) > 1:
                return self._damage(0)
            self._go_on(found.start())
            return None
        following = self._named(found.end(), found[0], is_last)
        if following == MORE:
            return "more"
        if isinstance(following, Named):
            self._next_call(following, found)
        else:
            self._searched = found.end() - self._at
        return None

    def _behind_odd_end(self, is_last: bool) -> Outcome | None:
        """Half an end is one only if a call or nothing follows; `read`: so it is."""
        start = skip_space(self._text, self._at)
        if start == len(self._text) or (not is_last and self._may_begin(start, self.BEGIN)):
            return "read" if is_last else "more"
        tag = next((tag for tag in self.BEGIN if self._text.startswith(tag, start)), None)
        following = NONE if tag is None else self._named(start + len(tag), tag, is_last)
        if following == MORE:
            return "more"
        if isinstance(following, Named):
            return "read"
        self._go_on(self._at)
        return None
