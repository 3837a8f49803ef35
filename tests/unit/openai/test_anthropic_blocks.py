"""What clients of Anthropic's API put into system prompts, documents and results, as messages of a chat."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.openai.batches.files import FileStore
from minisgl_backend.openai.endpoint import chat_prompt
from minisgl_backend.openai.errors import ApiError
from minisgl_backend.openai.image_sources import ImageSources
from minisgl_backend.openai.requests.anthropic import MessagesRequest

HEADER = "x-anthropic-billing-header: cc_version=2.1.197.abc; cc_entrypoint=cli; cch=0a1b2;"
HELLO = [{"role": "user", "content": "hello"}]
PLAIN = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Rome is warm."}}
FOUND = {
    "type": "search_result",
    "title": "Rome",
    "source": "https://example.org",
    "content": [{"type": "text", "text": "It is warm."}, {"type": "text", "text": "Very."}],
    "citations": {"enabled": True},
}


def texts(**values: Any) -> list[tuple[str, str]]:
    """(role, content) of the messages that a request becomes."""
    request = MessagesRequest.model_validate({"max_tokens": 1, "messages": HELLO, **values})
    request.check()
    return [(message.role, message.content) for message in request.as_chat().messages]


def block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(
    ("system", "kept"),
    [
        ([block(HEADER), block("You are Claude Code."), block("Be brief.")], "You are Claude Code.\nBe brief."),
        ([block("You are Claude Code."), block(f"{HEADER}\n"), block("Be brief.")], "You are Claude Code.\nBe brief."),
        (f"{HEADER}\nYou are Claude Code.", "You are Claude Code."),
        (f"{HEADER}\nx-anthropic-other: 7\nYou are Claude Code.", "You are Claude Code."),
        ([block(HEADER)], None),
        (HEADER, None),
        ("Never send the header\nx-anthropic-version: 1", "Never send the header\nx-anthropic-version: 1"),
        ([block("You are\n"), block(""), block("x")], "You are\n\n\nx"),
    ],
)
def test_headers_that_change_with_each_request_are_no_part_of_the_prompt(system: Any, kept: str | None) -> None:
    found = [] if kept is None else [("system", kept)]
    assert texts(system=system) == [*found, ("user", "hello")]
    assert texts(messages=[*HELLO, {"role": "system", "content": system}]) == [("user", "hello"), *found]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (PLAIN, "Rome is warm."),
        ({**PLAIN, "title": "Weather", "context": "of today"}, "Weather\nof today\nRome is warm."),
        ({"type": "document", "source": {"type": "content", "content": [block("a"), block("b")]}}, "a\nb"),
        ({"type": "document", "source": {"type": "content", "content": "a"}}, "a"),
        (FOUND, "Rome\nhttps://example.org\nIt is warm.\nVery."),
    ],
)
def test_documents_and_search_results_are_texts(content: dict[str, Any], text: str) -> None:
    assert texts(messages=[{"role": "user", "content": [content, block("So?")]}]) == [("user", f"{text}\nSo?")]
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block("Found:"), content]}
    assert texts(messages=[{"role": "user", "content": [result]}]) == [("tool", f"Found:\n{text}")]


def test_a_tool_that_was_searched_for_is_named() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "tool_reference", "tool_name": "f"}]}
    assert texts(messages=[{"role": "user", "content": [result]}]) == [("tool", "f")]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({**PLAIN, "source": {"type": "base64", "data": ""}}, ".source.type is 'base64'; allowed: text, content"),
        ({**PLAIN, "source": {"type": "text"}}, ".source.data is None; allowed: a text"),
        ({**PLAIN, "source": None}, ".source.type is None; allowed: text, content"),
        ({**PLAIN, "title": 7}, ".title is 7; allowed: a text"),
        ({**FOUND, "content": 7}, ".content is 7; allowed: a text or a list of parts"),
        ({**FOUND, "source": None}, ".source is None; allowed: a text"),
        (7, ".type is 7; allowed: text"),
    ],
)
def test_what_is_no_text_is_named(content: Any, told: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block("x"), content]}
    with pytest.raises(ApiError) as refused:
        texts(messages=[{"role": "user", "content": [result]}])
    assert refused.value.message.startswith(f"messages[0].content[0].content[1]{told}")
    assert refused.value.param == "messages"


def test_a_system_prompt_has_texts_alone() -> None:
    with pytest.raises(ApiError, match=r"system\[1\].type is 'image'; allowed: text"):
        texts(system=[block(HEADER), {"type": "image"}])


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


def test_images_stand_where_they_stood() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "is_error": True, "content": [IMAGE, block("seen")]}
    blocks = [block("Which?"), IMAGE, block("Or this?"), result, IMAGE]
    (_, asked), (_, told), (_, last) = texts(messages=[{"role": "user", "content": blocks}])
    assert asked == ["Which?", ("messages[0].content[1]", IMAGE), "Or this?"]
    assert told == ["Error:", ("messages[0].content[3].content[0]", IMAGE), "seen"]
    assert last == [("messages[0].content[4]", IMAGE)]


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ({"type": "base64", "data": "!"}, ".data is no base64"),
        ({"type": "base64", "data": "aGk=,aGk="}, ".data is no base64"),
        ({"type": "file", "file_id": "file-0"}, ".file_id is 'file-0', which is no file here"),
        ({"type": "file", "file_id": 7}, ".file_id is 7; allowed: a file's id"),
        ({"type": "base64"}, ".data is None; allowed: base64 of an image file"),
        ({"type": "url", "url": "https://example.org/a.png"}, ".url is an https URL, and this server fetches none"),
        ({"type": "ftp"}, ".type is 'ftp'; allowed: base64, url, file"),
        (None, ".type is None; allowed: base64, url, file"),
    ],
)
def test_images_without_a_file_are_refused_by_their_place(source: Any, told: str, tmp_path: Path) -> None:
    content = [block("x"), {"type": "image", "source": source}]
    request = MessagesRequest.model_validate({"max_tokens": 1, "messages": [{"role": "user", "content": content}]})
    chat = request.as_chat()
    with pytest.raises(ApiError) as refused:
        asyncio.run(ImageSources(FileStore(tmp_path, 1), ()).load(chat_prompt(chat, chat.messages).images))
    assert refused.value.message.startswith(f"messages[0].content[1].source{told}")
    assert refused.value.param == "messages"
