"""The content blocks of Anthropic's messages -> the messages of a chat. All functions raise ApiError."""

from __future__ import annotations

import json
import re
from typing import Any

from minisgl_backend.openai.requests.messages import ImagePart, joined, shown, text_at, text_of, wrong

# Lines that Claude Code writes for Anthropic's own servers, as `x-anthropic-billing-header: cc_version=...; cch=...;`.
# They change with each request, so no prompt with one would be found in the prefix cache. No model is to read them.
_HEADERS = re.compile(r"(?:[ \t]*x-anthropic-[a-z0-9-]+:[^\n]*(?:\n|$))+", re.IGNORECASE)
_USER_BLOCKS = ("text", "image", "tool_result", "document", "search_result")
_RESULT_BLOCKS = ("text", "image", "document", "search_result", "tool_reference")
_ASSISTANT_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use")
_SOURCES = ("text", "content")


def system_text(content: str | list[Any], name: str) -> str:
    """A system prompt without the headers at the beginning of its blocks."""
    if isinstance(content, str):
        return _without_headers(content)
    texts = [
        text_of([block], name) if isinstance(block, str) else _system_block(block, f"{name}[{number}]")
        for number, block in enumerate(content)
    ]
    return "\n".join(kept for text in texts if (kept := _without_headers(text)) or not text)


def messages_of_user(blocks: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """In a chat, results of tools are separate messages."""
    found: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        path = f"{name}[{number}]"
        if block.get("type") == "tool_result":
            parts = _result_parts(block.get("content"), f"{path}.content")
            if _is_error(block, path):  # chat templates have no field for it
                parts = (
                    [f"Error: {parts[0]}", *parts[1:]] if parts and isinstance(parts[0], str) else ["Error:", *parts]
                )
            found.append({"role": "tool", "tool_call_id": text_at(block, "tool_use_id", path), "content": parts})
        elif found and found[-1]["role"] == "user":
            found[-1]["content"].append(_block_part(block, path, _USER_BLOCKS))
        else:
            found.append({"role": "user", "content": [_block_part(block, path, _USER_BLOCKS)]})
    return [{**message, "content": joined(message["content"])} for message in found] or [
        {"role": "user", "content": ""}
    ]


def message_of_assistant(blocks: list[dict[str, Any]], name: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for number, block in enumerate(blocks):
        path, kind = f"{name}[{number}]", block.get("type")
        if kind == "text":
            texts.append(text_at(block, "text", path))
        elif kind == "thinking":
            thoughts.append(text_at(block, "thinking", path))
        elif kind == "tool_use":
            given = block.get("input")
            if not isinstance(given, dict):
                raise wrong(f"{path}.input", f"is {shown(given)}; allowed: an object")
            function = {"name": text_at(block, "name", path), "arguments": json.dumps(given)}
            calls.append({"id": text_at(block, "id", path), "type": "function", "function": function})
        elif kind != "redacted_thinking":  # only Anthropic can read it
            raise wrong(f"{path}.type", f"is {shown(kind)}; allowed: {', '.join(_ASSISTANT_BLOCKS)}")
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _without_headers(text: str) -> str:
    found = _HEADERS.match(text)
    return text if found is None else text[found.end() :]


def _system_block(block: Any, name: str) -> str:
    if not isinstance(block, dict) or block.get("type") != "text":
        raise wrong(
            f"{name}.type", f"is {shown(block.get('type') if isinstance(block, dict) else block)}; allowed: text"
        )
    return text_at(block, "text", name)


def _result_parts(content: Any, name: str) -> list[str | ImagePart]:
    if not isinstance(content, list):
        return [text_of(content, name)]
    return [_block_part(block, f"{name}[{number}]", _RESULT_BLOCKS) for number, block in enumerate(content)]


def _block_part(block: Any, name: str, allowed: tuple[str, ...]) -> str | ImagePart:
    """An image, or the text of a block that has one, a title and an address before it."""
    kind = block.get("type") if isinstance(block, dict) else block
    if isinstance(block, str):
        return block
    if not isinstance(block, dict) or kind not in allowed:
        raise wrong(
            f"{name}.type", f"is {shown(kind)}; allowed: {', '.join(allowed)} (this server has no other inputs)"
        )
    if kind == "image":
        return ImagePart(name, block)
    if kind == "text":
        return text_at(block, "text", name)
    if kind == "tool_reference":
        return text_at(block, "tool_name", name)
    if kind == "search_result":
        heads = [text_at(block, key, name) for key in ("title", "source")]
        return "\n".join((*heads, text_of(block.get("content"), f"{name}.content")))
    heads = [text_at(block, key, name) for key in ("title", "context") if block.get(key) is not None]
    return "\n".join((*heads, _document_text(block.get("source"), f"{name}.source")))


def _document_text(source: Any, name: str) -> str:
    kind = source.get("type") if isinstance(source, dict) else source
    if not isinstance(source, dict) or kind not in _SOURCES:
        raise wrong(f"{name}.type", f"is {shown(kind)}; allowed: {', '.join(_SOURCES)} (documents that are text)")
    return text_at(source, "data", name) if kind == "text" else text_of(source.get("content"), f"{name}.content")


def _is_error(block: dict[str, Any], name: str) -> bool:
    value = block.get("is_error")
    if not isinstance(value, bool | None):
        raise wrong(f"{name}.is_error", f"is {shown(value)}; allowed: true, false")
    return bool(value)
