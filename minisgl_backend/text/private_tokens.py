"""A tokenizer's second reading, in which some of its tokens have names that no client can write.

Text with the usual names of these tokens is then ordinary text, whoever wrote it, and only who knows the private names
can mean the tokens. The tokens of everything else stay the same.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

MARKER = -1  # the id that stands for the marker


class PrivateTokens:
    """Made of one tokenizer of transformers, for the texts of some of its added tokens."""

    def __init__(self, tokenizer: Any, texts: Iterable[str], model: str) -> None:
        """`texts`: of added tokens; those that the tokenizer does not know stay ordinary text. `model`: one of them,
        whose ways (what of the blanks beside it belongs to it) the marker has, too."""
        backend = tokenizer.backend_tokenizer
        key = secrets.token_hex(16)  # a client that guesses it could mean the tokens
        self.marker = f"\ue000{key}m\ue001"
        description = json.loads(backend.to_str())
        added = description["added_tokens"]
        known = {token["content"]: token for token in added}
        listed = [text for text in dict.fromkeys(texts) if text]
        # Longer ones first, in case one is the beginning of another.
        ordered = sorted((text for text in listed if text in known), key=len, reverse=True)
        self._names = {text: f"\ue000{key}{number}\ue001" for number, text in enumerate(ordered)}
        # Another one: errors may quote escaped texts.
        escape = secrets.token_hex(16)
        self._escapes = {text: f"\ue002{escape}{number}\ue003" for number, text in enumerate(ordered)}
        ids, vocabulary = {token["content"]: token["id"] for token in added}, description["model"].get("vocab")
        own = set(vocabulary) if isinstance(vocabulary, Mapping) else set()
        # A token beside the model's vocabulary keeps its place in the list, and so the others keep their ids.
        description["added_tokens"] = [
            {**token, "content": self._names.get(token["content"], token["content"])}
            for token in added
            if token["content"] not in self._names or token["content"] not in own
        ]
        self._backend = Backend.from_str(json.dumps(description))
        self._backend.no_truncation()
        self._backend.no_padding()
        later = [(name, text) for text, name in self._names.items() if text in own]
        like = known.get(model, {})
        for name, text in [*later, (self.marker, model)]:
            ways = known.get(text, like)
            self._backend.add_special_tokens(
                [AddedToken(name, **{key: ways.get(key, False) for key in ("lstrip", "rstrip", "single_word")})]
            )
        self._ids = {self._backend.token_to_id(name): ids[text] for text, name in self._names.items()}
        self._ids[self._backend.token_to_id(self.marker)] = MARKER
        self._bos = tokenizer.bos_token_id

    def named(self, text: str) -> str:
        """The text with the private names of its tokens: for what a template or a server wrote."""
        for literal, name in self._names.items():
            text = text.replace(literal, name)
        return text

    def occurs_in(self, text: str) -> bool:
        """Whether there is a token's usual name in it."""
        return any(literal in text for literal in self._names)

    def escaped(self, value: Any) -> Any:
        """A JSON value with the tokens' usual names in texts replaced, so that `named` leaves them alone."""
        if isinstance(value, str):
            for literal, escape in self._escapes.items():
                value = value.replace(literal, escape)
            return value
        if isinstance(value, Mapping):
            return {key: self.escaped(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.escaped(one) for one in value]
        return value

    def unescaped(self, text: str) -> str:
        """The text with the usual names of what `escaped` replaced."""
        for literal, escape in self._escapes.items():
            text = text.replace(escape, literal)
        return text

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids, MARKER for each marker; BOS as `Tokenizer.encode` has it. `text`: with private names."""
        own = self._ids
        ids = [own.get(token, token) for token in self._backend.encode(text, add_special_tokens=add_special_tokens).ids]
        if add_special_tokens and self._bos is not None and ids[:2] == [self._bos, self._bos]:
            return ids[1:]
        return ids

    def ids(self, texts: Sequence[str]) -> list[int | None]:
        """The ids of tokens by their usual names; None for one that the tokenizer does not know."""
        return [
            self._ids.get(self._backend.token_to_id(self._names[text])) if text in self._names else None
            for text in texts
        ]
