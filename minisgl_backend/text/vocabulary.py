"""What each token id stands for: its bytes, whether it is special, and the tokenizer's own decode.

Loads without transformers if the folder has a tokenizer.json.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from minisgl_backend.text.tokenizer_file import TokenizerFiles

Decode = Callable[[Sequence[int], bool], str]

PROMPT_TAIL = 6  # tokens, as many as vLLM uses


class Vocabulary:
    """The tokens of one model.

    `byte_exact`: a text is the concatenation of its tokens' bytes, as with byte-level and byte-fallback tokenizers,
    which are nearly all of today's (except for a space that some drop at the start of a text). Streams are then decoded
    by table look-up.
    """

    def __init__(
        self,
        decode: Decode,
        token_bytes: Sequence[bytes],
        special_ids: frozenset[int],
        *,
        byte_exact: bool,
    ) -> None:
        self.special_ids = special_ids
        self.byte_exact = byte_exact
        self._decode = decode
        self._bytes = list(token_bytes)
        self._printable = [b"" if i in special_ids else data for i, data in enumerate(self._bytes)]

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of special tokens by their texts."""
        return {self.token_text(token): token for token in self.special_ids}

    def __len__(self) -> int:
        """One more than the highest token id."""
        return len(self._bytes)

    def table(self, skip_special_tokens: bool) -> list[bytes]:
        """The bytes of each id, b"" for unused ids and, with `skip_special_tokens`, for special ones. Not to be
        changed."""
        return self._printable if skip_special_tokens else self._bytes

    def tail(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """The prompt's last tokens, which the text of an answer depends on; none where each token has its own text."""
        return () if self.byte_exact else tuple(prompt[-PROMPT_TAIL:])

    def token_text(self, token_id: int) -> str:
        """The text of one token, special ones included; U+FFFD for partial characters, "" for an unused id."""
        return self._bytes[token_id].decode("utf-8", "replace") if 0 <= token_id < len(self._bytes) else ""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The tokenizer's own text of a whole sequence: what a stream's deltas add up to."""
        return self._decode(token_ids, skip_special_tokens)


def load_vocabulary(
    model_dir: str | Path, *, trust_remote_code: bool = False, files: TokenizerFiles | None = None
) -> Vocabulary:
    """Reads the tokenizer of a model folder; files: its own, if they are read. Raises ConfigError if there is none."""
    files = files or TokenizerFiles(model_dir)
    if not files.has_tokenizer_json:
        return _from_transformers(model_dir, trust_remote_code)
    return vocabulary_of(files.backend, files.special_ids(files.backend))


def vocabulary_of(backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> Vocabulary:
    """The vocabulary of a loaded tokenizer of the `tokenizers` library."""

    def decode(token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        ids = [i for i in token_ids if i not in special_ids] if skip_special_tokens else list(token_ids)
        return backend.decode(ids, skip_special_tokens=skip_special_tokens)

    to_bytes, exact = _byte_rule(backend)
    table = [b"" if token is None else to_bytes(token) for token in _tokens(backend)]
    return Vocabulary(decode, table, special_ids, byte_exact=exact)


def _tokens(backend: tokenizers.Tokenizer) -> list[str | None]:
    """The token of each id, None for unused ids: the same as `id_to_token`, without a call for each of 150,000."""
    ids = backend.get_vocab(with_added_tokens=True)
    tokens: list[str | None] = [None] * (1 + max(ids.values(), default=-1))
    for token, i in ids.items():
        tokens[i] = token
    for i in [i for i, known in enumerate(tokens) if known is None]:  # unused ids, and tokens with several ids
        tokens[i] = backend.id_to_token(i)
    for i, added in backend.get_added_tokens_decoder().items():
        tokens[i] = added.content  # even if the model has another token with that id
    return tokens


def _from_transformers(model_dir: str | Path, trust_remote_code: bool) -> Vocabulary:
    from minisgl_backend.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model_dir, trust_remote_code=trust_remote_code)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return vocabulary_of(backend, frozenset(tokenizer.all_special_ids))
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))

    def decode(token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(
            tokenizer.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    table = [(token or "").replace("▁", " ").encode() for token in tokens]
    return Vocabulary(decode, table, frozenset(tokenizer.all_special_ids), byte_exact=False)


def empty_vocabulary() -> Vocabulary:
    """The vocabulary of a model without a tokenizer: no token has a text."""
    return Vocabulary(lambda token_ids, skip_special_tokens: "", (), frozenset(), byte_exact=True)


def _byte_rule(backend: tokenizers.Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    """How to turn a token into bytes, and whether that is exact except for a space at the start of a text."""
    if backend.decoder is None:
        return str.encode, False
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_rule(), True
    stripped = kinds[-1:] == ["Strip"]
    rest = kinds[:-1] if stripped else kinds
    plain = rest == ["Replace", "ByteFallback", "Fuse"] and steps[0].get("pattern") == {"String": "▁"}
    if plain and steps[0].get("content") == " ":
        last = steps[-1]
        if not stripped or (last["content"], last["start"], last["stop"]) == (" ", 1, 0):
            return _byte_fallback_bytes, True
    return (lambda token: token.replace("▁", " ").encode()), False


def _byte_level_rule() -> Callable[[str], bytes]:
    """GPT-2's alphabet: printable bytes stand for themselves; the others are the characters from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(256 + i) for i, byte in enumerate(others)}
    encoding = codecs.charmap_build("".join(letters.get(byte, chr(byte)) for byte in range(256)))

    def to_bytes(token: str) -> bytes:
        try:
            return codecs.charmap_encode(token, "strict", encoding)[0]
        except UnicodeEncodeError:
            return token.encode()  # an added token with characters outside the alphabet stands for itself

    return to_bytes


def _byte_fallback_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("▁", " ").encode()
