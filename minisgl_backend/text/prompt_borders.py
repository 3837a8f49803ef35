"""Where prompts of chats are likely to meet: models with states find a prefix only where a state was kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from minisgl_backend.errors import InvalidRequestError

if TYPE_CHECKING:
    from minisgl_backend.text.tokenizer import Tokenizer

MOST_REMEMBERED = 1024  # beginnings of prompts, and ends
_QUESTIONS = ("x", "7")  # of two prompts that differ in nothing else
_BEGINNING = ("system", "developer")  # roles


class PromptParts(NamedTuple):
    """See `request.Request`."""

    stable_len: int = 0
    borders: tuple[int, ...] = ()


NO_PARTS = PromptParts()


class ChatIds(NamedTuple):
    """A rendered chat."""

    token_ids: list[int]
    parts: PromptParts


class PromptBorders:
    """Asks a chat template by rendering short chats, once for each distinct beginning and for each set of arguments."""

    def __init__(self, tokenizer: Tokenizer, *, asks: bool = True) -> None:
        """`asks`: False for a model without states, whose prompts need no parts."""
        self._tokenizer = tokenizer
        self._asks = asks
        self._found: dict[bytes, list[int]] = {}  # token ids, by what they were found for; the latest ones

    def read(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> ChatIds:
        """Renders a chat. Raises InvalidRequestError."""
        ids = self._tokenizer.encode(self._tokenizer.render(messages, **arguments), add_special_tokens=False)
        return ChatIds(ids, self.of_chat(messages, arguments, ids))

    def of_chat(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], token_ids: Sequence[int]
    ) -> PromptParts:
        """Of a chat that was rendered with these arguments of the template to these tokens."""
        begins_answer = not arguments.get("continue_final_message") and arguments.get("add_generation_prompt", True)
        if not (self._asks and begins_answer):
            return NO_PARTS
        begin: list[Mapping[str, Any]] = []
        for message in messages:
            if message.get("role") not in _BEGINNING:
                break
            begin.append(message)
        plain = {name: value for name, value in arguments.items() if not isinstance(value, (list, dict))}
        end = self._remember("end", [], plain, self._end)
        start = self._remember("start", begin, arguments, self._start)
        count = len(token_ids) - len(end)
        stable = count if end and list(token_ids[count:]) == end else 0
        borders = (len(start),) if start and list(token_ids[: len(start)]) == start else ()
        return PromptParts(stable, borders)

    def _remember(self, name: str, begin: Sequence[Any], arguments: Mapping[str, Any], find: Any) -> list[int]:
        key = hashlib.sha256(json.dumps([name, begin, arguments], sort_keys=True, default=str).encode()).digest()
        found: list[int] | None = self._found.pop(key, None)
        if found is None:
            try:
                found = find(begin, arguments)
            except InvalidRequestError:  # the template wants more than a question
                found = []
        self._found[key] = found
        if len(self._found) > MOST_REMEMBERED:
            self._found.pop(next(iter(self._found)), None)
        return found

    def _end(self, _: Sequence[Any], arguments: Mapping[str, Any]) -> list[int]:
        """What begins the answer, which a later turn may render otherwise (without an empty thought, for example)."""
        chat = [{"role": "user", "content": _QUESTIONS[0]}]
        without = self._tokenizer.render(chat, **{**arguments, "add_generation_prompt": False})
        whole = self._tokenizer.render(chat, **arguments)
        end = whole[len(without) :] if whole.startswith(without) else ""
        return self._tokenizer.encode(end, add_special_tokens=False)

    def _start(self, begin: Sequence[Any], arguments: Mapping[str, Any]) -> list[int]:
        """What chats with these system messages and tools have in common."""
        chats = ([*begin, {"role": "user", "content": question}] for question in _QUESTIONS)
        first, second = (
            self._tokenizer.encode(self._tokenizer.render(chat, **arguments), add_special_tokens=False)
            for chat in chats
        )
        pairs = zip(first, second, strict=False)
        return first[: next((at for at, (one, other) in enumerate(pairs) if one != other), len(second))]
