"""Which token a tokenizer's files name as the end of a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.models.end_tokens import read_end_of_text


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"tokenizer_config.json": {"eos_token": None}}, None),
        ({"tokenizer_config.json": {"eos_token": "E", "added_tokens_decoder": {"7": {"content": "E"}}}}, 7),
        (
            {
                "tokenizer_config.json": {"eos_token": {"content": "E"}},
                "tokenizer.json": {"added_tokens": [{"id": 0, "content": "E"}]},
            },
            0,
        ),
        ({"special_tokens_map.json": {"eos_token": "E"}, "tokenizer.json": {"model": {"vocab": {"E": 3}}}}, 3),
        ({"tokenizer_config.json": {"eos_token": "E"}, "tokenizer.json": {"model": {"vocab": [["E", 0.0]]}}}, None),
    ],
)
def test_the_tokenizers_end_of_text(tmp_path: Path, files: dict[str, Any], expected: int | None) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert read_end_of_text(tmp_path) == expected
