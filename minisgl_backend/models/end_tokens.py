"""The end-of-sequence tokens of a model, from the files of its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.json_files import read_json_if_there


def end_tokens(
    config: Mapping[str, Any], generation: Mapping[str, Any], tokenizer_eos: int | None, vocab_size: int
) -> tuple[int, ...]:
    """The tokens of all files, as in SGLang: some fine-tunes' files disagree, and each of their tokens ends a text."""
    found: dict[int, None] = {}
    for file, values in (("generation_config.json", generation), ("config.json", config)):
        name = f"{file}: eos_token_id"
        for token in token_ids(name, values.get("eos_token_id")):
            if not 0 <= token < vocab_size:
                raise ConfigError(f"{name} is {token}; allowed: 0 to vocab_size - 1 ({vocab_size - 1})")
            found[token] = None
    if tokenizer_eos is not None and 0 <= tokenizer_eos < vocab_size:
        found[tokenizer_eos] = None
    return tuple(found)


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """One or several ids without duplicates. Raises ConfigError with the key's `name`."""
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    for token in values:
        if not isinstance(token, int) or isinstance(token, bool):
            raise ConfigError(f"{name} is {json.dumps(value, default=str)}; allowed: an integer or a list of integers")
    return tuple(dict.fromkeys(values))


def read_end_of_text(folder: Path) -> int | None:
    """The id of the tokenizer's eos_token, from its files; None where they have none."""
    settings = read_json_if_there(folder / "tokenizer_config.json")
    token = settings.get("eos_token") or read_json_if_there(folder / "special_tokens_map.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return None
    for number, added in (settings.get("added_tokens_decoder") or {}).items():
        if isinstance(added, dict) and added.get("content") == text and str(number).isdigit():
            return int(number)
    return _token_id(folder / "tokenizer.json", text)


class _TokenizerModel(msgspec.Struct):
    vocab: msgspec.Raw = msgspec.Raw(b"null")  # may have 150,000 tokens: parsed only if the token is not an added one


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[dict[str, Any]] | None = None
    model: _TokenizerModel | None = None


def _token_id(file: Path, text: str) -> int | None:
    """The id of a token in a tokenizer.json; None where the file or the token is missing."""
    if not file.is_file():
        return None
    try:
        tokenizer = msgspec.json.decode(file.read_bytes(), type=_TokenizerFile)
        for added in tokenizer.added_tokens or []:
            if added.get("content") == text:
                return int(added["id"])
        vocabulary = msgspec.json.decode(tokenizer.model.vocab) if tokenizer.model is not None else None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{file} cannot be read as a tokenizer: {error}") from None
    return vocabulary.get(text) if isinstance(vocabulary, dict) else None
