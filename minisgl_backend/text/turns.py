"""Other orders of a conversation, for chat templates that refuse it as it is.

Many templates want one system message, at the beginning, or users and assistants in turns; clients send system messages
anywhere (Claude Code behind the user's first one) and several messages of one role.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from minisgl_backend.text.chat import joined

Conversation = list[dict[str, Any]]
_SYSTEM = ("system", "developer")


def orders(messages: Sequence[dict[str, Any]]) -> Iterator[Conversation]:
    """The same texts in forms that more and more templates accept, the least changed one first; each builds on the one
    before. `messages`: in the form of `plain_messages`."""
    tried = found = list(messages)
    for change in (_one_system, _in_turns, _results_with_text, _no_system):
        found = change(found)
        if found != tried:
            tried = found
            yield found


def _one_system(messages: Conversation) -> Conversation:
    """All system messages are one, at the beginning."""
    systems = [message for message in messages if message["role"] in _SYSTEM]
    others = [message for message in messages if message["role"] not in _SYSTEM]
    return [_joined(systems), *others] if systems else others


def _in_turns(messages: Conversation) -> Conversation:
    """Consecutive messages of a user are one, and those of the assistant up to its calls."""
    found: Conversation = []
    for message in messages:
        same = bool(found) and message["role"] == found[-1]["role"] and message["role"] in ("user", "assistant")
        if same and "tool_calls" not in found[-1]:
            found[-1] = _joined([found[-1], message])
        else:
            found.append(message)
    return found


def _results_with_text(messages: Conversation) -> Conversation:
    """What a user says behind results of tools stands in the last one: only the assistant may answer those."""
    found: Conversation = []
    for message in messages:
        if found and message["role"] == "user" and found[-1]["role"] == "tool":
            found[-1] = {**found[-1], "content": _text([found[-1], message], "content")}
        else:
            found.append(message)
    return found


def _no_system(messages: Conversation) -> Conversation:
    """The system message begins the first one of the user, as in the templates of models without that role."""
    first = next((number for number, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None or messages[0]["role"] not in _SYSTEM:
        return messages
    asked = {**messages[first], "content": _text([messages[0], messages[first]], "content")}
    return [*messages[1:first], asked, *messages[first + 1 :]]


def _joined(messages: Conversation) -> dict[str, Any]:
    """One message of all texts and calls; other keys are those of the first that has them."""
    found: dict[str, Any] = {}
    for message in reversed(messages):
        found |= message
    for key in ("content", "reasoning_content"):
        if any(isinstance(message.get(key), (str, list)) for message in messages):
            found[key] = _text(messages, key)
    return found


def _text(messages: Conversation, key: str) -> Any:
    return joined([message.get(key) for message in messages])
