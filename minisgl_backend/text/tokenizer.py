"""Prompts -> token ids: texts, and chat messages through the model's chat template."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from minisgl_backend.errors import ConfigError, InvalidRequestError
from minisgl_backend.text.chat_template import ChatTemplate
from minisgl_backend.text.private_tokens import PrivateTokens
from minisgl_backend.text.tokenizer_file import TokenizerFiles

log = logging.getLogger(__name__)

# Words, numbers, blanks, scripts: where pre-tokenizers differ.
_SAMPLE = "Hello world, it's 12345.67 naïve Straße 你好世界 🙂\n\n\tdef f(x):  return x<=y"


class Tokenizer:
    """The tokenizer and chat template of one model folder.

    The template runs in transformers' sandbox; Python code in the folder runs only with `trust_remote_code`.
    """

    def __init__(
        self, model_dir: str | Path, *, trust_remote_code: bool = False, files: TokenizerFiles | None = None
    ) -> None:
        """files: the folder's, if they are read. Raises ConfigError if it has no tokenizer that can be loaded."""
        files = files or TokenizerFiles(model_dir)
        self._tokenizer = load_tokenizer(files, trust_remote_code=trust_remote_code)
        self._class_name = files.config.get("tokenizer_class") or type(self._tokenizer).__name__
        self._bos = self._tokenizer.bos_token_id
        self._template = ChatTemplate(self._tokenizer)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._template)

    @property
    def chat_template(self) -> str:
        """Its source; several templates are concatenated; "" if there is none."""
        return self._template.source

    def info(self) -> dict[str, Any]:
        """Information for clients, by the keys of tokenizer_config.json."""
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        tokens, eos = self.encode("a"), self._tokenizer.eos_token_id
        return {
            "tokenizer_class": self._class_name,
            **{name: getattr(self._tokenizer, name, None) for name in names},
            "add_bos_token": self._bos is not None and tokens[:1] == [self._bos],
            "add_eos_token": eos is not None and tokens[-1:] == [eos],
        }

    @property
    def added_tokens(self) -> list[str]:
        """The texts of tokens added to the plain vocabulary, special or not."""
        return sorted(self._tokenizer.get_added_vocab())

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of tokens that are left out of answers' text unless `skip_special_tokens` is off."""
        added = self._tokenizer.added_tokens_decoder.items()
        found = {str(token): number for number, token in added if token.special}
        named = zip(self._tokenizer.all_special_tokens, self._tokenizer.all_special_ids, strict=True)
        return {**found, **{str(token): int(number) for token, number in named if number is not None}}

    def __len__(self) -> int:
        return len(self._tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; with `add_special_tokens`, BOS comes first exactly once, even if the text begins with it."""
        # verbose would warn about every prompt that is too long, which the caller refuses.
        ids: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        if add_special_tokens and self._bos is not None and ids[:2] == [self._bos, self._bos]:
            return ids[1:]
        return ids

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Token ids of two texts, joined as the tokenizer joins pairs, with special tokens."""
        ids: list[int] = self._tokenizer(first, second, verbose=False)["input_ids"]
        return ids

    def private_tokens(self, texts: Sequence[str], model: str) -> PrivateTokens:
        """Its second reading, in which the tokens of these texts have names that no client can write."""
        return PrivateTokens(self._tokenizer, texts, model)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the tokens, special ones included."""
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def first_token(self, word: str) -> int:
        """The id of the word's first token. Raises InvalidRequestError if it has none."""
        ids = self.encode(word, add_special_tokens=False)
        if not ids:
            raise InvalidRequestError(f"{word!r:.60} has no token; allowed: a text with at least one")
        return ids[0]

    def encode_words(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids of each word at the start of a text and after a space: most tokenizers distinguish these."""
        spellings = [text for word in words for text in (word, f" {word.lstrip()}")]
        ids = (tuple(self.encode(text, add_special_tokens=False)) for text in spellings)
        return tuple(dict.fromkeys(filter(None, ids)))

    def render(self, messages: Sequence[Mapping[str, Any]], /, **template_arguments: Any) -> str:
        """The prompt that the chat template makes of the messages, ready for the assistant's turn.

        The template decides about BOS: encode the result with `add_special_tokens=False`. `template_arguments` are
        passed to the template (tools, enable_thinking ...). Content parts of type text are joined, and calls have the
        form that the template expects. Raises InvalidRequestError.
        """
        return self._template.render(messages, template_arguments)

    def render_images(self, messages: Sequence[Mapping[str, Any]], /, **template_arguments: Any) -> str:
        """`render` of messages with content parts {"type": "image"}; texts beside them are not joined."""
        return self._template.render(messages, template_arguments, images=True)


def load_tokenizer(folder: str | Path | TokenizerFiles, *, trust_remote_code: bool = False) -> Any:
    """transformers' tokenizer of a model folder, which makes the tokens that the folder's files say, whichever version
    of transformers is installed. Raises ConfigError."""
    files = folder if isinstance(folder, TokenizerFiles) else TokenizerFiles(folder)
    runs_own_code = files.has_own_code and trust_remote_code
    backend = files.backend if files.has_tokenizer_json and not runs_own_code else None
    try:
        tokenizer = _load(files, backend, trust_remote_code=trust_remote_code)
        tokenizer.chat_template = files.chat_template(tokenizer.chat_template)
    except ConfigError:
        raise
    except Exception as error:  # whatever a value in the files leads to within transformers
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if backend is None and any(files.folder.glob("*.model")):
            reason += "; the packages sentencepiece and tiktoken read such files as it has in place of tokenizer.json"
        raise ConfigError(f"model {files.folder} has no tokenizer that can be loaded: {reason}") from None
    if backend is not None and isinstance(tokenizer, PreTrainedTokenizerFast):
        vars(tokenizer).update(_tokenizer=backend)
    elif files.has_tokenizer_json:
        _warn_of_another_tokenizer(tokenizer, files)
    elif not files.has_vocabulary(tokenizer.vocab_files_names.values()):  # transformers makes one of a few tokens
        needed = ", ".join(sorted(set(tokenizer.vocab_files_names.values())))
        raise ConfigError(f"model {files.folder} has no tokenizer: {type(tokenizer).__name__} is made of {needed}")
    return tokenizer


def _load(files: TokenizerFiles, backend: Backend | None, *, trust_remote_code: bool) -> Any:
    named = {} if backend is None else files.named_tokens(backend)
    if backend is None or not files.suffice(trust_remote_code=trust_remote_code):
        loader: Any = AutoTokenizer
        try:
            tokenizer = loader.from_pretrained(str(files.folder), trust_remote_code=trust_remote_code, **files.flags)
            if tokenizer.all_special_ids is not None:  # some classes look for tokens that the file does not have
                return tokenizer
        except Exception:
            if backend is None or files.has_own_code:
                raise
        log.info("%s: its class cannot be made of these files; tokenizer.json counts", files.folder)
    # Only the template and the names of tokens are read from it: an empty backend takes no time.
    options: Any = {"tokenizer_object": Backend(BPE()), "added_tokens_decoder": {}, **named}
    return PreTrainedTokenizerFast.from_pretrained(str(files.folder), **options)


def _warn_of_another_tokenizer(tokenizer: Any, files: TokenizerFiles) -> None:
    """The folder's own class, or one that does not use tokenizer.json, may cut texts otherwise than that file."""
    expected = files.backend.encode(_SAMPLE).ids
    found = tokenizer(_SAMPLE)["input_ids"]
    if found != expected:
        log.warning(
            "%s: %s cuts texts otherwise than the folder's tokenizer.json (%d tokens instead of %d for a sample)",
            files.folder,
            type(tokenizer).__name__,
            len(found),
            len(expected),
        )
