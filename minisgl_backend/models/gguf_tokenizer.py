"""tokenizer.json and tokenizer_config.json of a GGUF file, which has a vocabulary and names of rules: tokens are those
of llama.cpp. Needs neither torch nor tokenizers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.gguf_splits import DEFAULT, PRE_TOKENIZERS, PreTokenizer
from minisgl_backend.weights.gguf_header import GGUFHeader

log = logging.getLogger(__name__)

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # values of tokenizer.ggml.token_type
_BLANK = "\u2581"  # a space, in tokens that are not spelled in bytes
# Tokens that end an output; metadata often does not name them, and llama.cpp recognises them by their texts.
_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
)
_ENDS_OF_FILES = (
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
)
_KEYS_OF_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# Where the others are, these do not end an output.
_NO_ENDS = (
    ({"<|return|>", "<|call|>"}, "<|end|>"),
    ({"<|calls|>", "<|flush|>"}, "<|end|>"),
    ({"<|tool_response>"}, "</s>"),
)
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
_SENTENCEPIECE, _BPE, _GEMMA4 = "llama", "gpt2", "gemma4"
_MODELS = (_BPE, _SENTENCEPIECE, _GEMMA4)
_DEFAULT_IDS = {_SENTENCEPIECE: {"bos": 1, "eos": 2, "unk": 0}}  # llama.cpp's, by tokenizer.ggml.model


class GGUFTokenizer:
    """What the metadata of a GGUF file say of its tokenizer.

    Raises ConfigError, naming the key, for what is missing, contradicts itself or is not known.
    """

    def __init__(self, header: GGUFHeader) -> None:
        self._file, self._metadata = header.files[0], header.metadata
        self._kind = self._get("model")
        if self._kind not in _MODELS:
            self._refuse("model", ", ".join(_MODELS))
        self._tokens = [text or f"[EMPTY_{number}]" for number, text in enumerate(self._list("tokens"))]
        self._ids = {text: number for number, text in enumerate(self._tokens)}
        if len(self._ids) != len(self._tokens):
            raise ConfigError(f"{self._file}: tokenizer.ggml.tokens has a text twice, so that no text has one token")
        count = len(self._tokens)
        self._types = self._list("token_type", count) if self._has("token_type") else [_NORMAL] * count
        self._pre = self._pre_tokenizer()

    def files(self) -> dict[str, Any]:
        """The contents of both files, by name."""
        return {"tokenizer.json": self._tokenizer(), "tokenizer_config.json": self._config()}

    @cached_property
    def ends(self) -> list[int]:
        """The tokens that end an output, as in llama.cpp: end of text, of a turn, of a file."""
        named = [number for key in _KEYS_OF_ENDS if (number := self._id(key)) is not None]
        found = dict.fromkeys((*named, *self._known_ends))
        for others, text in _NO_ENDS:
            if text in self._ids and others <= self._ids.keys():
                found.pop(self._ids[text], None)
        return list(found)

    @cached_property
    def _known_ends(self) -> list[int]:
        """By their texts, also where a type is wrong; but Qwen's ordinary token </s> is that of HTML."""
        numbers = [self._ids[text] for text in (*_ENDS, *_ENDS_OF_FILES) if text in self._ids]
        return [number for number in numbers if self._types[number] != _NORMAL or "|" in self._tokens[number]]

    def special_id(self, name: str) -> int | None:
        """The token of `bos`, `eos`, `unk`, `pad`, `sep` or `mask`."""
        return self._id(_SPECIAL[name], _DEFAULT_IDS.get(self._kind, {}).get(name))

    def _get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def _has(self, key: str) -> bool:
        return self._get(key) is not None

    def _refuse(self, key: str, allowed: str) -> Any:
        raise ConfigError(f"{self._file}: tokenizer.ggml.{key} is {self._get(key)!r:.200}; allowed: {allowed}")

    def _list(self, key: str, count: int | None = None) -> Sequence[Any]:
        found = self._get(key)
        if not isinstance(found, list) or (count is not None and len(found) < count):
            has = f"{len(found)} entries" if isinstance(found, list) else "no list"
            raise ConfigError(f"{self._file}: tokenizer.ggml.{key} has {has}; allowed: one for each token")
        return found

    def _flag(self, key: str, default: bool) -> bool:
        found = self._get(key, default)
        if not isinstance(found, bool):
            self._refuse(key, "true, false")
        return bool(found)

    def _id(self, key: str, default: int | None = None) -> int | None:
        found = self._get(f"{key}_token_id")
        if found is not None and (not isinstance(found, int) or not 0 <= found < len(self._tokens)):
            log.warning(
                "%s: tokenizer.ggml.%s_token_id is %r, which is no token; it is left out", self._file, key, found
            )
            found = None
        found = default if found is None else found
        return found if found is not None and found < len(self._tokens) else None

    def _pre_tokenizer(self) -> PreTokenizer | None:
        if self._kind == _SENTENCEPIECE:
            return None
        name = "gemma4" if self._kind == _GEMMA4 else self._get("pre")
        if not name:
            log.warning(
                "%s has no tokenizer.ggml.pre, which says how texts are cut into words; llama.cpp's default is taken, "
                "and answers may be worse than the model's. A file made by today's llama.cpp has it",
                self._file,
            )
            name = DEFAULT
        if name not in PRE_TOKENIZERS:
            self._refuse("pre", "the pre-tokenizers of llama.cpp that docs/models.md lists")
        return PRE_TOKENIZERS[name]

    @property
    def _byte_level(self) -> bool:
        return self._pre is not None and self._pre.byte_level

    @property
    def _blank_before(self) -> bool:
        """Whether a text, and what follows a special token, begins with a blank."""
        return self._pre is None and self._flag("add_space_prefix", True)

    def _config(self) -> dict[str, Any]:
        special = {f"{name}_token": self.special_id(name) for name in _SPECIAL}
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        config |= {name: self._tokens[number] for name, number in special.items() if number is not None}
        template = self._metadata.get("tokenizer.chat_template")
        named = {name: self._metadata.get(f"tokenizer.chat_template.{name}") for name in self._template_names()}
        templates = {"default": template, **named} if named else {}
        if templates:
            config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items() if text]
        elif template:
            config["chat_template"] = template
        return config

    def _template_names(self) -> Iterable[str]:
        names = self._metadata.get("tokenizer.chat_templates", ())
        return [str(name) for name in names if name != "default"]

    def _tokenizer(self) -> dict[str, Any]:
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": list(self._added_tokens()),
            "normalizer": self._normalizer(),
            "pre_tokenizer": self._splits(),
            "post_processor": self._special_tokens(),
            "decoder": self._decoder(),
            "model": self._model(),
        }

    def _added_tokens(self) -> Iterator[dict[str, Any]]:
        """Tokens that are found in a text before anything else."""
        # llama.cpp knows Phi 3 by the file's name: blanks behind its special tokens belong to them.
        name = str(self._metadata.get("general.name", "")).lower()
        with_blanks = "phi-3" in name or "phi3" in name
        for number, (text, kind) in enumerate(zip(self._tokens, self._types, strict=False)):
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) or number in self._known_ends:
                yield {
                    "id": number,
                    "content": text,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": with_blanks and text not in ("<unk>", "<s>", "<|endoftext|>"),
                    "normalized": False,
                    "special": kind != _USER_DEFINED or number in self._known_ends,
                }

    def _normalizer(self) -> dict[str, Any] | None:
        if self._byte_level:
            return None
        blanks = {"type": "Replace", "pattern": {"String": " "}, "content": _BLANK}
        if not self._blank_before:
            return blanks
        return {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _BLANK}, blanks]}

    def _splits(self) -> dict[str, Any] | None:
        if self._pre is None:
            return None
        steps: list[dict[str, Any]] = [
            {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
            for split in self._pre.splits
        ]
        if self._byte_level:
            steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
        return {"type": "Sequence", "pretokenizers": steps}

    def _special_tokens(self) -> dict[str, Any] | None:
        """Those that come before, between and behind texts."""
        add_bos = self._pre.add_bos if self._pre else True
        wanted = {
            "bos": self._flag("add_bos_token", add_bos),
            "eos": self._flag("add_eos_token", False),
            "sep": self._flag("add_sep_token", False),
        }
        tokens = {}
        for name, is_added in wanted.items():
            if is_added:
                number = self.special_id(name)
                if number is None:
                    key = _SPECIAL[name]
                    raise ConfigError(
                        f"{self._file}: texts get a token ({name}) that tokenizer.ggml.{key}_token_id does not name; "
                        f"allowed: it, or tokenizer.ggml.add_{name}_token false"
                    )
                tokens[name] = number
        if not tokens:
            return None

        def step(name: str) -> list[dict[str, Any]]:
            return [{"SpecialToken": {"id": self._tokens[tokens[name]], "type_id": 0}}] if name in tokens else []

        def text(letter: str) -> dict[str, Any]:
            return {"Sequence": {"id": letter, "type_id": 0}}

        return {
            "type": "TemplateProcessing",
            "single": [*step("bos"), text("A"), *step("eos")],
            "pair": [*step("bos"), text("A"), *step("eos"), *step("sep"), text("B"), *step("eos")],
            "special_tokens": {
                text: {"id": text, "ids": [number], "tokens": [text]}
                for number in tokens.values()
                for text in [self._tokens[number]]
            },
        }

    def _decoder(self) -> dict[str, Any]:
        if self._byte_level:
            return {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
        steps: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": _BLANK}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if self._blank_before:
            steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        return {"type": "Sequence", "decoders": steps}

    def _model(self) -> dict[str, Any]:
        unknown = None if self._byte_level else self.special_id("unk")
        return {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if unknown is None else self._tokens[unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": unknown is not None,
            "byte_fallback": not self._byte_level,
            "ignore_merges": self._pre is not None and self._pre.ignore_merges,
            "vocab": self._ids,
            "merges": self._scored_merges() if self._pre is None else self._stored_merges(),
        }

    def _stored_merges(self) -> list[tuple[str, str]]:
        pairs = []
        for merge in self._list("merges"):
            blank = merge.find(" ", 1)
            first, second = merge[:blank], merge[blank + 1 :]
            if blank > 0 and first in self._ids and second in self._ids and first + second in self._ids:
                pairs.append((first, second))
        return pairs

    def _scored_merges(self) -> list[tuple[str, str]]:
        """SentencePiece's BPE merges whichever neighbours make the token with the best score."""
        scores = self._list("scores", len(self._tokens)) if self._has("scores") else [0.0] * len(self._tokens)
        found = []
        for number, text in enumerate(self._tokens):
            if self._types[number] in (_NORMAL, _UNUSED):
                for cut in range(1, len(text)):
                    first, second = self._ids.get(text[:cut]), self._ids.get(text[cut:])
                    if first is not None and second is not None:
                        found.append((-scores[number], first, second))
        found.sort()
        return [(self._tokens[first], self._tokens[second]) for _, first, second in found]
