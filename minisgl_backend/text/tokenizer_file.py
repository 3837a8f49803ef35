"""The tokenizer of tokenizer.json, with the changes that the folder's other files make: which tokens stand at the ends
of a text, which are added and special, whether a text gets a space in front.

The rules are those by which publishers made their files, transformers' before version 5, whichever version is
installed: version 5 drops `add_bos_token` and `add_eos_token`, and for some classes the file's way to split texts.
Needs no transformers.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.json_files import read_json_if_there

log = logging.getLogger(__name__)

_FILE = "tokenizer.json"
_FILES = (_FILE, "tokenizer_config.json", "vocab.json", "vocab.txt", "merges.txt")
_SUFFIXES = (".model", ".tiktoken")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_END = "<|endoftext|>"
# Mistral's published files split words otherwise than its own tokenizer; `fix_mistral_regex` asks for the right way.
_ATTRIBUTES = ("single_word", "lstrip", "rstrip", "normalized", "special")
_MORE, _EXTRA = "additional_special_tokens", "extra_special_tokens"
_FLAGS = ("add_bos_token", "add_eos_token")
_MISTRAL_TYPES = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
_MISTRAL_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Ends(NamedTuple):
    """Whether a text gets the BOS token in front, and the EOS token behind."""

    bos: bool
    eos: bool

    @classmethod
    def of(cls, backend: Tokenizer) -> Ends:
        """Whether this tokenizer puts any token there."""
        mask = backend.encode("a").special_tokens_mask
        return cls(mask[:1] == [1], mask[-1:] == [1])


@dataclass(frozen=True)
class _TokenizerClass:
    """What one of transformers' classes does where the files say nothing."""

    tokens: Mapping[str, str] = field(default_factory=dict)  # by the keys of tokenizer_config.json
    ends: Ends | None = None  # None: tokenizer.json says it, whatever the flags are
    add_prefix_space: bool | None = False  # of texts, for pre-tokenizers that are ByteLevel and nothing else


