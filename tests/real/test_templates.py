"""Real tokenizers and their own chat templates."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from minisgl_backend.text.detokenizer import new_detokenizer
from minisgl_backend.text.tokenizer import Tokenizer
from minisgl_backend.text.vocabulary import load_vocabulary
from tests.real.models import TOKENIZERS, tokenizer

TEXT = "Hi, what is 3 < 5 in Zürich? 你好 🙂  And\n\n\tnow? naïve <tag> {'a': [1, 2]}"
ARGUMENTS = '{"city": "Zürich"}'
CALL = {"id": "abcdef123", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": TEXT},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdef123", "content": "22 degrees"},
]
# What the call and its result become; the templates of the other packages have no words for them.
TURNS = {
    "qwen3": (f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>', "22 degrees"),
    "deepseek_v3": (
        f"<｜tool▁sep｜>weather\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>",
        "22 degrees<｜tool▁output▁end｜>",
    ),
    "gptoss": (f"to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>", "22 degrees"),
}


@cache
def loaded(name: str) -> Tokenizer:
    return Tokenizer(tokenizer(name))


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_a_chat_becomes_the_tokens_of_its_text(name: str) -> None:
    found = loaded(name).render(CHAT if name in TURNS else CHAT[:1])
    assert TEXT in found
    for fragment in TURNS.get(name, ()):
        assert fragment in found
    ids = loaded(name).encode(found, add_special_tokens=False)
    assert loaded(name).decode(ids) == found


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_a_stream_has_the_text_of_the_whole(name: str) -> None:
    vocabulary = load_vocabulary(tokenizer(name))
    ids = loaded(name).encode(TEXT, add_special_tokens=False)
    stream = new_detokenizer(vocabulary)
    pieces = [stream.feed([token]) for token in ids]
    assert "".join(pieces) + stream.finish() == vocabulary.decode(ids) == TEXT
    assert not any("�" in piece for piece in pieces)