_LLAMA = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_GPT2 = dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END)
# By their names without "Fast".
_CLASSES = {
    "LlamaTokenizer": _TokenizerClass(_LLAMA, Ends(True, False), add_prefix_space=None),
    "CodeLlamaTokenizer": _TokenizerClass(_LLAMA, Ends(True, False)),
    "GemmaTokenizer": _TokenizerClass(
        {"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}, Ends(True, False)
    ),
    "CohereTokenizer": _TokenizerClass(
        {"unk_token": "<UNK>", "bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>"}, Ends(True, False)
    ),
    "GPTNeoXTokenizer": _TokenizerClass(_GPT2, Ends(False, False)),
    "GPT2Tokenizer": _TokenizerClass(_GPT2),
    "CodeGenTokenizer": _TokenizerClass(_GPT2),
    "Qwen2Tokenizer": _TokenizerClass(dict.fromkeys(("unk_token", "eos_token", "pad_token"), _END)),
    "BloomTokenizer": _TokenizerClass({**_LLAMA, "pad_token": "<pad>"}),
    "PreTrainedTokenizer": _TokenizerClass(),
}


class TokenizerFiles:
    """What the files of a folder say about its tokenizer."""

    def __init__(self, folder: str | Path) -> None:
        """Raises ConfigError if there are none, or one holds no JSON object."""
        self.folder = Path(folder)
        if not self.folder.is_dir() or not has_tokenizer(folder):  # transformers would make an empty one for some
            raise ConfigError(f"model {folder} has no tokenizer (tokenizer.json, tokenizer.model or the like)")
        self.has_tokenizer_json = (self.folder / _FILE).is_file()
        self.config = read_json_if_there(self.folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in self.config:  # else the older file is not read
            older = read_json_if_there(self.folder / "special_tokens_map.json")
            both = [config.get(_MORE) or [] for config in (self.config, older)]
            self.config |= {key: _special(value) for key, value in older.items()}
            if all(isinstance(tokens, list) for tokens in both) and any(both):
                self.config[_MORE] = [*both[0], *map(_special, both[1])]
        self._model_config = read_json_if_there(self.folder / "config.json")
        self._check()
        named = self.config.get("tokenizer_class") or self._model_config.get("tokenizer_class")
        self.class_name = str(named or "").removesuffix("Fast")
        own = self.config.get("auto_map")
        self.has_own_code = bool(own.get("AutoTokenizer") if isinstance(own, Mapping) else own)
        self._class = _CLASSES.get(self.class_name)
        self._is_version_5 = "backend" in self.config  # of transformers, which writes all it knows to tokenizer.json
        # The ends of texts are those that version 4 makes of the flags; else the flags count as they stand.
        self._class_decides = self._class is not None and not self.has_own_code and not self._is_version_5

    def suffice(self, *, trust_remote_code: bool) -> bool:
        """Whether `load` gives all that the tokenizer's class would do."""
        known = self._class is not None or self.class_name == "TokenizersBackend"
        return self.has_tokenizer_json and known and not (self.has_own_code and trust_remote_code)

    @property
    def flags(self) -> dict[str, bool]:
        """add_bos_token and add_eos_token, as a class of transformers takes them; {} if its defaults count."""
        found = {flag: bool(self.config[flag]) for flag in _FLAGS if flag in self.config}
        if self._class is None or not self._class_decides:
            return found
        if self._class.ends is not None:
            return dict(zip(_FLAGS, self._class.ends, strict=True)) | found
        if self.has_tokenizer_json:
            return {}
        # Made of other files it begins texts with BOS for GPT-2 alone.
        bos = self.class_name == "GPT2Tokenizer" and found.get("add_bos_token", False)
        return {"add_bos_token": bos, "add_eos_token": False} if found else {}

    def named_tokens(self, backend: Tokenizer) -> dict[str, str]:
        """The tokens with a role, by their keys; those of the class, too, where they are in the vocabulary and the
        files have no such key."""
        of_class = self._class.tokens.items() if self._class is not None else ()
        tokens = {key: text for key, text in of_class if backend.token_to_id(text) is not None} | self.config
        return {key: text for key in _NAMED if (text := _text(tokens.get(key)))}

    @cached_property
    def backend(self) -> Tokenizer:
        """The tokenizer of tokenizer.json; it neither truncates nor pads. Raises ConfigError."""
        try:
            backend = Tokenizer.from_file(str(self.folder / _FILE))
        except Exception as error:  # the library raises bare Exceptions
            raise ConfigError(f"model {self.folder}: {_FILE} cannot be read: {error}") from None
        backend.no_truncation()
        backend.no_padding()
        backend.add_tokens(self._added_tokens(backend))
        self._set_prefix_space(backend)
        self._fix_words_of_mistral(backend)
        self._set_ends(backend)
        return backend

    def has_vocabulary(self, names: Iterable[str]) -> bool:
        """Whether there is one of the files of which a class makes its vocabulary; a class may need none."""
        return not names or any((self.folder / name).is_file() for name in (*names, _FILE))

    def chat_template(self, found: Any) -> Any:
        """`found`, transformers' own, or the one of a processor, which models of images and texts may have alone: a
        text, or texts by name. None if there is none. Raises ConfigError."""
        template = found or read_json_if_there(self.folder / "chat_template.json").get("chat_template")
        texts = template.values() if isinstance(template, dict) else [template or ""]
        if not all(isinstance(text, str) for text in texts):
            self._refuse("chat_template", "a text, or texts by name", template)
        return template or None

    def _check(self) -> None:
        """Raises ConfigError for tokens in another form than transformers writes."""
        listed = self.config.get("added_tokens_decoder") or {}
        if not isinstance(listed, dict) or not all(
            i.isdigit() and isinstance(token, dict) and _text(token) for i, token in listed.items()
        ):
            self._refuse("added_tokens_decoder", 'an object of {"content": TEXT} by ids')
        for key in (_MORE, _EXTRA):
            more = self.config.get(key) or []
            values = list(more.values()) if isinstance(more, dict) else more
            if not isinstance(values, list) or not all(map(_text, values)):
                self._refuse(key, "a list or an object of texts")
        for key in _NAMED:
            if self.config.get(key) and not _text(self.config[key]):
                self._refuse(key, 'a text, {"content": TEXT} or null')

        if not isinstance(self.config.get("tokenizer_class") or "", str):
            self._refuse("tokenizer_class", "the name of a class, or null")
        if not isinstance(self.config.get("model_max_length") or 0, (int, float)):
            self._refuse("model_max_length", "a number of tokens, or null")

    def _refuse(self, key: str, allowed: str, value: Any = None) -> None:
        value = self.config.get(key) if value is None else value
        raise ConfigError(f"model {self.folder}: the tokenizer's {key} is {value!r:.100}; allowed: {allowed}")

    def special_ids(self, backend: Tokenizer) -> frozenset[int]:
        """The ids of special tokens, and of those that have a role. `backend`: of `load`."""
        added = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        named = (backend.token_to_id(_text(token)) for token in self._special_tokens(backend))
        return frozenset(added | {i for i in named if i is not None})

    def _special_tokens(self, backend: Tokenizer) -> list[Any]:
        """As the files write them: texts, or objects with `content`."""
        tokens: list[Any] = [self.config.get(key, text) for key, text in self.named_tokens(backend).items()]
        for key in (_MORE, _EXTRA):
            more = self.config.get(key) or ()
            tokens += more.values() if isinstance(more, Mapping) else more
        return tokens

    def _added_tokens(self, backend: Tokenizer) -> list[AddedToken]:
        """Tokens that the other files add to the vocabulary, or give other attributes."""
        special = self._special_tokens(backend)
        texts = {_text(token) for token in special}
        in_file = {token.content: token for token in backend.get_added_tokens_decoder().values()}
        listed = self.config.get("added_tokens_decoder")
        attributes_count = listed is not None  # of tokens with a role, which tokenizer.json may have otherwise
        if listed is None:
            older = read_json_if_there(self.folder / "added_tokens.json").items()
            listed = {i: {"content": text, "special": text in texts} for text, i in older if text not in in_file}
        tokens = {_text(token): token for token in (listed[number] for number in sorted(listed, key=int))}
        for token in special:
            if isinstance(token, Mapping) and (attributes_count or _text(token) not in in_file):
                tokens.setdefault(_text(token), token)
            elif _text(token) not in in_file:
                tokens.setdefault(_text(token), {"content": token, "special": True})
        return [_added_token(token, in_file.get(text), special=text in texts) for text, token in tokens.items()]

    def _set_prefix_space(self, backend: Tokenizer) -> None:
        default = self._class.add_prefix_space if self._class is not None else None
        flag = self.config.get("add_prefix_space", default)
        if flag is None or self._is_version_5:
            return
        words = _state(backend.pre_tokenizer)
        nested = flag and self.class_name in ("CohereTokenizer", "BloomTokenizer")
        if words.get("type") == "ByteLevel" or (words and nested):
            _set_parts(backend, pre_tokenizer=_with_prefix_space(words, bool(flag)))
        elif self.class_name == "LlamaTokenizer" and "ByteLevel" not in str(words):
            self._rebuild_sentencepiece(backend, words, bool(flag))

    def _rebuild_sentencepiece(self, backend: Tokenizer, words: dict[str, Any], prefix: bool) -> None:
        """Llama's class makes these parts anew where `add_prefix_space` is set."""
        is_new = words.get("type") == "Metaspace"
        if (self.folder / "tokenizer.model").is_file():
            is_new = self.config.get("legacy") is False
        elif prefix == (
            words.get("prepend_scheme", "never") != "never" or "Prepend" in str(_state(backend.normalizer))
        ):
            return
        blank = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
        first = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
        scheme = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first" if prefix else "never"}
        _set_parts(
            backend,
            normalizer=None if is_new else {"type": "Sequence", "normalizers": [*first, blank]},
            pre_tokenizer={**scheme, "split": False} if is_new else None,
            decoder={"type": "Sequence", "decoders": [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        )

    def _fix_words_of_mistral(self, backend: Tokenizer) -> None:
        words, model = _state(backend.pre_tokenizer), self._model_config
        major = re.match(r"\d+", str(model.get("transformers_version")))
        written_by_5 = major is not None and int(major[0]) >= 5
        if model.get("model_type") not in _MISTRAL_TYPES or written_by_5 or words.get("type") != "Sequence":
            return
        flag, (first, *rest) = self.config.get("fix_mistral_regex"), words["pretokenizers"]
        split = {"type": "Split", "pattern": {"Regex": _MISTRAL_WORDS}, "behavior": "Isolated", "invert": False}
        if flag is True:
            _set_parts(backend, pre_tokenizer={**words, "pretokenizers": [split, *rest]})
        elif flag is None and first.get("type") == "Split" and first["pattern"] != split["pattern"]:
            log.warning(
                "%s cuts words otherwise than Mistral's own tokenizer, as some published files do; "
                '"fix_mistral_regex": true in tokenizer_config.json cuts them as that, false silences this',
                self.folder / _FILE,
            )

    def _set_ends(self, backend: Tokenizer) -> None:
        if not self.flags:
            return
        now = Ends.of(backend)
        wanted = Ends(self.flags.get("add_bos_token", now.bos), self.flags.get("add_eos_token", now.eos))
        if not self._class_decides and wanted == now:
            return  # with tokens of the file's own choice
        named = self.named_tokens(backend)
        texts = [named.get(key) if add else None for key, add in zip(("bos_token", "eos_token"), wanted, strict=True)]
        for flag, text, add in zip(_FLAGS, texts, wanted, strict=True):
            if add and text is None:
                log.warning("%s sets %s without naming the token: none is added", self.folder, flag)
        _set_parts(backend, post_processor=_template(backend, *texts))


def has_tokenizer(folder: str | Path) -> bool:
    """Whether the folder contains any tokenizer file."""
    return any(path.name in _FILES or path.suffix in _SUFFIXES for path in Path(folder).iterdir())


def _text(token: Any) -> str:
    """Of a token as the files write it: a text, or an object with `content`."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else ""


def _special(value: Any) -> Any:
    """A token of special_tokens_map.json, which says of none that it is special."""
    return {**value, "special": True} if isinstance(value, dict) and "content" in value else value


def _added_token(token: Mapping[str, Any], in_file: AddedToken | None, *, special: bool) -> AddedToken:
    said = {key: bool(token[key]) for key in _ATTRIBUTES if key in token}
    options = {"normalized": not said.get("special", False), **said}
    if in_file is not None and not in_file.normalized:  # it is found in texts as they come, whatever comes later
        options["normalized"] = False
    return AddedToken(_text(token), **{**options, "special": special or said.get("special", False)})


def _state(part: Any) -> dict[str, Any]:
    """A normalizer, pre-tokenizer or decoder as tokenizer.json writes it; {} for None."""
    state: dict[str, Any] = json.loads(part.__getstate__()) if part is not None else {}
    return state


def _set_parts(backend: Tokenizer, **parts: Any) -> None:
    """Gives the tokenizer these parts, as tokenizer.json writes them."""
    empty = {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}
    made = Tokenizer.from_str(json.dumps({**empty, **parts}))
    for name in parts:
        setattr(backend, name, getattr(made, name))


def _with_prefix_space(part: Any, flag: bool) -> Any:
    """The same with this `add_prefix_space` wherever there is one."""
    if isinstance(part, list):
        return [_with_prefix_space(one, flag) for one in part]
    if not isinstance(part, dict):
        return part
    return {key: flag if key == "add_prefix_space" else _with_prefix_space(one, flag) for key, one in part.items()}


def _template(backend: Tokenizer, bos: str | None, eos: str | None) -> dict[str, Any]:
    """A post-processor that puts these tokens at the ends of a text, and of each text of a pair."""

    def ends(text: str, number: int) -> list[dict[str, Any]]:
        first, last = ([{"SpecialToken": {"id": one, "type_id": number}}] if one else [] for one in (bos, eos))
        return [*first, {"Sequence": {"id": text, "type_id": number}}, *last]

    tokens = {one: {"id": one, "ids": [backend.token_to_id(one)], "tokens": [one]} for one in (bos, eos) if one}
    single = ends("A", 0)
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, *ends("B", 1)], "special_tokens": tokens}
